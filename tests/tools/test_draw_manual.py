"""The manual's pictures are what their script draws, and show what was measured."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from tools.draw_figures import cells_of, shade_of
from tools.svg import Drawing

from tilewise.notation import parse_layer
from tilewise.problem import Pass
from tools import draw_manual

ROOT = Path(__file__).parents[2]

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", draw_manual.DRAWN)
def test_a_picture_is_what_its_script_draws(name: str) -> None:
    drawn = str(draw_manual.DRAWN[name]())
    assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text("utf-8") == drawn, "python -m tools.draw_manual"
    pages = [path.read_text("utf-8") for path in (ROOT / "docs").rglob("*.md")]
    assert any(f"pictures/{name}.svg)" in page for page in pages)


@pytest.mark.parametrize("name", draw_manual.DRAWN)
def test_every_shape_is_within_the_picture_and_has_a_style(name: str) -> None:
    root = ElementTree.fromstring(str(draw_manual.DRAWN[name]()))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    style = root.findtext(f"{SVG}style") or ""
    for shape in root.iter():
        places = [float(shape.attrib[axis]) for axis in ("x", "cx") if axis in shape.attrib]
        levels = [float(shape.attrib[axis]) for axis in ("y", "cy") if axis in shape.attrib]
        corners = re.findall(r"([\d.-]+) ([\d.-]+)", shape.get("d", ""))
        assert all(0 <= x <= width for x in [*places, *(float(x) for x, _ in corners)])
        assert all(0 <= y <= height for y in [*levels, *(float(y) for _, y in corners)])
        assert all(f".{kind} {{" in style for kind in shape.get("class", "").split())


def test_a_front_falls() -> None:
    points = draw_manual.front_points()
    assert len(points) == len(draw_manual.document("mucudnn_fig8")["rows"])
    for before, after in itertools.pairwise(points):
        assert before.workspace < after.workspace
        assert before.time > after.time


def test_tiles_read_their_halo() -> None:
    tiles = draw_manual.tile_rows()
    assert tiles == [((0, 2), (0, 4)), ((2, 8), (0, 12)), ((10, 8), (8, 12)), ((18, 2), (16, 4))]
    problem = parse_layer(draw_manual.TILED, pass_=Pass.FPROP)
    _, first, second, _ = problem.split(problem.space[0], draw_manual.TILES)
    assert first.problem == second.problem  # the picture says that they are planned once


def test_a_queue_waits_for_the_slower_side() -> None:
    assert draw_manual.ends([1.0, 1.0], [3.0, 3.0]) == [(0, 1, 1, 4), (1, 2, 4, 7)]
    assert draw_manual.ends([3.0, 3.0], [1.0, 1.0]) == [(0, 3, 3, 4), (3, 6, 6, 7)]


def test_times_of_steps_are_those_of_the_document() -> None:
    drawn = str(draw_manual.timeline())
    rows = json.loads((draw_manual.RESULTS / "steps.json").read_text("utf-8"))["rows"]
    for name in draw_manual.RECORDED:
        step = next(row for row in rows if row["name"] == name and row["group"] == "eager")["details"]["step"]
        for side in ("torch", "planned"):
            for words in (f"host {step[f'{side}_host_ms']:.1f}", f"device {step[f'{side}_device_ms']:.1f}"):
                assert f">{words}</text>" in drawn


def test_words_are_escaped() -> None:
    drawing = Drawing(10, 10, 'a "b" <c>')
    drawing.text(1, 2, "x < y & z")
    root = ElementTree.fromstring(str(drawing))
    assert root.attrib["aria-label"] == 'a "b" <c>'
    assert root.findtext(f"{SVG}text") == "x < y & z"


def test_cells_hold_geometric_means_of_their_rows() -> None:
    sizes = {"kernel": 3, "output size": 8, "device_ms": 1.0}
    rows = [
        {"details": {**sizes, "problem size": problem, "torch_device_ms": ms}}
        for problem, ms in ((64, 2.0), (127, 8.0), (256, 0.5))
    ]
    other = {"details": {**sizes, "kernel": 5, "problem size": 64, "torch_device_ms": 9.0}}
    assert cells_of([*rows, other], 3) == {(8, 3): pytest.approx(4.0), (8, 4): 0.5}
    assert [shade_of(speedup) for speedup in (0.5, 4.0)] == ["loss", "heat4"]
