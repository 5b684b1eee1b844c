"""Where windows lie, as the tables and numbers that the kernels of pooling are told."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tilewise.kernels.cpu.pooling.told import Told
from tilewise.problems.pooling.problem import PoolingProblem

__all__ = ["Geometry", "geometry_of", "told_backward", "told_forward"]

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Geometry:
    """A problem with three axes of space, of which those that it lacks have one element, and strides in numbers."""

    p: PoolingProblem
    space: Triple
    results: Triple
    kernel: Triple
    stride: Triple
    padding: Triple
    dilation: Triple

    @property
    def along(self) -> bool:
        """Whether vectors lie along the channels."""
        return self.p.layout_name == "channels_last"

    @property
    def items(self) -> int:
        """Images, or where vectors lie along the width images times channels."""
        return self.p.batch * (1 if self.along else self.p.channels)

    def strides(self, extents: Triple) -> tuple[int, int, int, int]:
        """The distances in numbers between items, depths, rows and columns of a dense tensor."""
        column = self.p.channels if self.along else 1
        row = extents[2] * column
        return extents[0] * extents[1] * row, extents[1] * row, row, column

    def windows(self, axis: int) -> np.ndarray:
        """The table of windows along an axis."""
        lacking = 3 - len(self.p.space)
        divisor = self.p.divisor or 1
        if axis < lacking:
            return np.array([[0, 1, divisor if axis == 0 else 1]], dtype=np.int64)
        own = axis - lacking
        counts = self.p.counts(own)
        first = divisor if axis == 0 else 1
        rows = [(w.first, w.count, n * first) for w, n in zip(self.p.windows(own), counts, strict=True)]
        return np.array(rows, dtype=np.int64)

    def takers(self, axis: int) -> np.ndarray:
        """The table of takers along an axis."""
        stride, padding, dilation = self.stride[axis], self.padding[axis], self.dilation[axis]
        rows = []
        for index in range(self.space[axis]):
            found = []
            for k in reversed(range(self.kernel[axis])):
                result, rest = divmod(index + padding - k * dilation, stride)
                if rest == 0 and 0 <= result < self.results[axis]:
                    found.append((k, result))
            rows.append((*found[0], len(found)) if found else (0, 0, 0))
        return np.array(rows, dtype=np.int64)

    def classes(self) -> np.ndarray:
        """The table of takers along the width by the class of inputs.

        The first result is told by how far it lies before the place of the input among those of its class.
        """
        stride, dilation = self.stride[2], self.dilation[2]
        rows = []
        for rest in range(stride):
            found = [k for k in reversed(range(self.kernel[2])) if k * dilation % stride == rest]
            rows.append((found[0], (found[0] * dilation - rest) // stride, len(found)) if found else (0, 0, 0))
        return np.array(rows, dtype=np.int64)


def geometry_of(p: PoolingProblem) -> Geometry:
    """The geometry of a problem."""
    lacking = 3 - len(p.space)
    sizes = ((p.space, 1), (p.pooled_space, 1), (p.kernel, 1), (p.stride, 1), (p.padding, 0), (p.dilation, 1))
    triples = [(*(one,) * lacking, *numbers) for numbers, one in sizes]
    return Geometry(p, *triples)  # type: ignore[arg-type]


def told_forward(g: Geometry, share: int) -> tuple[Told, list[np.ndarray]]:
    """The numbers of a forward, and the arrays whose addresses are among them."""
    tables = [g.windows(axis) for axis in range(3)]
    factors = tables[2][:, 2].astype(np.float32)
    read, write = g.strides(g.space), g.strides(g.results)
    origin = [s * r for s, r in zip(g.stride, read[1:], strict=True)]
    step = [d * r for d, r in zip(g.dilation, read[1:], strict=True)]
    reach = (g.kernel[2] - 1) * g.dilation[2]
    told = Told(
        **_lines(g, g.results, share),
        columns=g.space[2],
        read_item=read[0],
        **_written(write),
        **_axes("step", step),
        **_axes("origin", origin),
        start=sum(p * r for p, r in zip(g.padding, read[1:], strict=True)),
        **_elements(g),
        **_axes("each", [0, 0, 0]),
        **_tables(tables),
        factor_depth=0,
        factor_height=0,
        factor_width=factors.ctypes.data,
        first=0,
        last=g.kernel[2],
        low=-(-g.padding[2] // g.stride[2]),
        high=(g.space[2] - 1 - reach + g.padding[2]) // g.stride[2] + 1,
        **_width(g),
        taken=0,
        taken_row=0,
        taken_depth=0,
    )
    return told, [*tables, factors]


def told_backward(g: Geometry, share: int) -> tuple[Told, list[np.ndarray]]:
    """The numbers of a backward, and the arrays whose addresses are among them."""
    tables = [g.takers(0), g.takers(1), g.takers(2) if g.along else g.classes()]
    factors = [(1 / g.windows(axis)[:, 2]).astype(np.float32) for axis in range(3)]
    read, write = g.strides(g.results), g.strides(g.space)
    common = [math.gcd(s, d) for s, d in zip(g.stride, g.dilation, strict=True)]
    taken = [d // n for d, n in zip(g.dilation, common, strict=True)]
    elements = _elements(g)
    each = [s // n * e for s, n, e in zip(g.stride, common, elements.values(), strict=True)]
    stride, padding = g.stride[2], g.padding[2]
    furthest = 0 if g.along else int(tables[2][:, 1].max())
    told = Told(
        **_lines(g, g.space, share),
        columns=g.results[2],
        read_item=read[0],
        **_written(write),
        **_axes("step", [n * r for n, r in zip(taken, read[1:], strict=True)]),
        **_axes("origin", list(read[1:])),
        start=0,
        **elements,
        **_axes("each", each),
        **_tables(tables),
        factor_depth=factors[0].ctypes.data,
        factor_height=factors[1].ctypes.data,
        factor_width=factors[2].ctypes.data,
        first=padding // stride,
        last=(g.space[2] - 1 + padding) // stride,
        low=max(-(-padding // stride), furthest),
        high=min(g.results[2] - 1, (g.space[2] - stride + padding) // stride) + 1,
        **_width(g),
        taken=taken[2],
        taken_row=taken[1],
        taken_depth=taken[0],
    )
    return told, [*tables, *factors]


def _axes(word: str, numbers: list[int]) -> dict[str, int]:
    """Numbers of depth, rows and columns by name."""
    return {f"{word}_{axis}": n for axis, n in zip(("depth", "row", "column"), numbers, strict=True)}


def _lines(g: Geometry, extents: Triple, share: int) -> dict[str, int]:
    """What lines there are of what is written."""
    depth, height, width = extents
    lines = g.items * depth * height
    channels = g.p.channels if g.along else 1
    return {"lines": lines, "share": share, "depth": depth, "height": height, "width": width, "channels": channels}


def _written(strides: tuple[int, int, int, int]) -> dict[str, int]:
    """The distances of what is written."""
    names = ("write_item", "write_depth", "write_row", "write_column")
    return dict(zip(names, strides, strict=True))


def _elements(g: Geometry) -> dict[str, int]:
    """What the next element along each axis of a window adds to an element's number."""
    return _axes("element", [g.kernel[1] * g.kernel[2], g.kernel[2], 1])


def _tables(tables: list[np.ndarray]) -> dict[str, int]:
    """The addresses of tables."""
    names = ("table_depth", "table_height", "table_width")
    return {name: table.ctypes.data for name, table in zip(names, tables, strict=True)}


def _width(g: Geometry) -> dict[str, int]:
    """The width's own numbers."""
    return {"stride": g.stride[2], "padding": g.padding[2], "dilation": g.dilation[2]}
