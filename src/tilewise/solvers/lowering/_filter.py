"""The filter as a matrix that multiplies a lowered one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tilewise.problems.base import dense_strides
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.common.buffers import Arena, Slot, Strided, dense, fuse, fused
from tilewise.solvers.common.matmul import as_matrix
from tilewise.solvers.lowering._gather import Order

__all__ = ["FilterMatrix", "filter_dims", "grouped"]


def filter_dims(
    p: ConvProblem, lowered: Sequence[bool], order: Order
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Which dimensions of the filter (group, out channel, in channel, taps) are the matrix's rows and columns.

    Rows are the taps that are lifted and the channels of the result (in WGRAD, of the output gradient). Columns are the
    other channels and the lowered taps, in the order of the lowered matrix's rows. Third are the lowered taps alone.
    """
    taps = range(3, 3 + p.dims)
    inner = tuple(tap for tap, low in zip(taps, lowered, strict=True) if low)
    outer = tuple(tap for tap, low in zip(taps, lowered, strict=True) if not low)
    row, column = (2, 1) if p.pass_ is Pass.DGRAD else (1, 2)
    last = order.channel_last
    rows = (*outer, row) if last or p.pass_ is not Pass.WGRAD else (row, *outer)
    return rows, ((*inner, column) if last else (column, *inner)), inner


def grouped(p: ConvProblem, strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of a filter as (group, out channel, in channel, taps)."""
    out = p.out_channels // p.groups
    sizes = (p.groups, out, p.in_channels // p.groups, *(axis.kernel for axis in p.axes))
    return sizes, (out * strides[0], *strides)


class FilterMatrix:
    """The filter as (1, group, rows, columns) with the dimensions of :func:`filter_dims`.

    It is a view where strides allow it, else a copy. DGRAD correlates with the reversed filter, so its lowered taps are
    reversed by a second copy.
    """

    def __init__(self, p: ConvProblem, lowered: Sequence[bool], order: Order, dtype: torch.dtype, arena: Arena) -> None:
        self.p, self.dtype = p, dtype
        rows, columns, inner = filter_dims(p, lowered, order)
        self.permutation = (0, *rows, *columns)
        sizes, strides = grouped(p, dense_strides(p.shape("w"), p.layout("w")))
        self.sizes = tuple(sizes[i] for i in self.permutation)
        groups = ((0,), rows, columns)
        self.inner = [self.permutation.index(tap) for tap in inner]
        self.reverses = p.pass_ is Pass.DGRAD and any(sizes[tap] > 1 for tap in inner)
        fits = p.layout("w") != "view" and p.torch_dtype("w") == dtype and not self.reverses
        merged = fuse(sizes, strides, groups) if fits else None
        self.view = None if merged is None else self._matrix(*merged)
        self._copy: Slot | None = None
        self._reversed: Slot | None = None
        if self.view is None:
            target = [0] * len(sizes)
            for position, stride in zip(self.permutation, dense(self.sizes), strict=True):
                target[position] = stride
            self.matrix = self._matrix(*fused(sizes, target, groups))
            self._copy = arena.add(self.sizes, dtype)
            self._reversed = arena.add(self.sizes, dtype) if self.reverses else None

    @staticmethod
    def _matrix(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Strided:
        """The view of one matrix per group."""
        return Strided((1, *sizes), (0, *as_matrix(sizes, strides)))

    @property
    def copies(self) -> int:
        """How many copies of the filter each call makes."""
        return (self._copy is not None) + (self._reversed is not None)

    def bind(self, w: torch.Tensor) -> BoundFilter:
        """The matrix of filters with the strides of ``w``."""
        _, strides = grouped(self.p, w.stride())
        source = Strided(self.sizes, tuple(strides[i] for i in self.permutation))
        middle = (1, 1, 1)
        index = None
        if self.reverses:
            first, last = self.inner[0], self.inner[-1] + 1
            taps = math.prod(self.sizes[first:last])
            middle = (math.prod(self.sizes[:first]), taps, math.prod(self.sizes[last:]))
            index = torch.arange(taps - 1, -1, -1, dtype=torch.int64, device=w.device)
        return BoundFilter(self, source, middle, index)


class BoundFilter:
    """A :class:`FilterMatrix` for filters with fixed strides."""

    def __init__(
        self, filter_: FilterMatrix, source: Strided, middle: tuple[int, int, int], index: torch.Tensor | None
    ) -> None:
        self.filter, self.source, self.middle, self.index = filter_, source, middle, index

    def of(self, w: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        """The matrix (1, group, rows, columns)."""
        filter_ = self.filter
        if filter_.view is not None:
            return filter_.view.of(w)
        assert filter_._copy is not None
        buffer = filter_._copy.of(workspace)
        buffer.copy_(self.source.of(w))
        if filter_._reversed is not None and self.index is not None:
            target = filter_._reversed.of(workspace)
            torch.index_select(buffer.view(self.middle), 1, self.index, out=target.view(self.middle))
            buffer = target
        return filter_.matrix.of(buffer)
