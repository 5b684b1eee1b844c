"""Tensors as Triton kernels take them: 5-D views, pointers into operands and workspace, and launches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tilewise.problems.activations import activation_kind, kernel_parameters
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.common.buffers import Slot

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["OUT", "A", "B", "View", "at", "counted", "epilogue", "group_views", "launch", "residual_like", "within"]

A, B, OUT, WORKSPACE, BIAS = range(5)
"""Numbers of the tensors that a launch's pointers refer to: operands, result, workspace and bias.

A residual follows the bias, and has its number where there is none.
"""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor with three spatial axes, without its data.

    Sizes and strides are those of (images, channels, depth, height, width). Strides and ``offset`` are in elements.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """The view of a tensor with 1, 2 or 3 spatial axes; those it lacks get size 1 and stride 0."""
        missing = 5 - tensor.dim()
        sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
        return cls((*sizes[:2], *[1] * missing, *sizes[2:]), (*strides[:2], *[0] * missing, *strides[2:]), tensor.dtype)

    def narrow(self, dim: int, start: int, length: int) -> View:
        """The view of ``length`` places of dimension ``dim`` from ``start`` on."""
        sizes = (*self.sizes[:dim], length, *self.sizes[dim + 1 :])
        return View(sizes, self.strides, self.dtype, self.offset + start * self.strides[dim])

    def swapped(self) -> View:
        """The view with images and channels exchanged."""
        sizes, strides = ((t[1], t[0], *t[2:]) for t in (self.sizes, self.strides))
        return View(sizes, strides, self.dtype, self.offset)

    def reordered(self, order: Sequence[int]) -> View:
        """The view with its dimensions in another ``order``."""
        sizes, strides = (tuple(t[i] for i in order) for t in (self.sizes, self.strides))
        return View(sizes, strides, self.dtype, self.offset)

    def reversed(self, dim: int) -> View:
        """The view with dimension ``dim`` read from its last place to its first."""
        stride = self.strides[dim]
        strides = (*self.strides[:dim], -stride, *self.strides[dim + 1 :])
        return View(self.sizes, strides, self.dtype, self.offset + (self.sizes[dim] - 1) * stride)

    @property
    def dense(self) -> bool:
        """Whether each image's elements lie in memory without gaps, in any order."""
        expected = 1
        for stride, size in sorted(zip(self.strides[1:], self.sizes[1:], strict=True)):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def aligned(self) -> int:
        """How many elements a vector access along channels may take: a power of two up to 8.

        It divides the number of channels and all other strides. 0 where channels are not innermost.
        """
        if self.sizes[1] == 1 or self.strides[1] != 1:
            return 0
        other_strides = [stride for dim, stride in enumerate(self.strides) if dim != 1 and self.sizes[dim] > 1]
        return math.gcd(8, self.sizes[1], *other_strides)

    @property
    def span(self) -> int:
        """Elements from the first to the last in memory."""
        return sum((size - 1) * abs(stride) for size, stride in zip(self.sizes, self.strides, strict=True))


def counted(view: View) -> View:
    """``view``, if 32-bit integers can address its elements.

    Raises ``SolverUnavailable`` where they lie too far apart.
    """
    if view.span >= 2**31:
        raise SolverUnavailable(f"strides {view.strides} of sizes {view.sizes} are too large to count in 32 bits")
    return view


def group_views(p: ConvProblem, a: View, b: View, out: View) -> Iterator[tuple[View, View, View, Any]]:
    """Views of operands and result for each group: the gathered operand, the other operand, the result.

    The gathered operand is the input, or the output gradient in a data gradient. Filters are turned so that its
    channels are their second dimension. The fourth item is the pointer to the bias of the group, or ``None`` without a
    bias.
    """
    into, outof = p.in_channels // p.groups, p.out_channels // p.groups
    for g in range(p.groups):
        x_part, y_part = (g * into, into), (g * outof, outof)
        if p.pass_ is Pass.WGRAD:
            yield a.narrow(1, *x_part), b.narrow(1, *y_part), out.narrow(0, *y_part), None
        elif p.pass_ is Pass.DGRAD:
            yield a.narrow(1, *y_part), b.narrow(0, *y_part).swapped(), out.narrow(1, *x_part), _bias(p, g * into)
        else:
            yield a.narrow(1, *x_part), b.narrow(0, *y_part), out.narrow(1, *y_part), _bias(p, g * outof)


def at(slot: Slot, elements: int = 0) -> Any:
    """The pointer ``elements`` elements into a slot of the workspace."""
    from tilewise.kernels.triton.launch import Pointer

    return Pointer(WORKSPACE, slot.offset + elements * slot.dtype.itemsize, slot.dtype)


def within(view: View, source: int) -> Any:
    """The pointer to the first element of a view of tensor number ``source``."""
    from tilewise.kernels.triton.launch import Pointer

    return Pointer(source, view.offset * view.dtype.itemsize, view.dtype)


def _bias(p: ConvProblem, channel: int) -> Any:
    """The pointer to the bias of the results from ``channel`` on; ``None`` where the problem has no bias."""
    from tilewise.kernels.triton.launch import Pointer

    dtype = p.torch_dtype(p.result)
    return Pointer(BIAS, channel * dtype.itemsize, dtype) if p.bias else None


def residual_like(p: ConvProblem, result: Any) -> Any:
    """The pointer to what is added to the numbers at the pointer ``result``; ``result`` where there is no residual."""
    return replace(result, source=BIAS + p.bias) if p.residual else result


def epilogue(p: ConvProblem) -> dict[str, Any]:
    """A kernel's compile-time constants for what follows sums and bias: the residual, and the activation."""
    first, second = kernel_parameters(p.activation)
    return {"RESIDUAL": p.residual, "ACTIVATION": activation_kind(p.activation), "FIRST": first, "SECOND": second}


def launch(kernel: Any, grid: Sequence[int], pointers: Sequence[Any], scalars: Sequence[int | float], warps: int = 4,
           stages: int = 2, **constants: Any) -> Launch:  # fmt: skip
    """One launch of a Triton kernel with its arguments in order: pointers, scalars, compile-time constants.

    ``grid`` has one to three sizes.
    """
    from tilewise.kernels.triton.launch import Launch

    x, y, z = (*grid, 1, 1)[:3]
    return Launch(kernel, (x, y, z), tuple(pointers), tuple(scalars), constants, warps, stages)
