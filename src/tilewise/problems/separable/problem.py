"""Depthwise convolutions with the pointwise ones around them: frozen, hashable problems with a canonical text key.

A :class:`SeparableProblem` knows its tensors, floating-point operations and least memory traffic, its parts and its
value in float64. It knows nothing of algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tilewise.problems.activations import require_activation
from tilewise.problems.base import DTYPES, Part, Problem, parts_of_batch, read_back
from tilewise.problems.conv.axis import Axis
from tilewise.problems.separable.key import fields_of, key_of
from tilewise.problems.separable.reference import reference
from tilewise.problems.separable.stages import channels_of, weight_shapes

__all__ = ["SeparableProblem"]


@dataclass(frozen=True, slots=True)
class SeparableProblem(Problem):
    """A depthwise convolution of images with a pointwise one before it, behind it, or both, for inference.

    These are the blocks of MobileNets and EfficientNets: the pointwise convolution before ``expands`` ``in_channels``
    to ``channels``, the depthwise one filters each of these by ``axes`` (height, width), and the one behind
    ``projects`` them to ``out_channels`` (Howard et al. 2017, section 3.1; Sandler et al. 2018, section 3.3). Pointwise
    convolutions are 1x1 with stride 1. A function of :data:`~tilewise.problems.activations.CONV_ACTIVATIONS` follows
    each convolution: those of ``inner`` all but the last, and ``activation`` the last one, after the ``residual``, a
    tensor like the result, where there is one.

    The operands are ``x`` (batch, in_channels, height, width) and ``w``, a vector with each convolution's filters,
    (outputs, inputs of a group, height, width), and then its bias. Filters stay the same between calls. Images are in
    channels_last. ``dtype`` is that of all tensors. ``device`` is ``"cpu"`` or ``"cuda:<name>"``.

    Raises ``ValueError`` naming the field for values that make no such convolution. For example
    ``SeparableProblem(1, 16, 96, 24, (Axis(112, 3, 2, 1, 1, 1),) * 2, inner=("relu6", "relu6"))`` is the second block
    of a MobileNetV2.

    >>> from tilewise.problem import Axis, SeparableProblem
    >>> side = Axis(112, 3, 2, 1, 1, 1)
    >>> SeparableProblem(1, 16, 96, 24, (side, side), inner=("relu6", "relu6")).shape("y")
    (1, 24, 56, 56)
    """

    kind: ClassVar[str] = "separable"
    accumulate: ClassVar[bool] = False
    precision: ClassVar[str] = "ieee"
    cut_axes: ClassVar[tuple[str, ...]] = ("batch",)
    operands: ClassVar[tuple[str, ...]] = ("x", "w")
    results: ClassVar[tuple[str, ...]] = ("y",)
    constant_operand: ClassVar[str] = "w"
    task: ClassVar[str] = "inference"

    batch: int
    in_channels: int
    channels: int
    out_channels: int
    axes: tuple[Axis, Axis]
    expands: bool = True
    projects: bool = True
    inner: tuple[str, ...] = ("none", "none")
    activation: str = "none"
    residual: bool = False
    dtype: str = "fp32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("batch", "in_channels", "channels", "out_channels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: one of {', '.join(DTYPES)} would do")
        if len(self.axes) != 2:
            raise ValueError(f"axes={self.axes}: two, of height and width, would do")
        if not self.expands and not self.projects:
            raise ValueError(
                "expands and projects: a depthwise convolution alone is a ConvProblem; one of them would do"
            )
        for present, name in ((self.expands, "in_channels"), (self.projects, "out_channels")):
            if not present and getattr(self, name) != self.channels:
                raise ValueError(f"{name}={getattr(self, name)}: without that convolution {self.channels} would do")
        if len(self.inner) != int(self.expands) + int(self.projects):
            count = int(self.expands) + int(self.projects)
            raise ValueError(f"inner={self.inner}: one function for each convolution but the last, {count}, would do")
        for function in self.functions:
            require_activation(function)

    @property
    def functions(self) -> tuple[str, ...]:
        """The function that follows each convolution, in order."""
        return (*self.inner, self.activation)

    @property
    def out_dtype(self) -> str:
        """That of the operands."""
        return self.dtype

    def shape(self, role: str) -> tuple[int, ...]:
        """Shape of the tensor of ``role``. Raises ``ValueError`` for an unknown role."""
        height, width = self.axes
        if role == "x":
            return self.batch, self.in_channels, height.size, width.size
        if role == "y":
            return self.batch, self.out_channels, height.out, width.out
        if role == "w":
            return (sum(math.prod(shape) + shape[0] for shape in weight_shapes(self)),)
        raise ValueError(f"role={role!r}: one of {', '.join(self.roles)} would do")

    def layout(self, role: str) -> str:
        """``channels_last`` for images, where that differs from ``contiguous``."""
        if role == "w":
            return "contiguous"
        _, channels, *space = self.shape(role)
        return "contiguous" if channels == 1 or math.prod(space) == 1 else "channels_last"

    @property
    def pixels(self) -> tuple[int, int]:
        """Pixels of an image before and behind the depthwise convolution."""
        height, width = self.axes
        return height.size * width.size, height.out * width.out

    @property
    def flops(self) -> int:
        """Floating-point operations: two for each product."""
        height, width = self.axes
        into, outof = self.pixels
        total = outof * self.channels * height.kernel * width.kernel
        for number, (inputs, outputs) in enumerate(channels_of(self)):
            if number != int(self.expands):
                total += (into if number < int(self.expands) else outof) * inputs * outputs
        return 2 * self.batch * total

    @property
    def bytes(self) -> int:
        """Least memory traffic: operands read once, results written once, and a residual read."""
        return sum(self.nbytes(role) for role in self.roles) + self.residual * self.nbytes("y")

    @property
    def key(self) -> str:
        """Canonical text: equal for equal problems, different for different ones."""
        return key_of(self)

    @classmethod
    def from_key(cls, text: str) -> SeparableProblem:
        """Read :attr:`key` back, whoever wrote it. Raises ``ValueError`` for what is no separable convolution's key."""
        return read_back(cls(**fields_of(text)), text)

    def extent(self, axis: str) -> int:
        """The batch. Raises ``ValueError`` for another axis."""
        if axis != "batch":
            raise ValueError(f"axis={axis!r}: a separable convolution is cut along 'batch'")
        return self.batch

    def split(self, axis: str, sizes: Sequence[int]) -> tuple[Part[SeparableProblem], ...]:
        """Cut the batch into parts of ``sizes`` images, in order. Each sets its own images of the result.

        Raises ``ValueError`` for another axis, and for sizes that are not the batch together.
        """
        return parts_of_batch(self, axis, sizes, ("x", "y"))

    def reference(self, *operands: torch.Tensor) -> torch.Tensor:
        """The result in float64, without residual and the last function; biases and other functions are within."""
        return reference(self, *operands)
