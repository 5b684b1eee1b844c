"""WGRAD by lowering: the image's matrix times the output gradient's, summed over blocks in fp32."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tilewise.problems.base import dense_strides
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.base import Cost, Run
from tilewise.solvers.common.buffers import Arena, Slot, Strided, dense, fuse, fused
from tilewise.solvers.common.costs import LOWERED, MKL, WRITTEN, cached, efficiency
from tilewise.solvers.common.matmul import add_over_images, as_matrix, compute_dtype, straight
from tilewise.solvers.lowering._filter import filter_dims, grouped
from tilewise.solvers.lowering._gather import Blocking, Gather, Order, readings

__all__ = ["WeightGradient"]


class WeightGradient:
    """WGRAD in blocks: lower the image along some axes and the output gradient along the others, multiply, add."""

    def __init__(self, p: ConvProblem, lowered: Sequence[bool], order: Order, images: int, rows: int) -> None:
        self.p, self.order, self.arena = p, order, Arena()
        dtype = compute_dtype(p)
        image = readings(p, "x", lowered)
        gradient = readings(p, "y", [not low for low in lowered])
        self.grid = [reading.places for reading in image]
        self.blocking = Blocking.of(p.batch, self.grid[0], images, rows)
        largest, flat = self.blocking.largest, order is not Order.IMAGES
        self.image = Gather(p, "x", image, order, flat, largest, dtype, self.arena)
        self.gradient = Gather(p, "y", gradient, order.plain, flat, largest, dtype, self.arena)
        self.products = self.blocking.count if flat else self.blocking.count // -(-p.batch // images) * p.batch

        out_rows, out_columns, _ = filter_dims(p, lowered, order)
        sizes, strides = grouped(p, dense_strides(p.shape("w"), p.layout("w")))
        self.groups = ((0,), out_rows, out_columns)
        self.permutation = (0, *out_rows, *out_columns)
        self.sizes = tuple(sizes[i] for i in self.permutation)
        result = p.torch_dtype("w")
        fits = result == torch.float32 or (result == dtype and self.products == 1)
        self.direct = (
            all(lowered) and p.layout("w") != "view" and fits and fuse(sizes, strides, self.groups) is not None
        )
        lifted = [self.permutation.index(3 + i) for i, low in enumerate(lowered) if not low]
        self.reverses = any(self.sizes[i] > 1 for i in lifted)
        self._sum: Slot | None = None
        self._reversed: Slot | None = None
        if not self.direct:
            self._sum = self.arena.add(self.sizes, torch.float32)
            self._reversed = self.arena.add(self.sizes, torch.float32) if self.reverses else None
            # The gradient's taps come reversed, as DGRAD's do; they are neighbours.
            first, last = (lifted[0], lifted[-1] + 1) if lifted else (0, 0)
            self.middle = tuple(math.prod(self.sizes[s]) for s in (slice(first), slice(first, last), slice(last, None)))

    def cost(self) -> Cost:
        """The traffic of matrices and sums, and the products' arithmetic."""
        p = self.p
        places = math.prod(self.grid)
        rows, columns = (g.channels * math.prod(r.taps for r in g.readings) for g in (self.gradient, self.image))
        near = cached(p.device_type, self.arena.size)
        moved, apart, copied, copies = float(p.bytes), 0.0, 0.0, 0
        for gather in (self.image, self.gradient):
            lines, matrix = gather.elements
            copied += self.blocking.size_in_blocks * (lines * self.blocking.rows / self.grid[0] + matrix)
            copies += (lines > 0) + (matrix > 0)
        depth = math.ceil(p.batch * places / self.products)
        if p.device_type == "cpu":
            share = MKL.efficiency(rows, columns, depth)
            apart = near * MKL.read * p.batch * p.groups * places * (rows + columns)
            apart += (1 + near) / 2 * LOWERED * copied + WRITTEN * self.products * math.prod(self.sizes)
        else:
            share = efficiency(p.device_type, rows, columns, depth, p.groups)
            moved += near * 2 * copied * compute_dtype(p).itemsize
            moved += 2 * (self.products - self.direct) * math.prod(self.sizes) * 4
        kernels = self.blocking.count * copies + self.products + (0 if self.direct else 2)
        flops = 2 * p.batch * p.groups * rows * columns * places
        return Cost(flops, int(moved), kernels, share, int(apart))

    def _matrix(self, strides: Sequence[int], sizes: Sequence[int]) -> Strided:
        """The filter's gradient as one matrix per group."""
        matrix = fused(sizes, strides, self.groups)
        return Strided((1, *matrix[0]), (0, *as_matrix(*matrix)))

    def bind(self, x: torch.Tensor, dy: torch.Tensor, out: torch.Tensor) -> Run:
        """A run for tensors with the strides of these."""
        image, gradient, add = self.image, self.gradient, self.p.accumulate
        blocks = self.blocking.blocks()
        parts = list(zip(gradient.bind(dy, blocks), image.bind(x, blocks), strict=True))
        sizes, strides = grouped(self.p, out.stride())
        inner = [0] * len(sizes)
        for position, stride in zip(self.permutation, dense(self.sizes), strict=True):
            inner[position] = stride
        matrix = self._matrix(strides if self.direct else inner, sizes)
        if len(parts) == 1 and image.direct and gradient.direct and self.direct and parts[0][0].matrix.sizes[0] == 1:
            return straight(self.p, parts[0][0].matrix, parts[0][1].matrix.transposed, matrix, x.device)
        result = Strided(self.sizes, tuple(strides[i] for i in self.permutation))
        index = None
        if self._reversed is not None:
            index = torch.arange(self.middle[1] - 1, -1, -1, dtype=torch.int64, device=x.device)

        def run(
            x: torch.Tensor, dy: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
        ) -> torch.Tensor:
            assert out is not None
            total = out if self._sum is None else self._sum.of(workspace)
            product = matrix.of(total)
            more = add and self._sum is None
            for clearing in (image, gradient):
                clearing.clear(workspace)
            for of_gradient, of_image in parts:
                columns = of_image.fill(x, workspace).transpose(2, 3)
                add_over_images(of_gradient.fill(dy, workspace), columns, product, more)
                more = True
            if self._sum is None:
                return out
            if self._reversed is not None and index is not None:
                turned = self._reversed.of(workspace)
                torch.index_select(total.view(self.middle), 1, index, out=turned.view(self.middle))
                total = turned
            target = result.of(out)
            if add:
                target.add_(total)
            else:
                target.copy_(total)
            return out

        return run
