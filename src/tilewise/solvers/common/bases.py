"""Fourier basis sizes: the least that keeps a circular convolution exact, and the smooth ones above it (fbfft 3.4)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass

__all__ = [
    "Placement", "bases", "least", "least_whole", "meets", "placement", "result_placement", "smooth_sizes",
    "whole_placement",
]  # fmt: skip

RADIX_COST = {2: 1.0, 3: 1.05, 5: 1.15, 7: 1.25}
"""A transform's time per element relative to a power of two, by its largest radix: what FFT libraries usually reach."""
ODD_COST = 1.15
"""The same factor for an odd last size, where a real transform cannot be done as a complex one of half the length."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a tensor's elements lie along one axis of the Fourier basis.

    Elements ``start`` to ``start + count - 1`` of the tensor lie ``step`` places apart, the first of them at place
    ``lead``.
    """

    start: int
    count: int
    step: int
    lead: int

    @property
    def apart(self) -> int:
        """Places between neighbouring elements; 1 where there is only one element."""
        return self.step if self.count > 1 else 1


def placement(axis: Axis, role: str) -> Placement:
    """Where an operand lies in the basis: the image behind its padding, the gradient ``stride`` and taps ``dilation``
    apart.

    Inputs that are cropped, or that no output reads, are left out.
    """
    if role == "w":
        return Placement(0, axis.kernel, axis.dilation, 0)
    if role == "y":
        return Placement(0, axis.out, axis.stride, 0)
    start, stop = max(0, -axis.before), min(axis.size, _span(axis) - axis.before)
    return Placement(start, stop - start, 1, start + axis.before) if stop > start else Placement(0, 0, 1, 0)


def result_placement(axis: Axis, pass_: Pass) -> Placement:
    """Where the result lies in the inverse transform; inputs that no output reads have no place (they are zero)."""
    if pass_ is Pass.FPROP:
        return Placement(0, axis.out, axis.stride, 0)
    if pass_ is Pass.WGRAD:
        return Placement(0, axis.kernel, axis.dilation, 0)
    first, last = max(axis.before, 0), min(axis.before + axis.size, _span(axis))
    return Placement(first - axis.before, last - first, 1, first) if last > first else Placement(0, 0, 1, 0)


def least(axis: Axis, pass_: Pass) -> int:
    """The smallest size in which nothing that is read wraps onto something else.

    Zero padding is shared by both ends of the circle, so an image of ``size`` with padding ``b`` on both sides needs
    ``size + b``, not ``size + 2 * b``; and of a full convolution only what is kept must not be wrapped onto.
    """
    span = _span(axis)
    reach = max((axis.out - 1) * axis.stride + 1, axis.reach)
    if pass_ is Pass.DGRAD:
        first, last = max(axis.before, 0), min(axis.before + axis.size, span)
        return max(reach, last, span - first)
    image = placement(axis, "x")
    return max(reach, image.lead + image.count, span - image.lead)


def whole_placement(axis: Axis, role: str, pass_: Pass) -> Placement:
    """Where an operand or the whole result lies: also inputs behind the last that an output reads, as zeros.

    Inputs that are cropped before the first have no place.
    """
    if pass_ is Pass.DGRAD and role == "x":
        return Placement(max(0, -axis.before), axis.size + min(axis.before, 0), 1, max(axis.before, 0))
    return placement(axis, role)


def least_whole(axis: Axis, pass_: Pass) -> int:
    """The smallest basis size in which operands and result fit as :func:`whole_placement` places them."""
    return max(least(axis, pass_), axis.before + axis.size) if pass_ is Pass.DGRAD else least(axis, pass_)


def meets(axis: Axis) -> bool:
    """Whether any tap of any output reads an input element. A dilated kernel can step over all of them."""
    for r in range(axis.kernel):
        shift = r * axis.dilation - axis.before
        first = max(0, -(shift // axis.stride))
        if first < axis.out and first * axis.stride + shift < axis.size:
            return True
    return False


def _span(axis: Axis) -> int:
    """Length of the padded input that the outputs read, from the first place that is read to the last."""
    return (axis.out - 1) * axis.stride + axis.reach


@functools.lru_cache(maxsize=4096)
def smooth_sizes(size: int) -> tuple[int, ...]:
    """Sizes ``2^a 3^b 5^c 7^d`` from ``size`` to the next power of two, ascending."""
    top = 1 << max(size - 1, 0).bit_length()
    products = {1}
    for radix in RADIX_COST:
        for value in sorted(products):
            while (value := value * radix) <= top:
                products.add(value)
    return tuple(sorted(n for n in products if n >= size))


@functools.lru_cache(maxsize=4096)
def _radix_cost(size: int) -> float:
    """The cost per element of a transform of ``size``, from its largest factor in :data:`RADIX_COST`."""
    return max((cost for radix, cost in RADIX_COST.items() if size % radix == 0), default=1.0)


def _weight(basis: Sequence[int]) -> float:
    """Elements of the basis, weighted by what transforms of its sizes take per element."""
    cost = math.prod(n * _radix_cost(n) for n in basis)
    return cost * (ODD_COST if basis[-1] % 2 else 1.0)


@functools.lru_cache(maxsize=4096)
def bases(p: ConvProblem, most: int) -> tuple[tuple[int, ...], ...]:
    """At most ``most`` Fourier bases (one size per spatial axis) for ``p``, the cheapest first by :func:`_weight`.

    The basis of powers of two is always among them.
    """
    axes = [smooth_sizes(least(axis, p.pass_)) for axis in p.axes]
    few = [sorted(sizes, key=lambda n: n * _radix_cost(n))[:most] for sizes in axes]
    ranked = sorted(itertools.product(*few), key=_weight)[:most]
    powers = tuple(sizes[-1] for sizes in axes)
    if powers not in ranked:
        ranked[most - 1 :] = [powers]
    return tuple(ranked)
