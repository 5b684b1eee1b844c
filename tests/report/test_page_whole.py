"""The network at one look: lengths, areas and places are the document's, and no figure contradicts another."""

from __future__ import annotations

import copy
import itertools
import math
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.reader import Reader, inner, mib, ms, parts_of, table_of, text_of
from tests.report.schedules import schedule

from tilewise.report.page import DocumentError, page
from tilewise.report.page.treemap import squarified

TIMED = schedule(6, kind="time", seed=3)
COMPARED = {
    "torch_ms": 98.0, "planned_ms": 65.0, "speedup": 1.5, "least": 1.45, "most": 1.55, "pairs": 21,
    "torch_host_ms": 12.0, "planned_host_ms": 30.0, "torch_device_ms": 97.0, "planned_device_ms": 64.0,
    "taken_back": 0, "kept": True, "reason": "",
}  # fmt: skip


def step_of(document: dict[str, Any]) -> tuple[float, float]:
    return tuple(document["training_step"][side]["step_ms"] for side in ("framework", "planned"))


def layers_ms(document: dict[str, Any], taken_back: frozenset[str] = frozenset()) -> tuple[float, float]:
    """What both sides take in the passes of all layers."""
    torch = planned = 0.0
    for layer, found in parts_of(document):
        if found["plan"] is None:
            continue
        by_plan = found["replaced"] and found["problem"]["key"] not in taken_back
        torch += found["framework_ms"] * len(layer["names"])
        planned += (found["planned_ms"] if by_plan else found["framework_ms"]) * len(layer["names"])
    return torch, planned


def with_step(document: dict[str, Any], scale: float, **compared: Any) -> dict[str, Any]:
    """``document`` whose steps are ``scale`` times as long as their layers."""
    document = copy.deepcopy(document)
    for side, own in zip(("framework", "planned"), layers_ms(document), strict=True):
        document["training_step"][side]["step_ms"] = own * scale
    document["training_step"]["compared"] = {**COMPARED, **compared}
    document["training_step"]["taken_back"] = []
    return document


def lines_of(reader: Reader) -> list[dict[str, Any]]:
    """The time lines of divided plans."""
    return [n for n in reader.find("figure") if [r for r in inner(n, "rect") if "seg" in r["attributes"]["class"]]]


def whole(document: dict[str, Any]) -> dict[str, Any]:
    (figure,) = Reader(page(document)).find("figure", **{"class": "whole"})
    return figure


def test_a_step_is_a_bar_of_its_layers_and_the_rest():
    document = with_step(TIMED, 1.6)
    figure = whole(document)
    longest = max(step_of(document))
    # A swatch of the legend has its width in pixels.
    boxes = [n["attributes"] for n in inner(figure, "rect") if n["attributes"]["width"].endswith("%")]
    drawn = [(box["class"], float(box["width"].rstrip("%"))) for box in boxes if box["class"] != "ho"]
    wanted = []
    for kind, step, own in zip(("fw", "pl"), step_of(document), layers_ms(document), strict=True):
        wanted += [("ot", 100 * step / longest), (kind, 100 * own / longest)]
    assert [kind for kind, _ in drawn] == [kind for kind, _ in wanted]
    assert [width for _, width in drawn] == pytest.approx([width for _, width in wanted], abs=0.01)
    shown = text_of(figure)
    for step, own in zip(step_of(document), layers_ms(document), strict=True):
        assert f"convolutions {ms(own)} ms" in shown
        assert f"the rest {ms(step - own)} ms" in shown
    assert f"{step_of(document)[0] / step_of(document)[1]:.2f}x" in shown
    assert "1.50x (95 % between 1.45 and 1.55) over 21 pairs of steps" in shown


def test_layers_that_take_longer_than_their_step_are_not_drawn_into_it():
    figure = whole(with_step(TIMED, 0.5))
    assert "longer than the whole step" in text_of(figure)
    assert "the rest" not in text_of(figure)
    boxes = [n["attributes"] for n in inner(figure, "rect") if n["attributes"]["width"].endswith("%")]
    assert [box["class"] for box in boxes if box["class"] != "ho"] == ["fw", "pl"]


def test_a_pass_that_was_taken_back_counts_as_torch_s():
    document = with_step(TIMED, 2.0)
    key = next(found["problem"]["key"] for _, found in parts_of(document) if found["replaced"])
    document["training_step"]["taken_back"] = [key]
    torch, planned = layers_ms(document, frozenset([key]))
    shown = text_of(whole(document))
    assert f"convolutions {ms(torch)} ms" in shown
    assert f"convolutions {ms(planned)} ms" in shown
    assert ms(layers_ms(document)[1]) not in shown
    assert "taken back" in text_of(Reader(page(document)).find("ol", id="rows")[0])


def test_a_step_that_is_not_surely_faster_says_so():
    shown = text_of(whole(with_step(TIMED, 1.6, speedup=1.01, least=0.98, most=1.04)))
    assert "no difference beyond noise" in shown
    assert "outside of that interval" in shown
    stays = text_of(whole(with_step(TIMED, 1.6, kept=False)))
    assert "torch's own step stays" in stays
    torch = layers_ms(TIMED)[0]
    assert stays.count(f"convolutions {ms(torch)} ms") >= 2


def test_launches_by_the_host_are_drawn_on_a_gpu_alone():
    document = with_step(TIMED, 1.6)
    figure = whole(document)
    assert "launches it in 30.00 ms" in text_of(figure)
    assert [n["attributes"]["class"] for n in inner(figure, "rect")].count("ho") >= 2
    for _, found in parts_of(document):
        found["problem"]["device"] = "cpu"
    assert "launches" not in text_of(whole(document))


def test_a_plan_alone_has_one_bar():
    document = schedule(3)
    total = sum(found["plan"]["time_ms"] * len(layer["names"]) for layer, found in parts_of(document) if found["plan"])
    figure = whole(document)
    assert f"All convolutions: {ms(total)} ms, as timed when planning" in text_of(figure)


@pytest.mark.parametrize("kind", ["time", "plan"])
@pytest.mark.parametrize("with_steps", [False, True])
def test_where_most_times_are_doubtful_the_headline_says_so(kind: str, with_steps: bool) -> None:
    document = schedule(6, kind=kind, seed=3)
    if not with_steps:
        document.pop("training_step", None)
    found = [found for _, found in parts_of(document) if found["plan"]]
    for number, doubtful in ((0, False), (1, False), (len(found), True)):
        for each in found[:number]:
            each["busy"] = True
        reader = Reader(page(document))
        (lead,) = [n for n in reader.find("figcaption") if n["attributes"].get("class") == "lead"]
        assert ("Doubtful: other processes kept the host busy while most of" in text_of(lead)) is doubtful
        cards = [text_of(card) for card in reader.find("dl") if card["attributes"].get("class") == "cards"]
        assert any("doubtful: the host was busy" in card for card in cards) is doubtful


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=60))
def test_a_treemap_fills_its_place_with_areas_as_its_values(values):
    values.sort(reverse=True)
    width, height = 660.0, 264.0
    boxes = squarified(values, width, height)
    for (_, _, wide, high), value in zip(boxes, values, strict=True):
        assert wide * high == pytest.approx(value / sum(values) * width * height, rel=1e-6)
    for left, top, wide, high in boxes:
        assert left >= -1e-6
        assert left + wide <= width + 1e-6
        assert top >= -1e-6
        assert top + high <= height + 1e-6
    for (a, b, c, d), (e, f, g, h) in itertools.combinations(boxes, 2):
        across, down = min(a + c, e + g) - max(a, e), min(b + d, f + h) - max(b, f)
        assert across <= 1e-6 or down <= 1e-6


def test_cells_of_the_treemap_lead_to_the_longest_pass_of_their_layer():
    reader = Reader(page(TIMED))
    wanted = {}
    number = 0
    for layer in TIMED["layers"]:
        times = []
        for found in layer["passes"]:
            own = (found["planned_ms"] or found["framework_ms"]) if found["plan"] else 0.0
            times.append((own, number))
            number += 1
        total = sum(own for own, _ in times) * len(layer["names"])
        wanted[f"#pass-{max(times)[1]}"] = (layer["names"][0], total)
    for kind in ("wide", "narrow"):
        (drawing,) = reader.find("div", **{"class": kind})
        cells = inner(drawing, "a")
        assert {cell["attributes"]["href"] for cell in cells} == set(wanted)
        for cell in cells:
            name, total = wanted[cell["attributes"]["href"]]
            assert cell["attributes"]["aria-label"].startswith(name)
            assert f": {ms(total)} ms (" in cell["attributes"]["aria-label"]
        areas = {}
        for cell in cells:
            (box,) = inner(cell, "rect")
            areas[cell["attributes"]["href"]] = float(box["attributes"]["width"].rstrip("%")) * float(
                box["attributes"]["height"]
            )
        whole_area = sum(areas.values())
        everything = sum(total for _, total in wanted.values())
        for target, area in areas.items():
            assert area / whole_area == pytest.approx(wanted[target][1] / everything, rel=0.01)


def test_the_roofline_has_every_pass_below_its_roof():
    document = schedule(5, kind="time", seed=3)
    reader = Reader(page(document))
    (plot,) = reader.find("figure", **{"class": "roofline"})
    dots = inner(plot, "a")
    timed = [found for _, found in parts_of(document) if found["plan"]]
    assert len(dots) == len(timed)
    rows = table_of(reader, "Rates by")
    rates = {}
    for number, (_, found) in enumerate(parts_of(document)):
        own = found["planned_ms"] or found["framework_ms"]
        rates[number] = found["problem"]["flops"] / own / 1e6
    places = []
    for dot in dots:
        number = int(dot["attributes"]["href"].removeprefix("#pass-"))
        circle = inner(dot, "circle")[-1]["attributes"]
        found = parts_of(document)[number][1]["problem"]
        places.append((math.log(rates[number]), float(circle["cy"]), math.log(found["flops"] / found["bytes"]),
                       float(circle["cx"].rstrip("%"))))  # fmt: skip
    # Both axes are logarithmic: places are straight lines of the logarithms.
    for value, place in ((0, 1), (2, 3)):
        (low, high) = (pick(places, key=lambda p: p[value]) for pick in (min, max))
        slope = (high[place] - low[place]) / (high[value] - low[value])
        for point in places:
            assert point[place] == pytest.approx(low[place] + slope * (point[value] - low[value]), abs=0.2)
    assert len(rows) == len(dots)
    roof = [float(n["attributes"]["y2"]) for n in inner(plot, "line") if n["attributes"]["class"] == "roof"]
    assert min(roof) == pytest.approx(min(place[1] for place in places), abs=0.1)


@pytest.mark.parametrize(
    ("moved", "computed"), [(1e12, 2e12), (1e12, 1e16), (1e18, 3e13), (2.0, 1e18), (1e15, 2.0)], ids=str
)
def test_the_roof_is_what_the_device_was_measured_to_reach(moved, computed):
    document = schedule(5, kind="time", seed=3) | {"rates": {"bytes_per_second": moved, "flops_per_second": computed}}
    reader = Reader(page(document))
    (plot,) = reader.find("figure", **{"class": "roofline"})
    places = {}
    for dot in inner(plot, "a"):
        found = parts_of(document)[int(dot["attributes"]["href"].removeprefix("#pass-"))][1]
        flops, ms = found["problem"]["flops"], found["planned_ms"] or found["framework_ms"]
        circle = inner(dot, "circle")[-1]["attributes"]
        places[float(circle["cx"].rstrip("%")), float(circle["cy"])] = (
            flops / found["problem"]["bytes"],
            flops / ms / 1e6,
        )
    (x0, y0), (x1, y1) = min(places), max(places)
    left, right = places[x0, y0][0], places[x1, y1][0]
    low, high = min(places, key=lambda at: at[1]), max(places, key=lambda at: at[1])
    per_rate = (high[1] - low[1]) / math.log(places[high][1] / places[low][1])
    ends = [n["attributes"] for n in inner(plot, "line") if n["attributes"]["class"] == "roof"]
    assert ends
    for end in ends:
        for x, y in ((end["x1"], end["y1"]), (end["x2"], end["y2"])):
            at = left * (right / left) ** ((float(x.rstrip("%")) - x0) / (x1 - x0))
            rate = places[low][1] * math.exp((float(y) - low[1]) / per_rate)
            assert math.log(rate) == pytest.approx(math.log(min(computed, moved * at) / 1e9), abs=0.05)
    assert min(float(end["y2"]) for end in ends) >= -0.5
    words = page(document)
    assert "what this device was measured to reach" in words
    assert "any pass of this page reached" not in words


def test_rates_that_are_none_are_named():
    for rates, says in (({"bytes_per_second": "fast"}, "rates.bytes_per_second='fast'"), ([], "rates")):
        with pytest.raises(DocumentError, match=says):
            page(schedule(1) | {"rates": rates})
    for rates in (None, {}, {"bytes_per_second": 0, "flops_per_second": 1e12}):
        assert "any pass of this page reached" in page(schedule(1) | {"rates": rates})


def test_kernels_of_a_step_are_as_wide_as_they_take():
    document = schedule(4)
    (plot,) = Reader(page(document)).find("figure", **{"class": "timeline"})
    by_name = {(n, p["problem"]["pass"]): p["plan"]["time_ms"] for layer, p in parts_of(document) if p["plan"]
               for n in layer["names"]}  # fmt: skip
    times = [by_name[m["layer"], m["pass"]] for m in document["step_memory"]["moments"]]
    kernels = [n["attributes"] for n in inner(plot, "rect") if "kernel" in n["attributes"]["class"]]
    ends = list(itertools.accumulate(times))
    lefts = [float(k.get("x", "0%").rstrip("%")) for k in kernels]
    assert lefts == pytest.approx(
        [100 * (end - own) / ends[-1] for end, own in zip(ends, times, strict=True)], abs=0.01
    )
    memory = [n["attributes"] for n in inner(plot, "rect") if n["attributes"]["class"] == "al"]
    assert {m.get("x", "0%") for m in memory} <= {k.get("x", "0%") for k in kernels}
    assert f"{ms(ends[-1])} ms of kernels" in text_of(plot)


def test_kernels_without_times_have_one_width_and_a_word():
    document = schedule(3)
    document["step_memory"]["moments"][0]["layer"] = "not_in_the_document"
    reader = Reader(page(document))
    (plot,) = reader.find("figure", **{"class": "timeline"})
    kernels = [n["attributes"]["width"] for n in inner(plot, "rect") if "kernel" in n["attributes"]["class"]]
    assert len(set(kernels)) == 1
    assert "one width: 1 of" in text_of(reader.root)


def test_a_plan_above_its_own_front_is_marked_with_the_reason():
    document = schedule(3, seed=1)
    layer, found = next((la, p) for la, p in parts_of(document) if p["front"] and len(p["front"]) > 1)
    said = "above the front: timed whole"
    assert said not in text_of(Reader(page(document)).root)
    found["plan"]["time_ms"] *= 1.25
    panels = [text_of(n) for n in Reader(page(document)).find("figure") if said in text_of(n)]
    assert len(panels) == 1
    assert layer["names"][0] in panels[0]
    assert "25%, above" in panels[0] or "25% above the front" in panels[0]


def test_divided_layers_are_counted_as_they_are_drawn():
    document = schedule(8, kind="time", seed=3)
    reader = Reader(page(document))
    lines = lines_of(reader)
    (card,) = [n for n in reader.find("div") if text_of(n).strip().startswith("divided")]
    assert document["summary"]["divided"] != len(lines)
    assert f"{len(lines)} of them different" in text_of(card)
    assert f"{len(lines)} lines for {document['summary']['divided']} layer-passes" in text_of(reader.root)


def test_a_line_of_parts_is_as_long_as_its_pass_takes():
    document = schedule(6, kind="time", seed=3)
    for _, found in parts_of(document):
        if found["plan"] and found["plan"]["children"]:
            found["planned_ms"] *= 2  # timed again: its parts took half of that when planned
    reader = Reader(page(document))
    for number, (_, found) in enumerate(parts_of(document)):
        if not (found["plan"] and found["plan"]["children"]):
            continue
        (line,) = [n for n in lines_of(reader) if inner(n, "a")[0]["attributes"]["href"] == f"#pass-{number}"]
        segments = [n["attributes"] for n in inner(line, "rect") if "seg" in n["attributes"]["class"]]
        scale = max(found["planned_ms"], found["framework_ms"])
        total = sum(float(s["width"].rstrip("%")) for s in segments)
        assert total == pytest.approx(100 * found["planned_ms"] / scale, abs=0.1)
        assert "its parts by themselves" in text_of(line)


def test_noise_is_neither_coloured_nor_listed():
    document = schedule(3, kind="time", seed=3, candidates=2)
    for _, found in parts_of(document):
        if not found["replaced"]:
            continue
        chosen = found["candidates"][0]
        assert (chosen["solver"], chosen["config"]) == (found["plan"]["solver"], found["plan"]["config"])
        chosen["dispersion"], chosen["runs"] = 0.5, 9
        found["planned_ms"] = found["framework_ms"] / 1.3
    reader = Reader(page(document))
    assert reader.find("span", **{"class": "up"}) == []
    assert "No layer-pass gains more than noise." in text_of(reader.root)
    (row, *_) = [n for n in reader.find("li") if [c for c in inner(n, "line") if "spread" in c["attributes"]["class"]]]
    assert "varies 50%" in text_of(row)
    assert "chosen, 9 runs" in text_of(row)


def test_the_chosen_plan_has_no_second_row_among_what_was_tried():
    document = schedule(2, candidates=4)
    reader = Reader(page(document))
    for number, (_, found) in enumerate(parts_of(document)):
        if found["plan"] is None:
            continue
        (row,) = reader.find("li", id=f"pass-{number}")
        (table,) = inner(row, "table")
        heads = [text_of(r["children"][0]).strip() for r in inner(table, "tr")]
        chosen = found["candidates"][0]
        config = " ".join(
            f"{k}={'x'.join(map(str, v)) if isinstance(v, list) else v}" for k, v in chosen["config"].items()
        )
        assert heads.count(f"{chosen['solver']} {config}".strip()) <= 1


def test_a_candidate_faster_than_the_plan_has_a_word():
    document = schedule(2, candidates=4)
    number, found = next((i, p) for i, (_, p) in enumerate(parts_of(document)) if p["plan"])
    other = next(c for c in found["candidates"][1:] if c["time_ms"])
    said = "faster when it was tried than the plan"
    assert said not in text_of(Reader(page(document)).root)
    other["time_ms"], other["workspace"] = found["plan"]["time_ms"] / 2, found["plan"]["workspace"]
    (row,) = Reader(page(document)).find("li", id=f"pass-{number}")
    assert said in text_of(row)


NAMES = [
    "שלום.עולם.קונבולוציה", "شبكة.طبقة", "🧠🔥.layer👩‍🔬", "<b>conv</b>&amp;\"'", "a" * 200, "", "x\u202ey",
    "层.卷积" * 20,
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_stay_in_one_piece_and_keep_their_direction_to_themselves(name):
    document = schedule(2, kind="time")
    document["layers"][0]["names"] = [name]
    for moment in document["step_memory"]["moments"][:2]:
        moment["layer"] = name
    reader = Reader(page(document))
    (row,) = reader.find("li", id="pass-0")
    found = inner(row, "bdi")[0]
    shown = text_of(found)
    assert len(shown) <= 30
    assert "wbr" not in {n["tag"] for n in reader.all}
    if len(name) > 30:
        assert found["attributes"]["title"] == name
        assert shown.startswith(name[:5])
        assert shown.endswith(name[-10:])
        assert name in text_of(row)
    else:
        assert shown == name.replace("\u202e", "\ufffd")


def test_what_is_shown_of_a_pass_is_one_time():
    document = schedule(4, kind="time", seed=3)
    reader = Reader(page(document))
    rates = {(r["layer"], r["pass"]): r["ms"] for r in table_of(reader, "Rates by")}
    for row in table_of(reader, f"{len(parts_of(document))} different layer-passes, framework and planned"):
        own = row["planned ms"] if row["planned ms"] != "-" else row["framework ms"]
        if own != "-":
            assert rates[row["layer"], row["pass"]] == own


def test_a_ratio_that_its_times_contradict_is_not_shown():
    document = schedule(2, kind="time", seed=3)
    number, found = next((i, p) for i, (_, p) in enumerate(parts_of(document)) if p["replaced"])
    found["ratio"] = 77.77
    reader = Reader(page(document))
    (row,) = reader.find("li", id=f"pass-{number}")
    assert "77.77" not in text_of(reader.root)
    assert f"{found['framework_ms'] / found['planned_ms']:.2f}x" in text_of(row)


def test_of_a_network_of_1000_layers_every_link_leads_somewhere_and_the_page_stays_small():
    document = schedule(1000, kind="time", candidates=1)
    start = time.process_time()
    text = page(document)
    # Bounds on growth, not measurements. Work that grows with the square of the layers would take minutes.
    assert time.process_time() - start < 30
    assert len(text.encode()) < 6 * 2**20
    assert mib(document["step_memory"]["peak"]) in text
    # Every link leads to a row, or to the table where shorter passes are.
    targets = set(re.findall(r'href="#([^"]*)"', text))
    assert len(targets) > 500
    ids = re.findall(r' id="(pass-[^"]*)"', text)
    assert targets <= {*ids, "main", *re.findall(r'<h2 id="([^"]*)"', text)}
    assert len(ids) == len(set(ids)) == len(parts_of(document))
