"""The events of a training step in their order: kernels, allocations of memory and gradients that are complete."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewise.distributed.parts.ghosts import Reader
from tilewise.problems.conv.problem import ConvProblem

__all__ = ["Allocated", "Array", "Event", "Freed", "Gradient", "Kernel", "StepTrace"]


@dataclass(frozen=True, slots=True)
class Array:
    """The ``shape`` of a tensor, the bytes of an element, and how many of the last dimensions are spatial.

    ``space`` is 0 where the tensor is not an activation.
    """

    shape: tuple[int, ...]
    itemsize: int
    space: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.itemsize

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the spatial dimensions."""
        return self.shape[len(self.shape) - self.space :]

    @property
    def split(self) -> bool:
        """Whether ranks may hold parts of the tensor: it is an activation of more than one position."""
        return math.prod(self.sizes) > 1


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operator of the step.

    ``arrays`` are the tensors that the operator reads and writes, and ``flops`` the operations that it does.
    ``problems`` are the passes of a convolution. ``readers`` describe a window that slides over a tensor, one for each
    axis. ``halo`` is the tensor whose halos are exchanged for that window; in backward its ghost zones are added up.
    ``sums`` is the number of bytes that the ranks of one image add up; with ``over_all`` the ranks of all images do.
    ``gathered`` is a tensor that every rank of an image needs whole.
    """

    layer: str
    operator: str
    backward: bool
    arrays: tuple[Array, ...] = ()
    dtype: str = "fp32"
    flops: int = 0
    problems: tuple[ConvProblem, ...] = ()
    readers: tuple[Reader, ...] = ()
    halo: Array | None = None
    sums: int = 0
    over_all: bool = False
    gathered: Array | None = None


@dataclass(frozen=True, slots=True)
class Allocated:
    """Memory number ``index`` is allocated. ``readers`` are all windows over it, which need ghost zones in it."""

    index: int
    nbytes: int
    array: Array
    readers: tuple[tuple[Reader, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Freed:
    """Memory number ``index`` is given back."""

    index: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a parameter, of ``nbytes`` bytes, is complete."""

    nbytes: int


Event = Kernel | Allocated | Freed | Gradient


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The events of a step for ``batch`` images with ``space`` spatial axes.

    ``parameters`` counts the bytes of all parameters and buffers, ``gradients`` those of the trained parameters.
    """

    events: tuple[Event, ...]
    batch: int
    space: int
    parameters: int
    gradients: int
