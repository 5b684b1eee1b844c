"""The page and the picture of advice: every curve and number of the document, and text that stays text."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.report.reader import Reader, tables
from tests.report.test_page import HOSTILE

from tilewise.advice import Advice, Part, Point, product
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.report.advice import advice_text, advise_document
from tilewise.report.page import DocumentError, page
from tilewise.report.picture import draw_advice

SWEEP = product([GemmProblem(8, 16, 32, op) for op in ("NN", "NT")])
HEAD = {
    "target": "8x32:32x16",
    "device": "cpu",
    "environment": "here",
    "options": {"dtype": "fp32"},
}


def point(columns: int, rows: int, rate: float, torch_rate: float = 0.5) -> Point:
    problems = SWEEP.problems((columns, 32, rows))
    parts = [
        Part(p, p.flops / rate / 1e9, "thin_gemm", "thin_gemm lanes=8", p.flops / torch_rate / 1e9, checked=True)
        for p in problems
    ]
    return Point((columns, 32, rows), rows, tuple(parts))


def advice() -> Advice:
    points = (point(16, 8, 1.0), point(16, 9, 0.6), point(16, 10, 1.2), point(17, 8, 1.1), point(17, 10, 2.0))
    return Advice(SWEEP, "plans", points, (), True, 12.5, ("cliff at rows 8 to 9",))


@pytest.fixture
def document() -> dict[str, Any]:
    return advise_document(HEAD, advice())


def test_the_page_has_each_curve_and_number(document) -> None:
    reader = Reader(page(document))
    found = tables(reader)
    named = found["Sizes worth naming"]
    assert named[0][:5] == ["columns", "depth", "rows", "samples/s", "of asked"]
    assert named[1][:3] == ["16", "32", "8"]
    assert any("most samples a second" in row[-2] and row[:3] == ["17", "32", "10"] for row in named)
    assert len(found["All points"]) == 1 + 5
    assert {len(row) for row in found["All points"]} == {8}
    # Two layers with several mini-batches, two operations each, with torch's.
    curves = reader.find("path", **{"class": "curve"})
    assert len(curves) == 8
    assert sorted(curve["attributes"]["d"].count("L") + 1 for curve in curves) == [2] * 4 + [3] * 4
    assert len(reader.find("path", **{"class": "torch"})) == 4
    assert "cliff at rows 8 to 9" in page(document)


def test_text_in_a_document_stays_text(document) -> None:
    hostile = copy.deepcopy(document)
    hostile["target"] = hostile["device"] = hostile["why"][0] = HOSTILE
    hostile["axes"][0]["name"] = HOSTILE
    for each in (hostile["asked"], *hostile["points"], *(named["point"] for named in hostile["named"])):
        each["sizes"][HOSTILE] = each["sizes"].pop("columns")
        each["parts"][0]["plan"] = each["parts"][0]["problem"]["pass"] = HOSTILE
    reader = Reader(page(hostile))
    assert len(reader.find("script")) == 1
    assert not reader.find("img")


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        (("version",), 2, "version=2"),
        (("batch_axis",), "time", "batch_axis='time'"),
        (("asked",), None, "asked: missing"),
        (("points", 0, "sizes"), {"rows": 8}, "points[0].sizes: a size for each of"),
        (("points", 1, "tflops"), "fast", "points[1].tflops='fast'"),
        (("named", 0, "point", "ms"), -1, "named[0].point.ms=-1"),
        (("why",), [1], "why[0]=1"),
    ],
)
def test_what_is_wrong_in_a_document_is_named(document, where, value, says) -> None:
    place: Any = document
    for name in where[:-1]:
        place = place[name]
    place[where[-1]] = value
    with pytest.raises(DocumentError) as raised:
        page(document)
    assert says in str(raised.value)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_is_drawn(tmp_path, ending) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"advice.{ending}"
    draw_advice(advice(), HEAD, str(path))
    assert path.stat().st_size > 1000
    if ending == "svg":
        text = path.read_text("utf-8")
        assert all(word in text for word in ("columns 16", "columns 17", "torch's own", "TFLOP/s"))


def test_nothing_without_a_time_breaks_it(tmp_path) -> None:
    parts = tuple(Part(p, None, reason="no plan keeps the limit") for p in SWEEP.problems(SWEEP.asked))
    lost = Advice(SWEEP, "torch", (Point(SWEEP.asked, 8, parts),), (), False, 1.0)
    assert "stopped before all was measured" in advice_text(lost)
    assert "no plan keeps the limit" in page(advise_document(HEAD, lost))
    pytest.importorskip("matplotlib")
    draw_advice(lost, HEAD, str(tmp_path / "none.png"))
