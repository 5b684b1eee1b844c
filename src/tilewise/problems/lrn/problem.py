"""Local response normalization across channels: frozen, hashable problems with a canonical text key.

A :class:`LrnProblem` knows its tensors, floating-point operations and least memory traffic, its parts and its value in
float64. It knows nothing of algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tilewise.problems.base import DTYPES, Part, Problem, parts_of_batch, read_back
from tilewise.problems.lrn.key import LAYOUTS, TASKS, fields_of, key_of
from tilewise.problems.lrn.reference import reference

__all__ = ["LrnProblem"]

POWER = 20
"""Operations of a power and a division, roughly."""


@dataclass(frozen=True, slots=True)
class LrnProblem(Problem):
    """A call of ``nn.LocalResponseNorm`` (Krizhevsky et al. 2012, section 3.3).

    It computes ``y = x / (k + alpha / size * s)^beta``. There ``s`` is the sum of squares over a window of ``size``
    channels at the same place of the same image: ``size // 2`` before a channel, itself, and ``(size - 1) // 2`` behind
    it. What lies outside of the image's channels counts as 0, and ``alpha`` is divided by ``size`` all the same. This
    is torch's function, and Caffe's layer in its mode ``ACROSS_CHANNELS``, which takes odd sizes only.

    ``x`` and ``y`` are (batch, channels, *space), with one axis of space or more, dense in the layout ``layout_name``:
    ``contiguous`` or ``channels_last``. The ``task`` ``inference`` is the forward; ``training`` is forward and backward
    together, with the gradient ``dx`` of ``x`` by that of ``y``, ``dy``. ``dtype`` is that of all tensors. ``device``
    is ``"cpu"`` or ``"cuda:<name>"``.

    Raises ``ValueError`` naming the field for values that make no normalization. For example
    ``LrnProblem(64, 96, (55, 55), 5, task="training")`` is AlexNet's first one, for a batch of 64.
    """

    kind: ClassVar[str] = "lrn"
    accumulate: ClassVar[bool] = False
    precision: ClassVar[str] = "ieee"
    cut_axes: ClassVar[tuple[str, ...]] = ("batch",)

    batch: int
    channels: int
    space: tuple[int, ...]
    size: int
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 1.0
    task: str = "inference"
    layout_name: str = "contiguous"
    dtype: str = "fp32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        known = {"task": TASKS, "layout_name": LAYOUTS, "dtype": tuple(DTYPES)}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r}: one of {', '.join(values)} would do")
        for name in ("batch", "channels", "size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if not self.space or min(self.space) < 1:
            raise ValueError(f"space={self.space}: one size or more, each at least 1, would do")
        for name in ("alpha", "beta", "k"):
            number = getattr(self, name)
            if not math.isfinite(number):
                raise ValueError(f"{name}={number}: a finite number would do")
            object.__setattr__(self, name, float(number) + 0.0)  # 1 is 1.0, and -0.0 is 0.0: one key for each number
        if self.layout_name == "channels_last" and (self.channels == 1 or math.prod(self.space) == 1):
            # Both names are one arrangement in memory, so both would be one problem.
            object.__setattr__(self, "layout_name", "contiguous")

    @property
    def out_dtype(self) -> str:
        """That of the operands."""
        return self.dtype

    @property
    def operands(self) -> tuple[str, ...]:
        """Roles of the operands: ``x``, and for training ``dy``."""
        return ("x",) if self.task == "inference" else ("x", "dy")

    @property
    def results(self) -> tuple[str, ...]:
        """Roles of the results: ``y``, and for training ``dx``."""
        return ("y",) if self.task == "inference" else ("y", "dx")

    @property
    def before(self) -> int:
        """Channels before each one that are in its window, at most all others."""
        return min(self.size // 2, self.channels - 1)

    @property
    def after(self) -> int:
        """Channels behind each one that are in its window, at most all others."""
        return min((self.size - 1) // 2, self.channels - 1)

    @property
    def pixels(self) -> int:
        """Places of one image."""
        return math.prod(self.space)

    def shape(self, role: str) -> tuple[int, ...]:
        """Shape of the tensor of ``role``: all have the same. Raises ``ValueError`` for an unknown role."""
        if role not in self.roles:
            raise ValueError(f"role={role!r}: one of {', '.join(self.roles)} would do")
        return (self.batch, self.channels, *self.space)

    def layout(self, role: str) -> str:
        """The layout of all tensors."""
        return self.layout_name

    @property
    def flops(self) -> int:
        """Floating-point operations: sums over windows and powers. Training has about three times as many."""
        each = 2 * (self.before + self.after + 1) + POWER
        return self.batch * self.channels * self.pixels * (each if self.task == "inference" else 3 * each)

    @property
    def key(self) -> str:
        """Canonical text: equal for equal problems, different for different ones."""
        return key_of(self)

    @classmethod
    def from_key(cls, text: str) -> LrnProblem:
        """Read :attr:`key` back, whoever wrote it. Raises ``ValueError`` for what is no normalization's key."""
        return read_back(cls(**fields_of(text)), text)

    def extent(self, axis: str) -> int:
        """The batch. Raises ``ValueError`` for another axis: windows reach over channels."""
        if axis != "batch":
            raise ValueError(f"axis={axis!r}: a local response normalization is cut along 'batch'")
        return self.batch

    def split(self, axis: str, sizes: Sequence[int]) -> tuple[Part[LrnProblem], ...]:
        """Cut the batch into parts of ``sizes`` images, in order. Each sets its own images of the results.

        Raises ``ValueError`` for another axis, and for sizes that are not the batch together.
        """
        return parts_of_batch(self, axis, sizes, self.roles)

    def reference(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All results in float64, from all operands."""
        return reference(self, operands)
