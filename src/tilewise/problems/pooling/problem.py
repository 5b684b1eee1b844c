"""Pooling: frozen, hashable problems with a canonical text key.

A :class:`PoolingProblem` knows its tensors and least memory traffic, how it is cut, and its value in float64. It knows
nothing of algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tilewise.problems.base import DTYPES, Part, Problem, parts_of_batch, read_back
from tilewise.problems.pooling.key import LAYOUTS, OPS, TASKS, fields_of, key_of
from tilewise.problems.pooling.reference import reference
from tilewise.problems.pooling.sizes import Window, pooled, windows

__all__ = ["PoolingProblem"]


@dataclass(frozen=True, slots=True)
class PoolingProblem(Problem):
    """A call of ``nn.MaxPool1d`` to ``nn.MaxPool3d`` or ``nn.AvgPool1d`` to ``nn.AvgPool3d``.

    ``op`` is ``max`` or ``avg``. The input ``x`` is (batch, channels, *space), with one to three axes in ``space``, and
    so is the result ``y``, with as many results as ``pooled_space`` says. ``kernel``, ``stride``, ``padding`` and
    ``dilation`` have a number for each axis. ``ceil_mode`` rounds the number of results up. An average is divided by
    ``divisor``, or where that is 0 by the number of elements of the window: those in the padding count with
    ``count_include_pad``. The ``task`` ``inference`` is the forward; ``training`` is forward and backward together: it
    has the gradient ``dy`` of the result as an operand and the gradient ``dx`` of the input as a result.

    All tensors are dense, in the ``layout`` ``contiguous`` or ``channels_last``, and have the type ``dtype``.
    ``device`` is ``"cpu"`` or ``"cuda:<name>"``. Fields that make no difference are set to their defaults, so that
    equal problems are equal.

    Raises ``ValueError`` naming the field for what makes no pooling. For example
    ``PoolingProblem("max", 16, 64, (112, 112), (3, 3), (2, 2), (1, 1))`` is the pooling of ResNet-50.
    """

    kind: ClassVar[str] = "pool"
    accumulate: ClassVar[bool] = False
    precision: ClassVar[str] = "ieee"
    cut_axes: ClassVar[tuple[str, ...]] = ("batch",)

    op: str
    batch: int
    channels: int
    space: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor: int = 0
    task: str = "inference"
    layout_name: str = "contiguous"
    dtype: str = "fp32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        known = {"op": OPS, "task": TASKS, "layout_name": LAYOUTS, "dtype": tuple(DTYPES)}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r}: one of {', '.join(values)} would do")
        dims = len(self.space)
        if not 1 <= dims <= 3:
            raise ValueError(f"space={self.space}: one to three axes would do")
        for name, start in (("padding", 0), ("dilation", 1)):
            if not getattr(self, name):
                object.__setattr__(self, name, (start,) * dims)
        for name in ("kernel", "stride", "padding", "dilation"):
            if len(getattr(self, name)) != dims:
                raise ValueError(f"{name}={getattr(self, name)}: {dims} numbers would do, one for each axis of space")
        for name in ("batch", "channels", "space", "kernel", "stride", "dilation"):
            value = getattr(self, name)
            if min(value if isinstance(value, tuple) else (value,)) < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        self._check_windows()
        self._normalise()

    def _check_windows(self) -> None:
        """Refuse windows that torch refuses, and those without any input, of which a maximum is nowhere."""
        if self.op == "avg" and any(d != 1 for d in self.dilation):
            raise ValueError(f"dilation={self.dilation}: an average has dilation 1")
        if self.divisor < 0 or (self.op == "max" and self.divisor):
            raise ValueError(f"divisor={self.divisor}: a positive number for an average, else 0, would do")
        for kernel, padding in zip(self.kernel, self.padding, strict=True):
            if not 0 <= padding <= kernel // 2:
                raise ValueError(f"padding={self.padding}: from 0 to half of the kernel {self.kernel} would do")
        small = any(n < k for n, k in zip(self.space, self.kernel, strict=True))
        if self.op == "avg" and len(self.space) == 3 and small:
            raise ValueError(f"space={self.space}: torch averages planes of volume at least as large as {self.kernel}")
        if min(self.pooled_space) < 1:
            raise ValueError(f"space={self.space}: is smaller than the kernel {self.kernel}; there is no result")
        if self.op == "max" and any(d > 1 for d in self.dilation):
            for axis in range(len(self.space)):
                if any(window.count < 1 for window in self.windows(axis)):
                    raise ValueError(f"dilation={self.dilation}: a window has no element inside the input")

    def _normalise(self) -> None:
        """Set what makes no difference to its default."""
        sizes = (self.space, self.kernel, self.stride, self.padding, self.dilation)
        if self.ceil_mode and self.pooled_space == tuple(pooled(*each, False) for each in zip(*sizes, strict=True)):
            object.__setattr__(self, "ceil_mode", False)
        if self.op == "max" or self.divisor or not any(self.padding):
            object.__setattr__(self, "count_include_pad", True)

    @property
    def pooled_space(self) -> tuple[int, ...]:
        """The results along each axis."""
        sizes = (self.space, self.kernel, self.stride, self.padding, self.dilation)
        return tuple(pooled(*each, self.ceil_mode) for each in zip(*sizes, strict=True))

    def windows(self, axis: int) -> Sequence[Window]:
        """The windows along an axis of ``space``."""
        a = axis
        results = self.pooled_space[a]
        return windows(self.space[a], self.kernel[a], self.stride[a], self.padding[a], self.dilation[a], results)

    def counts(self, axis: int) -> list[int]:
        """The factor of each result's divisor that an axis of ``space`` gives; 1 where ``divisor`` is given."""
        if self.divisor:
            return [1] * self.pooled_space[axis]
        return [window.padded if self.count_include_pad else window.count for window in self.windows(axis)]

    @property
    def window(self) -> int:
        """The number of elements of a window."""
        return math.prod(self.kernel)

    @property
    def out_dtype(self) -> str:
        """That of the operands."""
        return self.dtype

    @property
    def operands(self) -> tuple[str, ...]:
        """``x``, and for training ``dy``."""
        return ("x",) if self.task == "inference" else ("x", "dy")

    @property
    def results(self) -> tuple[str, ...]:
        """``y``, and for training ``dx``."""
        return ("y",) if self.task == "inference" else ("y", "dx")

    def shape(self, role: str) -> tuple[int, ...]:
        """Shape of the tensor of ``role``."""
        if role not in self.roles:
            raise ValueError(f"role={role!r}: one of {', '.join(self.roles)} would do")
        return (self.batch, self.channels, *(self.space if role in ("x", "dx") else self.pooled_space))

    def layout(self, role: str) -> str:
        """The layout of all tensors."""
        return self.layout_name

    @property
    def flops(self) -> int:
        """Comparisons or additions: one for each element of a window, and one more for its gradient."""
        each = math.prod(self.shape("y")) * self.window
        return each if self.task == "inference" else 2 * each

    @property
    def key(self) -> str:
        """Canonical text: equal for equal problems, different for different ones."""
        return key_of(self)

    @classmethod
    def from_key(cls, text: str) -> PoolingProblem:
        """Read :attr:`key` back, whoever wrote it. Raises ``ValueError`` for what is no pooling's key."""
        return read_back(cls(**fields_of(text)), text)

    def extent(self, axis: str) -> int:
        """The images of the batch, which is the only axis that is cut."""
        if axis != "batch":
            raise ValueError(f"axis={axis!r}: batch would do")
        return self.batch

    def split(self, axis: str, sizes: Sequence[int]) -> tuple[Part[PoolingProblem], ...]:
        """Cut the batch into parts of ``sizes`` images, in order. Each sets its own images of the results.

        Raises ``ValueError`` for another axis, and for sizes that are not the batch together.
        """
        return parts_of_batch(self, axis, sizes, self.roles)

    def reference(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """The result in float64, and for training the gradient of the input, from all operands."""
        return reference(self, operands)
