"""From products to the result: straight into it, through a copy, or summed over the taps that were not lowered."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewise.problems.base import dense_strides
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.common.buffers import Arena, Strided, dense, fuse, fused
from tilewise.solvers.common.matmul import as_matrix
from tilewise.solvers.lowering._copies import Copy
from tilewise.solvers.lowering._gather import Block, Order

__all__ = ["BoundLift", "Lift", "joins"]


def joins(result: torch.dtype, products: torch.dtype) -> bool:
    """Whether products of dtype ``products`` may be written as dtype ``result``: the same, or fp32."""
    return result in (products, torch.float32)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Which products of one tap are added to which results along one axis.

    ``count`` of them: the results begin at ``to`` and are ``to_step`` apart, the products begin at ``source`` and are
    ``source_step`` apart.
    """

    to: int
    to_step: int
    source: int
    source_step: int
    count: int


def meeting(axis: Axis, pass_: Pass, tap: int, start: int, stop: int) -> Meeting:
    """Where products of places ``[start, stop)`` at ``tap`` go, along an axis that is lifted.

    In FPROP places are inputs and results are outputs; in DGRAD the other way round.
    """
    shift, s = tap * axis.dilation - axis.before, axis.stride
    if pass_ is Pass.FPROP:
        first = max(0, -((shift - start) // s))
        last = min(axis.out, (stop - 1 - shift) // s + 1)
        return Meeting(first, 1, first * s + shift - start, s, max(last - first, 0))
    first = max(start, -(shift // s))
    last = min(stop, (axis.size - 1 - shift) // s + 1)
    return Meeting(first * s + shift, s, first - start, 1, max(last - first, 0))


class Lift:
    """Where products (images, groups, rows, columns) go; rows are lifted taps and the result's channels.

    With ``direct`` the product is written (or added) straight into the result. Otherwise it goes to a buffer, from
    which it is copied, or summed tap by tap into clipped slices: the lifting phase of Caffe con Troll, section 2.1,
    without a padded grid. Sums over taps are kept in fp32.
    """

    def __init__(
        self,
        p: ConvProblem,
        lowered: Sequence[bool],
        order: Order,
        grid: Sequence[int],
        block: Block,
        dtype: torch.dtype,
        arena: Arena,
    ) -> None:
        """``grid`` are the places along each axis of the whole product."""
        order = order.plain
        self.p, self.lowered, self.order = p, tuple(lowered), order
        self.grid, self.largest = tuple(grid), block
        self.channels = p.shape(p.result)[1] // p.groups
        self.taps = tuple(1 if low else axis.kernel for low, axis in zip(lowered, p.axes, strict=True))
        self.result_dtype = p.torch_dtype(p.result)
        self.flat = order is not Order.IMAGES
        self.direct = False
        if all(lowered) and p.layout(p.result) != "view" and joins(self.result_dtype, dtype):
            strides = dense_strides(p.shape(p.result), p.layout(p.result))
            for flat in order.flats:
                if self._result_matrix(strides, block, flat) is not None:
                    self.direct, self.flat = True, flat
                    break
        # Nothing is summed behind the product, so it may have the result's type already.
        kept = self.result_dtype if all(lowered) and joins(self.result_dtype, dtype) else dtype
        self._products = None if self.direct else arena.add((math.prod(self._sizes(block)),), kept)
        self._sums = None
        if not all(lowered) and self.result_dtype != torch.float32:
            space = [axis.size if p.pass_ is Pass.DGRAD else axis.out for axis in p.axes]
            channels = p.shape(p.result)[1]
            shape = (block.images, *space, channels) if order.channel_last else (block.images, channels, *space)
            self._sums = arena.add(shape, torch.float32)

    @property
    def product_elements(self) -> int:
        """Elements of the products' buffer for the largest block; 0 where they go straight to the result."""
        return self._products.sizes[0] if self._products else 0

    def _sizes(self, block: Block) -> tuple[int, ...]:
        """Sizes of a block's products as (image, group, tap, channel, places)."""
        return (block.images, self.p.groups, math.prod(self.taps), self.channels, block.places, *self.grid[1:])

    def _permutation(self) -> tuple[int, ...]:
        """Positions in (image, group, tap, channel, places) of the buffer's dimensions, outermost first."""
        places = range(4, 4 + self.p.dims)
        if self.order is Order.IMAGES:
            return (0, 1, 2, 3, *places)
        if self.order in (Order.PIXELS, Order.PATCHES):
            return (0, *places, 1, 2, 3)
        return (1, 2, 3, 0, *places)

    def _result_matrix(
        self, strides: Sequence[int], block: Block, flat: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The block's part of the result as (images, groups, rows, columns), or ``None`` where it is no matrix."""
        sizes = (block.images, self.p.groups, self.channels, block.places, *self.grid[1:])
        whole = (strides[0], self.channels * strides[1], *strides[1:])
        places = tuple(range(3, 3 + self.p.dims))
        groups = ((), (1,), (2,), (0, *places)) if flat else ((0,), (1,), (2,), places)
        return fuse(sizes, whole, groups)

    def bind(self, out: torch.Tensor, blocks: Sequence[Block]) -> list[BoundLift]:
        """For each block where its products go, for results with the strides of this one."""
        return [BoundLift(self, out.stride(), block) for block in blocks]


class BoundLift:
    """A :class:`Lift` of one block, for fixed strides of the result."""

    def __init__(self, lift: Lift, strides: tuple[int, ...], block: Block) -> None:
        self.lift, self.block = lift, block
        p, dims = lift.p, lift.p.dims
        self.first = block.place == 0
        self.last = block.place + block.places == lift.grid[0]
        if lift.direct:
            matrix = lift._result_matrix(strides, block, lift.flat)
            if matrix is None:
                raise SolverUnavailable(f"a result of strides {strides} has not the problem's layout")
            offset = block.image * strides[0] + block.place * strides[2]
            self.matrix = Strided(matrix[0], as_matrix(*matrix), offset)
            return
        sizes, permutation = lift._sizes(block), lift._permutation()
        in_order = tuple(sizes[i] for i in permutation)
        product = [0] * len(sizes)
        for position, stride in zip(permutation, dense(in_order), strict=True):
            product[position] = stride
        places = tuple(range(4, 4 + dims))
        groups = ((), (1,), (2, 3), (0, *places)) if lift.flat else ((0,), (1,), (2, 3), places)
        matrix = fused(sizes, product, groups)
        self.matrix = Strided(matrix[0], as_matrix(*matrix))
        image, channel, *space = strides
        self.whole = Strided(
            (block.images, p.groups, lift.channels, *(a.size if p.pass_ is Pass.DGRAD else a.out for a in p.axes)),
            (image, lift.channels * channel, channel, *space),
            block.image * image,
        )
        target = self.whole
        if lift._sums is not None:
            inner = dense(lift._sums.sizes)
            s = (inner[0], inner[-1], *inner[1:-1]) if lift.order.channel_last else inner
            target = Strided(self.whole.sizes, (s[0], lift.channels * s[1], *s[1:]))
        self.target = target
        self.steps = self._steps(product, target)
        assert lift._products is not None
        self.copy: Copy | None = None
        if all(lift.lowered):
            to, source = self.steps[0]
            types = lift._products.dtype, lift.result_dtype
            self.copy = Copy.of(source, to, types, p.alignment[ROLES.index(p.result)])

    def _steps(self, product: Sequence[int], target: Strided) -> list[tuple[Strided, Strided]]:
        """Pairs (slice of the target, slice of the products), one for each lifted tap.

        A pair that covers the whole target comes first, if there is one.
        """
        lift, block, p = self.lift, self.block, self.lift.p
        image, group, tap_stride, channel, *places = product
        steps: list[tuple[Strided, Strided]] = []
        covering = 0
        for number, tap in enumerate(itertools.product(*(range(n) for n in lift.taps))):
            meetings = []
            for i, axis in enumerate(p.axes):
                start, count = (block.place, block.places) if i == 0 else (0, lift.grid[i])
                if lift.lowered[i]:
                    meetings.append(Meeting(start, 1, 0, 1, count))
                else:
                    meetings.append(meeting(axis, p.pass_, tap[i], start, start + count))
            counts = tuple(m.count for m in meetings)
            if 0 in counts:
                continue
            sizes = (*target.sizes[:3], *counts)
            to = Strided(
                sizes,
                (*target.strides[:3], *(m.to_step * s for m, s in zip(meetings, target.strides[3:], strict=True))),
                target.offset + sum(m.to * s for m, s in zip(meetings, target.strides[3:], strict=True)),
            )
            source = Strided(
                sizes,
                (image, group, channel, *(m.source_step * s for m, s in zip(meetings, places, strict=True))),
                number * tap_stride + sum(m.source * s for m, s in zip(meetings, places, strict=True)),
            )
            if counts == target.sizes[3:]:
                covering = len(steps)
            steps.append((to, source))
        if steps:
            steps.insert(0, steps.pop(covering))
        return steps

    @property
    def covered(self) -> bool:
        """Whether the first step writes every element of the target."""
        return bool(self.steps) and self.steps[0][0].sizes == self.target.sizes

    def product(self, out: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        """Where the block's products are to be written, as (images, groups, rows, columns)."""
        slot = self.lift._products
        return self.matrix.of(out if slot is None else slot.of(workspace))

    def lift_(self, out: torch.Tensor, workspace: torch.Tensor | None) -> None:
        """Move the block's products into the result, adding where the problem accumulates."""
        lift = self.lift
        if lift._products is None:
            return
        products = lift._products.of(workspace)
        add = lift.p.accumulate
        if self.copy is not None:
            (self.copy.add if add else self.copy.run)(products, out)
            return
        sums = out if lift._sums is None else lift._sums.of(workspace)
        steps = self.steps
        if self.first and not add:
            if self.covered:
                steps[0][0].of(sums).copy_(steps[0][1].of(products))
                steps = steps[1:]
            else:
                self.target.of(sums).zero_()
        for to, source in steps:
            to.of(sums).add_(source.of(products))
        if self.last and lift._sums is not None:
            self.whole.of(out).copy_(self.target.of(sums))
