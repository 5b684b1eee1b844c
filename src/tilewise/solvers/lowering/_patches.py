"""DGRAD where no two windows overlap: one product, whose columns are windows of the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from tilewise.problems.base import dense_strides
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.solvers.base import Cost, Run
from tilewise.solvers.common.buffers import Arena, Slot, Strided, dense, fuse, fused
from tilewise.solvers.common.costs import cached, efficiency
from tilewise.solvers.common.matmul import as_matrix, compute_dtype, multiply, straight
from tilewise.solvers.lowering._copies import Copy
from tilewise.solvers.lowering._filter import FilterMatrix
from tilewise.solvers.lowering._gather import Block, Blocking, Gather, Order, kept, readings
from tilewise.solvers.lowering._lift import joins

__all__ = ["PatchGradient"]


class PatchGradient:
    """The transposed filter times the output gradient.

    It is written straight into the result's windows where they form a matrix, else copied there.
    """

    def __init__(self, p: ConvProblem, order: Order, images: int, rows: int) -> None:
        self.p, self.order, self.arena = p, order, Arena()
        dtype, self.result_dtype = compute_dtype(p), p.torch_dtype("x")
        self.grid = [axis.out for axis in p.axes]
        self.blocking = Blocking.of(p.batch, self.grid[0], images, rows)
        self.windows = readings(p, "x", (True,) * p.dims)
        self.channels = p.in_channels // p.groups
        unread = any(w.count < a.size for w, a in zip(self.windows, p.axes, strict=True))
        apart = any(a.kernel < a.stride and a.out > 1 for a in p.axes)
        self.clears = (unread or apart) and not p.accumulate
        reading = [kept(axis.out) for axis in p.axes]
        largest = self.blocking.largest
        self.flat, self.direct = self._form(largest, dtype)
        self.gradient = Gather(p, "y", reading, order.plain, self.flat, largest, dtype, self.arena)
        self.filter = FilterMatrix(replace(p, pass_=Pass.FPROP), (True,) * p.dims, order, dtype, self.arena)
        self._patches: Slot | None = None
        if not self.direct:
            sizes, _ = self._window(largest, (0,) * (2 + p.dims))
            type_ = self.result_dtype if joins(self.result_dtype, dtype) else dtype
            self._patches = self.arena.add((math.prod(sizes),), type_)

    def _form(self, block: Block, dtype: torch.dtype) -> tuple[bool, bool]:
        """Whether images and places are one dimension, and whether the product goes straight into the result.

        Chosen for as few copies as possible.
        """
        p, forms = self.p, []
        for flat in self.order.flats:
            groups = self.order.matrix(p.dims, flat)
            result = gradient = False
            if p.layout("x") != "view" and joins(self.result_dtype, dtype):
                strides = dense_strides(p.shape("x"), p.layout("x"))
                result = fuse(*self._window(block, strides), groups) is not None
            if p.layout("y") != "view" and p.torch_dtype("y") == dtype:
                image, channel, *space = dense_strides(p.shape("y"), p.layout("y"))
                out = p.out_channels // p.groups
                sizes = (block.images, p.groups, out, *(1,) * p.dims, block.places, *self.grid[1:])
                strides = (image, out * channel, channel, *(1,) * p.dims, *space)
                gradient = fuse(sizes, strides, groups) is not None
            forms.append((result + gradient, flat, result))
        _, flat, result = max(forms, key=lambda form: form[0])
        return flat, result

    def _window(self, block: Block, strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and strides of the block's windows as (image, group, channel, taps, places)."""
        image, channel, *space = strides
        taps = (axis.kernel for axis in self.p.axes)
        steps = (axis.stride * s for axis, s in zip(self.p.axes, space, strict=True))
        sizes = (block.images, self.p.groups, self.channels, *taps, block.places, *self.grid[1:])
        return sizes, (image, self.channels * channel, channel, *space, *steps)

    def cost(self) -> Cost:
        """One product, and a copy of the windows where they form no matrix."""
        p, size = self.p, self.result_dtype.itemsize
        near = cached(p.device_type, self.arena.size)
        rows = self.channels * p.taps
        lines, matrix = self.gradient.elements
        patches = self._patches.sizes[0] if self._patches else 0
        moved = p.bytes + 2 * self.filter.copies * p.nbytes("w")
        moved += int(near * 2 * self.blocking.size_in_blocks * (lines + matrix + patches) * size)
        kernels = self.blocking.count * (1 + (matrix > 0) + (patches > 0)) + self.filter.copies + self.clears
        together = self.blocking.images if self.flat else 1
        columns = together * math.prod(self.grid) * self.blocking.rows // self.grid[0]
        shape = (rows, columns, p.out_channels // p.groups, p.groups * self.blocking.images // together)
        return Cost(p.flops, moved, kernels, efficiency(p.device_type, *shape))

    def bind(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Run:
        """A run for tensors with the strides of these."""
        blocks = self.blocking.blocks()
        fillings = self.gradient.bind(a, blocks)
        results = [self._result(out.stride(), block) for block in blocks]
        add = self.p.accumulate
        if len(blocks) == 1 and self.direct and self.gradient.direct and self.filter.view and not self.clears:
            gradient_view = fillings[0].matrix
            weight_view = self.filter.view.transposed.expanded(gradient_view.sizes[0])
            return straight(self.p, weight_view, gradient_view, results[0][0], a.device)
        weight, gradient = self.filter.bind(b), self.gradient
        parts = list(zip(fillings, results, strict=True))

        def run(
            a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
        ) -> torch.Tensor:
            assert out is not None
            if self.clears:
                out.zero_()
            matrix = weight.of(b, workspace).transpose(2, 3)
            gradient.clear(workspace)
            for filling, (view, copy) in parts:
                columns = filling.fill(a, workspace)
                products = out if self._patches is None else self._patches.of(workspace)
                multiply(matrix.expand(columns.shape[0], -1, -1, -1), columns, view.of(products), add and self.direct)
                if self._patches is not None:
                    (copy.add if add else copy.run)(products, out)
            return out

        return run

    def _result(self, strides: Sequence[int], block: Block) -> tuple[Strided, Copy]:
        """The block's product as a matrix, and the copy of its windows from the buffer to the result."""
        p = self.p
        sizes, windows = self._window(block, strides)
        offset = block.image * strides[0] + block.place * p.axes[0].stride * strides[2]
        offset += sum(w.start * s for w, s in zip(self.windows, strides[2:], strict=True))
        groups = self.order.matrix(p.dims, self.flat)
        permutation = self.order.permute(p.dims)
        in_order = tuple(sizes[i] for i in permutation)
        source = Strided(in_order, dense(in_order))
        target = Strided(in_order, tuple(windows[i] for i in permutation), offset)
        types = (self.result_dtype if self._patches is None else self._patches.dtype, self.result_dtype)
        copy = Copy.of(source, target, types, p.alignment[ROLES.index("x")])
        if self.direct:
            matrix = fused(sizes, windows, groups)
            return Strided(matrix[0], as_matrix(*matrix), offset), copy
        buffer = [0] * len(sizes)
        for position, stride in zip(permutation, dense(in_order), strict=True):
            buffer[position] = stride
        matrix = fused(sizes, buffer, groups)
        return Strided(matrix[0], as_matrix(*matrix)), copy
