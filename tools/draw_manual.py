"""Draw the manual's pictures: ``python -m tools.draw_manual`` writes them to docs/pictures.

Where there is something to measure they show what was measured: the front and the times of steps come from
benchmarks/results, and the rows of tiles from the library itself. What is only a sketch says so.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.draw_figures import figures
from tools.svg import LINE, Drawing

from tilewise.notation import parse_layer
from tilewise.problem import Pass

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
RESULTS = ROOT / "benchmarks" / "results" / "h100-80gb"
WIDTH = 860


def document(name: str) -> dict[str, Any]:
    """A document of results."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return found


def source(name: str) -> str:
    """Where a document comes from, in words."""
    found = document(name)
    return f"{found['machine']['device']}, {found['date'][:10]}, benchmarks/results/{found['folder']}/{name}.json"


# What planning does: six boxes and what is remembered.

BOX, BOX_HEIGHT, GAP, MARGIN = 260, 148, 24, 16
STEPS = {
    "1  A layer of your model": ("Conv2d(64, 192, 5, padding=2),", "called as one run of the model", "showed it"),
    "2  Up to three problems": (
        "forward: x, w → y",
        "gradient of the input: dy, w → dx",
        "gradient of the weight: x, dy → dw",
    ),
    "3  Candidates": (
        "torch's choice, Winograd, Fourier,",
        "matrix products, cuDNN's engines;",
        "whole, in micro-batches, in tiles",
    ),
    "4  Measured and checked": (
        "estimates say which to try; these",
        "are timed, and compared with",
        "float64: a wrong one is dropped",
    ),
    "5  The front": ("no other one is both faster and", "smaller; your memory limit picks", "one of these"),
    "6  The whole step": ("torch's step and the planned one", "run in turns; what does not gain", "is torch's again"),
}


def planning() -> Drawing:
    """From a layer to what runs."""
    height = 2 * MARGIN + 2 * BOX_HEIGHT + 44 + 70
    drawing = Drawing(WIDTH, height, "What planning does: from a layer to the plan that runs, in six steps")
    corners = [
        (MARGIN + (BOX + GAP) * (index % 3), MARGIN + (BOX_HEIGHT + 44) * (index // 3)) for index in range(len(STEPS))
    ]
    for (x, y), (title, texts), glyph in zip(corners, STEPS.items(), GLYPHS, strict=True):
        drawing.rect(x, y, BOX, BOX_HEIGHT, "box", radius=6)
        drawing.text(x + 14, y + 24, title, "title")
        drawing.lines(x + 14, y + 24 + LINE + 4, texts, "dim")
        glyph(drawing, x + 14, y + 98)
    for (x, y), following in itertools.pairwise(corners):
        if following[1] == y:
            drawing.arrow([(x + BOX, y + BOX_HEIGHT / 2), (following[0], y + BOX_HEIGHT / 2)])
        else:
            turn = y + BOX_HEIGHT + 22
            left = following[0] + BOX / 2
            drawing.arrow([(x + BOX / 2, y + BOX_HEIGHT), (x + BOX / 2, turn), (left, turn), (left, following[1])])
    bottom, top = corners[3][1] + BOX_HEIGHT, height - MARGIN - 38
    drawing.rect(MARGIN, top, WIDTH - 2 * MARGIN, 38, "pale", radius=6)
    words = "Wisdom: all that was measured, on disk. The next process reads it and plans in milliseconds."
    drawing.text(WIDTH / 2, top + 24, words, anchor="middle")
    drawing.arrow([(corners[3][0] + BOX / 2, bottom), (corners[3][0] + BOX / 2, top)])
    drawing.arrow([(corners[4][0] + BOX / 2, top), (corners[4][0] + BOX / 2, bottom)])
    return drawing


def _maps(drawing: Drawing, x: float, y: float) -> None:
    """Channels of an image, a filter, channels of the result."""
    for index in range(4):
        drawing.rect(x + 5 * index, y + 12 - 4 * index, 24, 24, "torch")
        drawing.rect(x + 140 + 6 * index, y + 12 - 4 * index, 24, 24, "ours")
    drawing.arrow([(x + 52, y + 18), (x + 78, y + 18)])
    for row, column in itertools.product(range(3), range(3)):
        drawing.rect(x + 86 + 7 * column, y + 8 + 7 * row, 6, 6, "halo")
    drawing.arrow([(x + 112, y + 18), (x + 136, y + 18)])


def _passes(drawing: Drawing, x: float, y: float) -> None:
    """Three problems, one with one more operand."""
    for index, kind in enumerate(("ours", "halo", "torch")):
        drawing.rect(x + 78 * index, y + 8, 70, 24, kind, radius=4)


def _candidates(drawing: Drawing, x: float, y: float) -> None:
    """Many configs, a few of which are tried."""
    tried = {3, 8, 17, 21, 30, 37, 40, 46}
    for index in range(54):
        kind = "ours" if index in tried else "torch"
        drawing.rect(x + 13 * (index % 18), y + 2 + 13 * (index // 18), 10, 10, kind, radius=2)


def _measured(drawing: Drawing, x: float, y: float) -> None:
    """Times of candidates, one of which is dropped."""
    for index, (length, kind) in enumerate(((120, "torch"), (70, "ours"), (96, "ours"), (46, "loss"))):
        drawing.rect(x, y + 10 * index, length, 7, kind)
    drawing.text(x + 54, y + 38, "wrong: dropped", "small warn")


def _small_front(drawing: Drawing, x: float, y: float) -> None:
    """A front with a limit."""
    drawing.path([(x, y), (x, y + 38), (x + 220, y + 38)], "axis")
    points = [(14, 2), (40, 14), (78, 22), (140, 29), (196, 33)]
    for a, b in ((60, 8), (110, 12), (160, 20), (100, 26)):
        drawing.circle(x + a, y + b, 3, "torch")
    for a, b in points:
        drawing.circle(x + a, y + b, 3.5, "ours")
    drawing.path([(x + 120, y - 2), (x + 120, y + 38)], "limit dashed")


def _two_steps(drawing: Drawing, x: float, y: float) -> None:
    """Torch's step and the planned one, in turns."""
    place = x
    for length, kind in ((66, "torch"), (44, "ours")) * 2:
        drawing.rect(place, y + 8, length - 3, 20, kind, radius=2)
        place += length


GLYPHS: tuple[Callable[[Drawing, float, float], None], ...] = (
    _maps, _passes, _candidates, _measured, _small_front, _two_steps,
)  # fmt: skip


# A front: AlexNet's second layer, as it was measured.


class Point(NamedTuple):
    """A plan of a front: workspace in MiB, its time, and its time when it was run again as a whole, in ms."""

    workspace: float
    time: float
    again: float
    words: str


def front_points() -> list[Point]:
    """The front of ``mucudnn_fig8``, from the least workspace to the most."""
    found = []
    for row in document("mucudnn_fig8")["rows"]:
        plan = row["details"]["plan"]
        words = row["ours"]["what"].partition(" (")[0]
        found.append(Point(plan["workspace"] / 2**20, plan["time_ms"], row["ours"]["value"], words))
    return sorted(found)


LIMIT = 16
"""MiB of the limit that is drawn."""


def front() -> Drawing:
    """The front of one pass, with a limit."""
    drawing = Drawing(WIDTH, 470, "A measured front: time against workspace of one pass of AlexNet's second layer")
    left, top, right, bottom = 70, 62, WIDTH - 30, 400
    points = front_points()
    none = left + 40

    def place(workspace: float, ms: float) -> tuple[float, float]:
        x = none if workspace < 0.1 else left + 120 + (right - left - 130) * math.log2(workspace) / math.log2(160)
        return x, bottom - (bottom - top) * ms / 3

    drawing.text(20, 28, "The front of AlexNet's second layer: forward, 256 images, fp32", "title")
    drawing.text(20, 28 + LINE, f"{len(points)} plans: each is faster than all that need less memory", "dim")
    for ms in range(4):
        _, y = place(1, ms)
        drawing.path([(left, y), (right, y)], "axis")
        drawing.text(left - 8, y + 4, f"{ms} ms" if ms else "0", "small dim", anchor="end")
    for workspace in (0, 1, 2, 4, 8, 16, 32, 64, 128):
        x, _ = place(workspace, 0)
        drawing.text(x, bottom + 18, f"{workspace} MiB" if workspace else "none", "small dim", anchor="middle")
        drawing.path([(x, bottom), (x, bottom + 4)], "line")
    drawing.text((left + right) / 2, bottom + 38, "workspace, beyond operands and result", "dim", anchor="middle")
    _curve(drawing, points, place, right)
    _marks(drawing, points, place, (left, top, right, bottom))
    drawing.text(20, 456, source("mucudnn_fig8"), "small dim")
    return drawing


Place = Callable[[float, float], tuple[float, float]]


def _curve(drawing: Drawing, points: Sequence[Point], place: Place, right: float) -> None:
    """The least time for each workspace, and a mark for each plan."""
    steps = [place(points[0].workspace, points[0].time)]
    for before, point in itertools.pairwise(points):
        steps += [place(point.workspace, before.time), place(point.workspace, point.time)]
    drawing.path([*steps, (right, steps[-1][1])], "front")
    for point in points:
        x, y = place(point.workspace, point.time)
        _, again = place(point.workspace, point.again)
        drawing.path([(x, y), (x, again)], "front")
        drawing.circle(x, again, 3.5, "again")
        drawing.circle(x, y, 4.5, "ours")


def _marks(drawing: Drawing, points: Sequence[Point], place: Place, frame: tuple[float, ...]) -> None:
    """Torch's time, a limit with the plan that it picks, and what some plans are."""
    left, top, right, _ = frame
    torch_ms = document("mucudnn_fig8")["summary"]["facts"]["torch_ms"]
    _, y = place(1, torch_ms)
    drawing.path([(left, y), (right, y)], "limit dashed")
    drawing.text(left + 8, y + 16, f"torch: {torch_ms:.2f} ms, with no limit on its memory", "small warn")
    x, _ = place(LIMIT, 0)
    drawing.path([(x, top - 6), (x, frame[3])], "limit")
    drawing.text(x + 8, top + 20, f'workspace="{LIMIT}MiB"', "small warn")
    picked = max(point for point in points if point.workspace <= LIMIT)
    drawing.text(x + 8, top + 20 + LINE, f"picks {picked.time:.2f} ms: {picked.words}", "small")
    slowest, fastest = points[0], points[-1]
    x, y = place(slowest.workspace, slowest.time)
    drawing.text(x + 12, y - 8, f"no memory: {slowest.words.split(' ')[0]}, {slowest.time:.2f} ms", "small")
    x, y = place(fastest.workspace, fastest.time)
    drawing.text(
        x, y + 22, f"all the memory: {fastest.words.split(' ')[0]}, {fastest.time:.2f} ms", "small", anchor="end"
    )
    whole = next(point for point in points if point.workspace > LIMIT)
    _, y = place(whole.workspace, whole.time)
    words = f"the batch undivided: {whole.words.split(' ')[0]}, {whole.time:.2f} ms"
    drawing.text(right, y - 32, words, "small", anchor="end")
    drawing.circle(right - 250, top + 86, 4.5, "ours")
    drawing.text(right - 238, top + 90, "as planned: for parts, the sum of them", "small dim")
    drawing.circle(right - 250, top + 86 + LINE, 3.5, "again")
    drawing.text(right - 238, top + 90 + LINE, "the same plan run again as a whole", "small dim")


# Tiles and halos: rows as the library cuts them.

TILED = "mb1ic1ih20oc1oh20kh5ph2"
TILES = (2, 8, 8, 2)


class Tile(NamedTuple):
    """Rows from a first one, their number: those that a tile computes, and those that it reads."""

    writes: tuple[int, int]
    reads: tuple[int, int]


def tile_rows() -> list[Tile]:
    """What each tile computes and reads, by the library's own cut of a layer of 5x5 taps."""
    problem = parse_layer(TILED, pass_=Pass.FPROP)
    found = []
    for part in problem.split(problem.space[0], TILES):
        rows = {role: part.ranges(role)[0] for role in ("x", "y")}
        found.append(Tile(*((rows[role].start, rows[role].length) for role in ("y", "x"))))
    return found


def tiles() -> Drawing:
    """An image in tiles: the rows that each reads, and the rows that it computes."""
    drawing = Drawing(WIDTH, 456, "An image computed in four tiles: each reads two rows of its neighbours, its halo")
    rows = 20
    high, top = 16, 96
    drawing.text(20, 28, "An image of 20 rows in tiles: 2 + 8 + 8 + 2, with a kernel of 5 x 5", "title")
    drawing.text(
        20, 28 + LINE, "Each tile needs workspace for its own rows alone. Nothing is copied: halos are read", "dim"
    )
    drawing.text(
        20, 28 + 2 * LINE, "where they lie. The two tiles in the middle are one problem, which is planned once.", "dim"
    )
    wide, left = 150, 200
    cut = tile_rows()
    drawing.text(left + wide / 2, top + rows * high + 20, "the image", "dim", anchor="middle")
    drawing.text(WIDTH - 60 - wide / 2, top + rows * high + 20, "the result", "dim", anchor="middle")
    for row in range(rows):
        drawing.rect(left, top + high * row, wide, high - 1, "torch")
    edges = [0, *itertools.accumulate(TILES)]
    for index, tile in enumerate(cut):
        _tile(drawing, tile, index, (left, top, wide, high))
    for edge in edges[1:-1]:
        y = top + high * edge - 0.5
        for x in (left, WIDTH - 60 - wide):
            drawing.path([(x, y), (x + wide, y)], "line")
    drawing.rect(20, top + rows * high + 8, 14, 14, "halo")
    drawing.text(40, top + rows * high + 20, "halo", "dim")
    return drawing


def _tile(drawing: Drawing, tile: Tile, index: int, frame: tuple[int, ...]) -> None:
    """One tile: brackets of what it reads, the stripe that it computes."""
    left, top, wide, high = frame
    (first, count), (start, read) = tile
    x = left + wide + 16 + 30 * index
    for row in range(start, start + read):
        own = first <= row < first + count
        drawing.rect(x, top + high * row, 22, high - 1, "ours" if own else "halo")
    drawing.text(x + 11, top + high * start - 5, str(index + 1), "small dim", anchor="middle")
    right = WIDTH - 60 - wide
    middle = top + high * (first + count / 2)
    drawing.rect(right, top + high * first, wide, high * count - 1, "pale")
    drawing.text(right + wide / 2, middle + 5, f"tile {index + 1}", anchor="middle")
    drawing.arrow([(left + wide + 16 + 30 * len(TILES), middle), (right - 4, middle)])
    drawing.text(left - 12, middle + 5, f"tile {index + 1} reads {read} rows", "dim", anchor="end")


# A step on host and device.


def ends(host: Iterable[float], device: Iterable[float]) -> list[tuple[float, float, float, float]]:
    """When each operator is launched and computed: begin and end on the host, begin and end on the device."""
    found = []
    launched = done = 0.0
    for host_ms, device_ms in zip(host, device, strict=True):
        begin, launched = launched, launched + host_ms
        start = max(launched, done)
        done = start + device_ms
        found.append((begin, launched, start, done))
    return found


RECORDED = {
    "resnet50, batch 64, fp32": ("ResNet-50", "batch 64, fp32"),
    "mobilenet_v3_large, batch 128, bf16": ("MobileNetV3-large", "batch 128, bf16"),
}
"""The steps that are drawn: one that waits for the device, one that waits for the host."""


def timeline() -> Drawing:
    """Two queues, and the times of real steps."""
    drawing = Drawing(WIDTH, 560, "A step on host and device: launches queue up, and the slower of both decides")
    drawing.text(20, 28, "A step is a queue: the host launches, the device computes", "title")
    drawing.text(20, 28 + LINE, "A sketch of six operators. Plans take the device half the time in both cases.", "dim")
    cases = (("the device decides", 1.0, 2.6), ("the host decides", 2.6, 1.6))
    for index, (words, host, device) in enumerate(cases):
        x = 20 + 420 * index
        drawing.text(x, 76, words, "title")
        for side, (name, share) in enumerate((("torch", 1.0), ("planned", 0.5))):
            queue = ends([host] * 6, [device * share] * 6)
            _queue(drawing, queue, name, (x, 88 + 92 * side, 20.0))
    drawing.text(20, 300, "Measured: eager training steps", "title")
    drawing.text(
        20,
        300 + LINE,
        "What the host needs to launch a step, what the device to compute it, and the step; each network on its scale.",
        "dim",
    )
    y = 336.0
    for row in _recorded():
        y = _recorded_step(drawing, row, y)
    drawing.text(20, 546, source("steps"), "small dim")
    return drawing


def _queue(drawing: Drawing, queue: Sequence[tuple[float, ...]], name: str, frame: tuple[float, float, float]) -> None:
    """Two lanes: launches on the host and work on the device."""
    x, y, scale = frame
    kind = "torch" if name == "torch" else "ours"
    drawing.text(x, y + 20, name, "dim")
    for lane, words in ((0, "host"), (1, "device")):
        drawing.text(x + 62, y + 14 + 24 * lane, words, "small dim")
    for begin, launched, start, done in queue:
        drawing.rect(x + 108 + scale * begin * 0.85, y + 3, scale * 0.85 * (launched - begin) - 1.5, 14, "halo")
        drawing.rect(x + 108 + scale * start * 0.85, y + 27, scale * 0.85 * (done - start) - 1.5, 14, kind)
    end = x + 108 + scale * 0.85 * queue[-1][3]
    drawing.path([(end, y), (end, y + 48)], "limit")
    drawing.text(end, y + 62, "the step ends", "small warn", anchor="end")


def _recorded() -> list[dict[str, Any]]:
    """The rows of ``steps`` that are drawn, as they ran eagerly."""
    rows = [row for row in document("steps")["rows"] if row["group"] == "eager"]
    return [next(row for row in rows if row["name"] == name) for name in RECORDED]


def _recorded_step(drawing: Drawing, row: dict[str, Any], y: float) -> float:
    """Host, device and step of torch and of the plans; returns where the next one goes."""
    step = row["details"]["step"]
    scale = 440 / max(step["torch_ms"], step["planned_ms"])
    kept = "kept" if step["kept"] else "not kept"
    name, setting = RECORDED[row["name"]]
    drawing.text(20, y + 14, name, "title")
    drawing.lines(20, y + 14 + LINE, (setting, f"The planned step is {kept}."), "small dim")
    for index, side in enumerate(("torch", "planned")):
        top = y + 44 * index
        host, device, whole = (step[f"{side}_{what}"] for what in ("host_ms", "device_ms", "ms"))
        drawing.text(330, top + 20, side, "dim", anchor="end")
        drawing.rect(340, top + 2, scale * host, 13, "halo")
        drawing.rect(340, top + 18, scale * device, 13, "torch" if side == "torch" else "ours")
        end = 340 + scale * whole
        drawing.path([(end, top), (end, top + 34)], "limit")
        drawing.text(min(end + 6, WIDTH - 76), top + 21, f"{whole:.1f} ms", "small warn")
        drawing.text(346, top + 12.5, f"host {host:.1f}", "small")
        drawing.text(346, top + 28.5, f"device {device:.1f}", "small" if side == "torch" else "small on")
    return y + 98


DRAWN: dict[str, Callable[[], Drawing]] = {
    "planning": planning, "front": front, "tiles": tiles, "timeline": timeline, "fbfft": figures,
}  # fmt: skip
"""The pictures by the names of their files."""


def main() -> None:
    """Write all pictures."""
    PICTURES.mkdir(exist_ok=True)
    for name, draw in DRAWN.items():
        (PICTURES / f"{name}.svg").write_text(str(draw()), "utf-8")


if __name__ == "__main__":
    main()
