"""The page of a schedule: its numbers are the document's, nothing in a document gets out of its place."""

from __future__ import annotations

import copy
import itertools
import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.report.reader import Reader, inner, mib, ms, parts_of, table_of, text_of
from tests.report.schedules import MIB, schedule

from tilewise.report.page import DocumentError, page

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&<!--\x00\u202e]]>\ud800{}%s"


DOCUMENTS = {
    "plan": schedule(5),
    "time": schedule(6, kind="time", policy="paper_wd", seed=3),
    "bare": schedule(4, extras=False),
    "empty": schedule(0),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_well_formed_and_by_itself(name):
    text = page(DOCUMENTS[name])
    reader = Reader(text)
    ids = [node["attributes"]["id"] for node in reader.all if "id" in node["attributes"]]
    assert len(ids) == len(set(ids))
    for node in reader.find("a"):
        assert node["attributes"]["href"].removeprefix("#") in ids
        assert node["attributes"]["href"].startswith("#")
    for node in reader.all:
        assert not {"src", "srcset", "data", "action", "style", "xlink:href", "background"} & set(node["attributes"])
        assert not any(key.startswith("on") for key in node["attributes"]), node["attributes"]
        assert node["tag"] not in {"link", "img", "iframe", "object", "embed", "base", "image", "use", "video", "audio"}
    assert "@import" not in text
    assert re.findall(r"url\(([^)]*)\)", text) == re.findall(r"url\((#p-[a-z0-9]+)\)", text)
    assert {target.removeprefix("url(#").removesuffix(")") for target in re.findall(r"url\(#[^)]*\)", text)} <= set(ids)
    assert "://" not in text
    for drawing in reader.find("svg"):
        titled = [child for child in drawing["children"] if not isinstance(child, str) and child["tag"] == "title"]
        assert drawing["attributes"].get("aria-hidden") == "true" or text_of(titled[0]).strip()
    levels = [int(node["tag"][1]) for node in reader.all if re.fullmatch(r"h[1-6]", node["tag"])]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    assert [len(reader.find(tag)) for tag in ("header", "nav", "main", "footer")] == [1, 1, 1, 1]


def test_the_policy_lets_in_the_page_s_own_style_and_script_alone():
    import base64
    import hashlib

    reader = Reader(page(DOCUMENTS["plan"]))
    (meta,) = [n for n in reader.find("meta") if n["attributes"].get("http-equiv") == "Content-Security-Policy"]
    policy = dict(rule.strip().split(" ", 1) for rule in meta["attributes"]["content"].split(";"))
    assert policy.pop("default-src") == policy.pop("base-uri") == policy.pop("form-action") == "'none'"
    for kind in ("style", "script"):
        (node,) = reader.find(kind)
        digest = base64.b64encode(hashlib.sha256(text_of(node).encode()).digest()).decode()
        assert policy.pop(f"{kind}-src") == f"'sha256-{digest}'"
    assert not policy


@pytest.mark.parametrize("name", ["plan", "time"])
def test_numbers_are_the_document_s(name):
    document = DOCUMENTS[name]
    reader = Reader(page(document))
    rows = table_of(reader, f"{len(parts_of(document))} different layer-passes, framework and planned")
    for row, (layer, found) in zip(rows, parts_of(document), strict=True):
        plan = found["plan"]
        title = layer["names"][0] + (f" x{len(layer['names'])}" if len(layer["names"]) > 1 else "")
        assert (row["layer"], row["pass"], row["problem"]) == (
            title,
            found["problem"]["pass"],
            found["problem"]["layer"],
        )
        assert row["framework ms"] == ms(found["framework_ms"])
        assert row["planned ms"] == ms(found["planned_ms"])
        assert row["speed-up"] == ("-" if found["ratio"] is None else f"{found['ratio']:.2f}x")
        assert row["ms when planned"] == ms(plan and plan["time_ms"])
        assert row["workspace"] == ("-" if plan is None else mib(plan["workspace"]))
    sizes = table_of(reader, "Memory of each pass")
    assert [row["operands and result"] for row in sizes] == [mib(p["problem"]["bytes"]) for _, p in parts_of(document)]
    moments = table_of(reader, "Memory while each kernel runs")
    for row, moment in zip(moments, document["step_memory"]["moments"], strict=True):
        total = moment["alive"] + moment["result"] + moment["workspace"]
        assert [row["alive"], row["result"], row["workspace"], row["in all"]] == [
            *(mib(moment[key]) for key in ("alive", "result", "workspace")),
            mib(total),
        ]
        assert row["left"] == mib(document["step_memory"]["limit"] - total)
    segments = table_of(reader, "Segments")
    for row, segment in zip(segments, document["budget"]["segments"], strict=True):
        assert (row["layer"], row["pass"], row["workspace"]) == (
            segment["layer"],
            segment["pass"],
            mib(segment["workspace"]),
        )
    front = table_of(reader, "Fronts")
    points = [point for _, p in parts_of(document) for point in p["front"] or ()]
    assert [(r["ms"], r["workspace"]) for r in front] == [(ms(p["time_ms"]), mib(p["workspace"])) for p in points]
    assert sum(row["chosen"] == "chosen" for row in front) == sum(p["plan"] is not None for _, p in parts_of(document))


def test_a_document_of_version_1_names_the_memory_of_a_step_step():
    old = {key: value for key, value in SMALL.items() if key != "step_memory"} | {"step": SMALL["step_memory"]}
    assert page(old | {"version": 1}) == page(SMALL)


def test_summary_and_gains():
    document = DOCUMENTS["time"]
    reader = Reader(page(document))
    (cards,) = reader.find("dl", **{"class": "cards"})
    shown, total = text_of(cards), document["summary"]
    for words in (
        f"framework {ms(total['framework_ms'])} ms, planned {ms(total['planned_ms'])} ms",
        f"{total['framework_ms'] / total['planned_ms']:.2f}x",
        f"{total['geometric_mean']:.2f}x",
        f"{total['replaced']} of {total['passes']}",
        mib(document["budget"]["used"]),
        mib(document["step_memory"]["peak"]),
    ):
        assert words in shown
    saved = []
    for number, (layer, found) in enumerate(parts_of(document)):
        if found["planned_ms"] is not None:
            saved.append(((found["framework_ms"] - found["planned_ms"]) * len(layer["names"]), number))
    saved.sort(reverse=True)
    items = inner(reader.find("ol", **{"class": "gains"})[0], "li")
    assert len(items) == 5
    for item, (value, number) in zip(items, saved, strict=False):
        assert f"saves {ms(value)} ms" in text_of(item)
        assert inner(item, "a")[0]["attributes"]["href"] == f"#pass-{number}"


def test_bars_are_on_one_scale():
    document = DOCUMENTS["time"]
    reader = Reader(page(document))
    greatest = max(t for _, p in parts_of(document) for t in (p["framework_ms"], p["planned_ms"]) if t is not None)
    for number, (_, found) in enumerate(parts_of(document)):
        (row,) = reader.find("li", id=f"pass-{number}")
        bars = [(n["attributes"]["class"], float(n["attributes"]["width"].rstrip("%"))) for n in inner(row, "rect")]
        wanted = [("fw", found["framework_ms"])] + ([("pl", found["planned_ms"])] if found["planned_ms"] else [])
        assert [kind for kind, _ in bars] == [kind for kind, _ in wanted]
        assert [width for _, width in bars] == pytest.approx([100 * t / greatest for _, t in wanted], abs=0.01)


def test_a_row_opens_to_its_tree_and_to_what_was_tried():
    document = DOCUMENTS["plan"]
    reader = Reader(page(document))
    for number, (_, found) in enumerate(parts_of(document)):
        row = text_of(reader.find("li", id=f"pass-{number}")[0])
        if found["plan"] is None:
            assert found["reason"] in row
            continue
        nodes = [found["plan"]]
        while nodes:
            node = nodes.pop()
            nodes += node["children"]
            assert node["solver"] in row
            assert ms(node["time_ms"]) in row
            assert mib(node["workspace"]) in row
        assert "chosen" in row
        for candidate in found["candidates"]:
            assert (candidate["reason"] or ms(candidate["time_ms"])) in row
        assert "</" not in row  # markup is not escaped once more


def test_time_lines_show_every_part_in_sequence():
    plan_of = parts_of(DOCUMENTS["plan"])
    rows = table_of(Reader(page(DOCUMENTS["plan"])), "Parts of divided plans")
    divided = [found["plan"] for _, found in plan_of if found["plan"] and found["plan"]["children"]]
    wanted = []
    for plan in sorted(divided, key=lambda p: -p["time_ms"]):
        if plan["solver"] == "micro_batch":
            wanted += [("3", "64", "fft"), ("2", "32", "cudnn")]
        else:
            wanted += [("2", "128", "cudnn")] * 2
    assert [(row["parts"], row["size"], row["solver"].split()[0]) for row in rows] == wanted


def test_parts_at_once_lie_below_each_other():
    document = schedule(1, extras=False)
    leaf = document["layers"][0]["passes"][1]["plan"]
    whole = {**leaf, "solver": "partition", "config": {"sizes": [128, 128]}, "children": [leaf], "counts": [2]}
    document["layers"][0]["passes"][1]["plan"] = whole
    (line,) = [n for n in Reader(page(document)).find("figure") if "parts at once" in text_of(n)]
    places = [(n["attributes"].get("x", "0%"), float(n["attributes"]["y"])) for n in inner(line, "rect")]
    assert [x for x, _ in places] == ["0%", "0%"]
    assert places[0][1] < places[1][1]


def test_counts_of_any_size_are_drawn_by_runs():
    document = schedule(1)
    leaf = document["layers"][0]["passes"][1]["plan"]
    inside = {**leaf, "solver": "micro_batch", "children": [leaf, leaf], "counts": [10**15, 1], "config": {}}
    outside = {**leaf, "solver": "micro_batch", "children": [inside], "counts": [10**15], "config": {}}
    document["layers"][0]["passes"][1]["plan"] = outside
    assert len(page(document)) < 200_000


SMALL = schedule(2, kind="time", candidates=3)
PLAIN = Reader(page(SMALL))
TEXTS = [
    ("target",), ("device",), ("environment",), ("tilewise",), ("options", "dtype"), ("options", "rigor"),
    ("layers", 1, "names", 0), ("layers", 0, "left"), ("layers", 0, "passes", 0, "problem", "pass"),
    ("layers", 0, "passes", 0, "problem", "layer"), ("layers", 0, "passes", 0, "problem", "key"),
    ("layers", 0, "passes", 1, "plan", "solver"), ("layers", 0, "passes", 1, "plan", "label"),
    ("layers", 0, "passes", 1, "plan", "config", "product"), ("layers", 0, "passes", 1, "reason"),
    ("layers", 0, "passes", 1, "front", 0, "solver"), ("layers", 0, "passes", 1, "candidates", 0, "solver"),
    ("layers", 0, "passes", 1, "candidates", 1, "config", "knobs"),
    ("layers", 0, "passes", 1, "candidates", 2, "reason"),
    ("budget", "policy"), ("budget", "program", "method"), ("budget", "segments", 0, "layer"),
    ("budget", "segments", 0, "pass"), ("step_memory", "moments", 0, "layer"), ("step_memory", "moments", 0, "pass"),
]  # fmt: skip


def changed(document: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    document = copy.deepcopy(document)
    place: Any = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return document


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: ".".join(map(str, path)))
def test_hostile_text_stays_text(path):
    plain, hostile = PLAIN, page(changed(SMALL, path, HOSTILE))
    reader = Reader(hostile)
    for tag in ("script", "style", "img", "iframe", "html", "body", "form", "input"):
        assert len(reader.find(tag)) == len(plain.find(tag))
    # A name that is shortened is whole in a title; no other attribute may come from a document.
    assert {key for node in reader.all for key in node["attributes"]} <= {
        "title", *(key for node in plain.all for key in node["attributes"]),
    }  # fmt: skip
    assert "<!--" not in hostile
    assert not re.search("[\x00\u202e\ud800]", hostile)
    hostile.encode("utf-8")


def test_hostile_names_of_configs_stay_text():
    for place in (("plan", "config"), ("candidates", 0, "config")):
        document = changed(SMALL, ("layers", 0, "passes", 1, *place), {HOSTILE: [1, 2], "a": HOSTILE})
        assert len(Reader(page(document)).find("script")) == 1


@pytest.mark.parametrize("path", [
    ("target",), ("device",), ("environment",), ("tilewise",), ("options",), ("options", "workspace"), ("layers",),
    ("layers", 0, "names"), ("layers", 0, "transposed"), ("layers", 0, "left"), ("layers", 0, "passes"),
    *(("layers", 0, "passes", 1, name) for name in (
        "problem", "replaced", "plan", "reason", "framework_ms", "planned_ms", "ratio", "front", "candidates")),
    *(("layers", 0, "passes", 1, "problem", name) for name in ("key", "layer", "pass", "flops", "bytes")),
    *(("layers", 0, "passes", 1, "candidates", 1, name) for name in (
        "solver", "config", "time_ms", "framework_ms", "workspace", "error", "reason")),
    ("summary",), *(("summary", name) for name in ("passes", "replaced", "framework_ms", "geometric_mean", "worst")),
    *(("training_step", *more) for more in ((), ("framework",), ("planned", "peak"), ("ratio",))),
    ("budget",), *(("budget", name) for name in ("policy", "total", "used", "least", "segments", "program")),
    ("budget", "segments", 0, "time_ms"), ("budget", "segments", 0, "workspace"),
    ("step_memory",), *(("step_memory", name) for name in ("limit", "peak", "least", "moments")),
    ("step_memory", "moments", 0, "alive"),
], ids=lambda path: ".".join(map(str, path)))  # fmt: skip
def test_what_is_absent_or_null_stays_out(path):
    document = SMALL
    null = page(changed(document, path, None))
    Reader(null)
    assert null != page(document) or path[-1] in ("transposed", "left", "reason", "framework_ms", "key", "ratio")
    gone = copy.deepcopy(document)
    place: Any = gone
    for step in path[:-1]:
        place = place[step]
    del place[path[-1]]
    without = page(gone)
    assert without == null or path in (("options", "workspace"),)


def test_sections_of_absent_fields_are_left_out():
    bare = Reader(page(DOCUMENTS["bare"]))
    assert [n["attributes"]["id"] for n in bare.find("h2")] == [
        "summary", "map", "roofline", "layers", "batches", "fronts", "memory",
    ]  # fmt: skip
    shown = " ".join(text_of(bare.root).split())
    assert "tilewise time alexnet --json" in shown
    assert f"tilewise explain {parts_of(DOCUMENTS['bare'])[0][1]['problem']['layer']} --pass fprop" in shown


@pytest.mark.parametrize(("path", "value", "words"), [
    (("schema",), "tilewise/wisdom", "schema='tilewise/wisdom': tilewise/plan, tilewise/time or tilewise/advise"),
    (("version",), 3, "version=3"),
    (("layers",), {}, "layers=an object: a list would do"),
    (("layers", 0), 5, "layers[0]: an object would do, not 5"),
    (("layers", 0, "names", 0), 5, "layers[0].names[0]=5: text would do"),
    (("layers", 0, "passes", 0, "framework_ms"), -1.0, "layers[0].passes[0].framework_ms=-1.0"),
    (("layers", 0, "passes", 0, "framework_ms"), float("nan"), "framework_ms=nan"),
    (("layers", 0, "passes", 0, "planned_ms"), float("inf"), "planned_ms=inf"),
    (("layers", 0, "passes", 1, "plan", "workspace"), 10**400, "layers[0].passes[1].plan"),
    (("layers", 0, "passes", 1, "plan", "solver"), 5, "layers[0].passes[1].plan: solver=5"),
    (("layers", 0, "passes", 1, "front", 0, "counts"), [1], "layers[0].passes[1].front[0]: counts=[1]"),
    (("layers", 0, "passes", 1, "candidates", 1, "config"), {"a": None}, "layers[0].passes[1].candidates[1].config"),
    (("layers", 0, "passes", 1, "candidates", 1, "config"), {"a": 10**400}, "layers[0].passes[1].candidates[1].config"),
    (("budget", "segments", 0, "workspace"), 1.5, "budget.segments[0].workspace=1.5"),
    (("step_memory", "moments", 0, "alive"), True, "step_memory.moments[0].alive=True"),
], ids=str)  # fmt: skip
def test_what_is_wrong_is_named(path, value, words):
    with pytest.raises(DocumentError) as caught:
        page(changed(SMALL, path, value))
    assert words in str(caught.value)
    assert len(str(caught.value)) < 500


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from([0, 2**63 - 1, 5e-324, 1.7e308, 10**400, HOSTILE, [], {}, [[]], [None], {"": 0}]),
)  # fmt: skip


@settings(max_examples=100)
@given(st.data())
def test_any_document_is_a_page_or_refused(data):
    document = copy.deepcopy(SMALL)
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = document
        while True:
            name = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            deeper = isinstance(place[name], (dict, list)) and place[name]
            if not deeper or data.draw(st.integers(0, 9)) == 0:
                place[name] = copy.deepcopy(data.draw(SCALARS))  # a later turn may write into it
                break
            place = place[name]
        if not document:
            break
    try:
        text = page(document)
    except DocumentError:
        return
    assert len(Reader(text).find("script")) == 1


@pytest.mark.parametrize("document", [None, 5, "text", [], {}, {"schema": "tilewise/plan"}, {"version": 1}])
def test_no_document_at_all(document):
    with pytest.raises(DocumentError):
        page(document)


def test_an_empty_network_says_so():
    assert "no layers" in page(DOCUMENTS["empty"])
    assert "no layers" in page({"schema": "tilewise/plan", "version": 1})


def test_a_layer_left_to_torch_says_why():
    document = changed(DOCUMENTS["bare"], ("layers", 1, "passes"), [])
    document["layers"][1]["left"] = "float64 is not planned"
    (row,) = Reader(page(document)).find("li", **{"class": "left"})
    assert "left to torch: float64 is not planned" in text_of(row)


def test_a_network_of_200_layers_takes_little():
    document = json.loads(json.dumps(schedule(200, kind="time")))
    start = time.process_time()
    text = page(document)
    # A bound on growth, not a measurement: work that grows with the square of the layers would take a minute.
    assert time.process_time() - start < 5
    assert len(text.encode()) < 3 * MIB
