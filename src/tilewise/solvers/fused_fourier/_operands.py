"""Operands of fused convolutions as the kernels in CUDA C++ take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.solvers.common.bases import Placement, whole_placement

__all__ = ["Operand", "operands"]


@dataclass(frozen=True, slots=True)
class Operand:
    """The part of a tensor that counts: its place in the basis along each axis, and its strides in elements.

    ``start`` is the byte offset of its first element. For a filter ``channel`` is the stride of output channels and
    ``image`` that of input channels. ``pairs`` says that neighbours along the last axis can be read two at a time.
    """

    places: tuple[Placement, ...]
    image: int
    channel: int
    space: tuple[int, ...]
    start: int
    pairs: bool

    @classmethod
    def of(cls, p: ConvProblem, role: str, tensor: torch.Tensor) -> Operand:
        """The tensor with ``role`` in problem ``p``."""
        places = tuple(whole_placement(axis, role, p.pass_) for axis in p.axes)
        strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        image, channel = strides[1::-1] if role == "w" else strides[:2]
        space = strides[2:]
        first = sum(place.start * stride for place, stride in zip(places, space, strict=True))
        outer = [stride for place, stride in zip(places[:-1], space[:-1], strict=True) if place.count > 1]
        even = not any(n % 2 for n in (image, channel, first, places[-1].count, *outer))
        itemsize = tensor.element_size()
        aligned = p.alignment[ROLES.index(role)] % (2 * itemsize) == 0
        return cls(places, image, channel, tuple(space), first * itemsize, even and aligned and space[-1] == 1)


def operands(p: ConvProblem, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> dict[str, Operand]:
    """The operands and the result by role."""
    return {role: Operand.of(p, role, t) for role, t in zip((*p.operands, p.result), (a, b, out), strict=True)}


def correlates(p: ConvProblem) -> bool:
    """Whether the pass multiplies with the conjugate of the second spectrum."""
    return p.pass_ is not Pass.DGRAD
