"""Lowering: convolution as matrix products (Hadjis et al. 2015, section 2.1), for any choice of lowered axes.

Along a *lowered* axis the operand's windows are copied out before the product. Along a *lifted* axis the product is
taken on the operand as it is, once per tap, and the taps are summed behind it. All axes lowered is the paper's type 1,
one is type 2 and none is type 3. FPROP lowers the image, DGRAD the output gradient. WGRAD has no sum behind its
product: what FPROP would lift, it lowers on the output gradient instead, so its two matrices trade places.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch

from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost, Run
from tilewise.solvers.common.buffers import Arena
from tilewise.solvers.common.costs import LIFTED, LOWERED, MKL, WRITTEN, cached, efficiency
from tilewise.solvers.common.matmul import at_precision, compute_dtype, library_scratch, multiply, straight
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.lowering._filter import FilterMatrix
from tilewise.solvers.lowering._gather import Blocking, Gather, Order, readings
from tilewise.solvers.lowering._lift import Lift
from tilewise.solvers.lowering._weight_gradient import WeightGradient

__all__ = ["Correlation", "Lowering", "Product", "pointwise_is_lowered"]

MOST_BYTES = 2**31
"""Blocks with larger buffers are not offered, as smaller blocks are as fast."""
SMALL_BYTES = 2**23
"""An image is divided into rows until its buffers are no larger, so that some config fits most limits."""
MERGED_PLACES = 1024
"""From so many places per image on, a product per image is as fast as one of all images."""


class Product(Protocol):
    """A problem laid out as products in blocks, with the buffers it needs."""

    arena: Arena
    grid: list[int]

    def cost(self) -> Cost:
        """The estimate of the products and copies."""
        ...

    def bind(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Run:
        """A run for tensors with the strides of these."""
        ...


def pointwise_is_lowered(p: ConvProblem) -> bool:
    """Whether an axis of one tap counts as lowered. It grows neither way, but in DGRAD a stride would add zeros."""
    return p.pass_ is not Pass.DGRAD


class Correlation:
    """FPROP or DGRAD in blocks of images and rows: lower, multiply, lift."""

    def __init__(self, p: ConvProblem, lowered: Sequence[bool], order: Order, images: int, rows: int) -> None:
        self.p, self.order, self.arena = p, order, Arena()
        dtype = compute_dtype(p)
        reads = readings(p, p.operands[0], lowered)
        grid = [reading.places for reading in reads]
        self.blocking = Blocking.of(p.batch, grid[0], images, rows)
        largest = self.blocking.largest
        self.filter = FilterMatrix(p, lowered, order, dtype, self.arena)
        self.lift = Lift(p, lowered, order, grid, largest, dtype, self.arena)
        self.gather = Gather(p, p.operands[0], reads, order, self.lift.flat, largest, dtype, self.arena)
        self.places = math.prod(grid)
        self.grid = grid

    def cost(self) -> Cost:
        """The traffic of matrices and sums, and the products' arithmetic (Hadjis et al. 2015, A.1, Figure 6)."""
        p, lift, blocking = self.p, self.lift, self.blocking
        taps = math.prod(lift.taps)
        rows = taps * lift.channels
        depth = self.gather.channels * math.prod(r.taps for r in self.gather.readings)
        products = p.batch * p.groups * self.places
        together = blocking.images if lift.flat else 1
        columns = together * self.places * blocking.rows // self.grid[0]
        lines, matrix = self.gather.elements
        copied = blocking.size_in_blocks * (lines * blocking.rows / self.grid[0] + matrix)
        summed = taps * math.prod(p.shape(p.result)) if taps > 1 else 0
        near = cached(p.device_type, self.arena.size)
        moved, apart = p.bytes + 2 * self.filter.copies * p.nbytes("w"), 0.0
        if p.device_type == "cpu":
            share = MKL.efficiency(rows, columns, depth)
            apart = near * products * (MKL.read * depth + WRITTEN * rows) + (1 + near) / 2 * LOWERED * copied
            apart += near * LIFTED * summed
        else:
            share = efficiency(p.device_type, rows, columns, depth, p.groups * blocking.images // together)
            size = compute_dtype(p).itemsize
            moved += int(near * 2 * ((copied + blocking.size_in_blocks * lift.product_elements) * size + summed * 4))
        steps = taps if taps > 1 else 0 if lift.direct else 1
        kernels = blocking.count * ((lines > 0) + (matrix > 0) + 1 + steps) + self.filter.copies
        return Cost(2 * products * rows * depth, moved, kernels, share, int(apart))

    def bind(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Run:
        """A run for tensors with the strides of these."""
        gather, lift, add = self.gather, self.lift, self.p.accumulate and self.lift.direct
        blocks = self.blocking.blocks()
        parts = list(zip(gather.bind(a, blocks), lift.bind(out, blocks), strict=True))
        if len(parts) == 1 and gather.direct and lift.direct and self.filter.view is not None:
            matrix = parts[0][0].matrix
            weights = self.filter.view.expanded(matrix.sizes[0])
            return straight(self.p, weights, matrix, parts[0][1].matrix, a.device)
        weight = self.filter.bind(b)

        def run(
            a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
        ) -> torch.Tensor:
            assert out is not None
            matrix = weight.of(b, workspace)
            gather.clear(workspace)
            for filling, part in parts:
                lowered, product = filling.fill(a, workspace), part.product(out, workspace)
                multiply(matrix.expand(lowered.shape[0], -1, -1, -1), lowered, product, add)
                part.lift_(out, workspace)
            return out

        return run


@functools.lru_cache(maxsize=1024)
def _planned(p: ConvProblem, lowered: tuple[bool, ...], order: Order, images: int, rows: int) -> Product:
    """The products of ``p``, kept for further calls."""
    kind = WeightGradient if p.pass_ is Pass.WGRAD else Correlation
    return kind(p, lowered, order, images, rows)


class Lowering(ConvSolver):
    """What all types of lowering share: blocks, orders of the matrices, and costs."""

    accumulates = True
    blocks_itself = True
    most_configs = 3

    @abc.abstractmethod
    def lowered(self, p: ConvProblem) -> tuple[bool, ...]:
        """Which axes are lowered before the product; the others are lifted behind it."""

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: it sums in fp32, so it adds only into fp32 results, and it does not round fp32 operands."""
        reasons = []
        if p.accumulate and p.out_dtype != "fp32":
            reasons.append(f"adds into fp32 results, not {p.out_dtype}")
        if p.out_dtype not in (p.dtype, "fp32"):
            reasons.append(f"gives {p.dtype} or fp32 results from {p.dtype}, not {p.out_dtype}")
        return reasons

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """The whole batch first, then blocks of images that shrink by four, then rows of one image.

        The same blocks for every batch, so that a part of a batch can be asked about what gained on the whole.
        """
        for order in self.orders(p):
            yield from self.blocks(p, order)

    def blocks(self, p: ConvProblem, order: Order) -> Iterable[Config]:
        """The configs of one order of the matrix: the whole batch, blocks of images, rows of one image."""
        least = 2 if order.merges else 1
        sizes = [*(2**e for e in range(29, 0, -2)), 1]
        configs = [Config(order=order.value)]
        configs += [Config(order=order.value, block=n) for n in sizes if least <= n < p.batch]
        yield from (c for c in configs if c == configs[-1] or self.workspace(p, c) <= MOST_BYTES)
        if not order.merges:
            yield from self._rows(p, order)

    def _rows(self, p: ConvProblem, order: Order) -> Iterable[Config]:
        """Configs of a single image in ever fewer rows, until the workspace is small."""
        one_image = Config(order=order.value, block=1)
        rows, size = self._plan(p, one_image).grid[0], self.workspace(p, one_image)
        while rows > 1 and size > SMALL_BYTES:
            rows = 2 ** ((rows - 1).bit_length() - 1)
            c = Config(order=order.value, block=1, rows=rows)
            size = self.workspace(p, c)
            yield c

    def offers(
        self, p: ConvProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterable[tuple[Config, int]]:
        """As :meth:`configs`; under a limit also with the largest power of two of images that keeps it."""
        configs = list(self.configs(p))
        if only is not None:
            configs = [c for c in only if c in configs or self._divides(p, c)]
        elif ceiling is not None:
            configs += [c for order in self.orders(p) for c in self._largest(p, order, ceiling) if c not in configs]
        return [(c, self.workspace(p, c)) for c in configs]

    def _divides(self, p: ConvProblem, c: Config) -> bool:
        """Whether ``c`` takes the batch of ``p`` in blocks of images."""
        images = c.get("block", 0)
        return isinstance(images, int) and 0 < images < p.batch and Order(c["order"]) in self.orders(p)

    def _largest(self, p: ConvProblem, order: Order, ceiling: int) -> Iterable[Config]:
        """The config with the largest power of two of images that fits ``ceiling`` bytes; empty where none does."""
        least = 0 if order.merges else -1
        for exponent in range((p.batch - 1).bit_length(), least, -1):
            c = Config(order=order.value, block=2**exponent) if 2**exponent < p.batch else Config(order=order.value)
            if self.workspace(p, c) + self.hidden_workspace(p, c) <= ceiling:
                return (c,)
        return ()

    def orders(self, p: ConvProblem) -> list[Order]:
        """Orders of the matrix worth trying, first the one of the operand's memory."""
        if p.layout(p.operands[0]) == "channels_last":
            return [Order.PIXELS]
        places = math.prod(axis.size if p.pass_ is Pass.DGRAD else axis.out for axis in p.axes)
        orders = [Order.IMAGES]
        if p.batch > 1 and (places < MERGED_PLACES or p.groups > 1 or p.pass_ is Pass.WGRAD):
            orders.append(Order.MERGED)
        return orders

    def plan(self, p: ConvProblem, order: Order, images: int, rows: int) -> Product:
        """The products of ``p`` in blocks of ``images`` images and ``rows`` rows (0: all rows)."""
        return _planned(p, self.lowered(p), order, images, rows)

    def _plan(self, p: ConvProblem, c: Config) -> Product:
        """The products of a config."""
        images, rows, order = c.get("block", p.batch), c.get("rows", 0), Order(c["order"])
        assert isinstance(images, int)
        assert isinstance(rows, int)
        return self.plan(p, order, images, rows)

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of lowered matrices, padded images, products that are lifted and copies of the filter."""
        return self._plan(p, c).arena.size

    def hidden_workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of the matrix library's own buffer."""
        return library_scratch(p)

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """The estimate of the config's products and copies."""
        return self._plan(p, c).cost()

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """A run for tensors with the strides of these. Raises ``ValueError`` where ``out`` is ``None``."""
        if out is None:
            raise ValueError(f"out=None: {self.name} writes into a tensor of shape {p.shape(p.result)}")
        run = self._plan(p, c).bind(a, b, out)
        return at_precision(p, run) if compute_dtype(p) == torch.float32 else run
