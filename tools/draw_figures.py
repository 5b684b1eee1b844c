"""fbfft's Figures 1 to 6 as the paper draws them: a heat map of speed-ups for each kernel size, from a result file.

``tools.draw_manual`` writes it with the manual's other pictures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.svg import Drawing

__all__ = ["cells_of", "figures", "shade_of"]

RESULT = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "h200" / "fbfft_figures.json"
SHADES = {0.97: "loss", 1.03: "torch", 1.5: "heat1", 2.0: "heat2", 4.0: "heat3", 8.0: "heat4", math.inf: "heat5"}
"""The class of a cell by the speed-up that it stays below."""
NAMES = ("slower", "as torch", "to 1.5x", "to 2x", "to 4x", "to 8x", "more")
CELL, LINE_HEIGHT, LEFT, TOP = 32, 15, 62, 78
BITS = range(0, 24, 2)
"""Problem sizes lie together by powers of four: these are the exponents of two that they begin at."""
Cells = Mapping[tuple[int, int], float]


def figures() -> Drawing:
    """Six panels: geometric means over output size (to the right) and problem size (upwards), by the GPU's time."""
    document = json.loads(RESULT.read_text("utf-8"))
    rows = document["rows"]
    kernels = sorted({row["details"]["kernel"] for row in rows})
    sizes = sorted({row["details"]["output size"] for row in rows})
    wide, high = len(sizes) * CELL + 44, len(BITS) * LINE_HEIGHT + 62
    columns = 3
    width, height = LEFT + columns * wide, TOP + -(-len(kernels) // columns) * high
    drawing = Drawing(width, height, f"Speed-ups over torch of {len(rows)} configurations, by kernel size")
    where = f"{document['machine']['device']}, {document['date'][:10]}, {len(rows)} configurations"
    drawing.text(16, 26, f"Speed-up over torch by the GPU's time: {where}", "title")
    for place, (name, kind) in enumerate(zip(NAMES, SHADES.values(), strict=True)):
        drawing.rect(16 + 100 * place, 38, 14, 14, kind)
        drawing.text(36 + 100 * place, 50, name, "small dim")
    for place, kernel in enumerate(kernels):
        corner = LEFT + place % columns * wide, TOP + place // columns * high
        _panel(drawing, cells_of(rows, kernel), kernel, sizes, corner)
    return drawing


def cells_of(rows: Sequence[Mapping[str, Any]], kernel: int) -> dict[tuple[int, int], float]:
    """Geometric means of the speed-ups of one kernel size, by output size and by half the problem size's bits."""
    logs: dict[tuple[int, int], list[float]] = {}
    for details in (row["details"] for row in rows):
        if details["kernel"] == kernel:
            cell = details["output size"], (details["problem size"].bit_length() - 1) // 2
            logs.setdefault(cell, []).append(math.log(details["torch_device_ms"] / details["device_ms"]))
    return {cell: math.exp(math.fsum(found) / len(found)) for cell, found in logs.items()}


def shade_of(speedup: float) -> str:
    """The class of a cell.

    >>> shade_of(0.9), shade_of(1.0), shade_of(9.0)
    ('loss', 'torch', 'heat5')
    """
    return next(kind for most, kind in SHADES.items() if speedup < most)


def _panel(drawing: Drawing, cells: Cells, kernel: int, sizes: Sequence[int], corner: tuple[float, float]) -> None:
    x, y = corner
    bottom = y + 14 + len(BITS) * LINE_HEIGHT
    drawing.text(x, y + 8, f"{kernel}x{kernel}", "title")
    drawing.rect(x, y + 14, len(sizes) * CELL, len(BITS) * LINE_HEIGHT, "box")
    for (size, level), speedup in sorted(cells.items()):
        left, top = x + sizes.index(size) * CELL, bottom - (level + 1) * LINE_HEIGHT
        drawing.rect(left + 0.5, top + 0.5, CELL - 1, LINE_HEIGHT - 1, shade_of(speedup))
    for place, size in enumerate(sizes):
        drawing.text(x + (place + 0.5) * CELL, bottom + 14, str(size), "small dim", anchor="middle")
    drawing.text(x + len(sizes) * CELL / 2, bottom + 29, "output size", "small dim", anchor="middle")
    if x == LEFT:
        for level in range(0, len(BITS), 3):
            drawing.text(x - 6, bottom - level * LINE_HEIGHT - 3, _short(1 << BITS[level]), "small dim", anchor="end")


def _short(size: int) -> str:
    """A power of two in at most four characters."""
    return f"{size >> 20}Mi" if size >= 1 << 20 else f"{size >> 10}Ki" if size >= 1 << 10 else str(size)
