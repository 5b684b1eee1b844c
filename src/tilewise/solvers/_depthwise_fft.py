"""Fused depthwise convolutions as launches of kernels in CUDA C++: operands as kernels see them, and the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tilewise.problem import ROLES, ConvProblem, Pass
from tilewise.solvers._fft_sizes import Placement, whole_placement
from tilewise.solvers.base import SolverUnavailable

if TYPE_CHECKING:
    from tilewise.kernels.cuda.launch import Program

__all__ = ["BIAS", "FIRST", "OUT", "SECOND", "WORKSPACE", "Operand", "Step", "StepsRun", "compiled", "operands"]

FIRST, SECOND, OUT, WORKSPACE, BIAS = range(5)
"""The tensors of a step's pointers."""


@dataclass(frozen=True, slots=True)
class Step:
    """One launch: ``grid`` blocks of a kernel; ``pointers`` hold tensor numbers and bytes into them, in its order."""

    program: Program
    grid: int
    pointers: tuple[tuple[int, int], ...]
    scalars: tuple[int | float, ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor's part that counts: its place in the basis per axis, strides in elements, the first byte.

    A filter's ``channel`` is one of outputs, its ``image`` one of inputs.
    ``pairs``: neighbours along the last axis can be accessed two at a time.
    """

    places: tuple[Placement, ...]
    image: int
    channel: int
    space: tuple[int, ...]
    start: int
    pairs: bool

    @classmethod
    def of(cls, p: ConvProblem, role: str, tensor: torch.Tensor) -> Operand:
        """The tensor with place ``role``."""
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
    """All three tensors by their place."""
    return {role: Operand.of(p, role, t) for role, t in zip((*p.operands, p.result), (a, b, out), strict=True)}


def correlates(p: ConvProblem) -> bool:
    """Whether the pass multiplies with the conjugate of the second spectrum."""
    return p.pass_ is not Pass.DGRAD


class StepsRun:
    """Launches in order as a :data:`~tilewise.solvers.base.Run`; :meth:`run_pointers` takes addresses."""

    __slots__ = ("_steps",)

    def __init__(self, steps: Sequence[tuple[Callable[..., None], tuple[tuple[int, int], ...]]]) -> None:
        self._steps = tuple(steps)

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        workspace: torch.Tensor | None,
        *bias: torch.Tensor,
    ) -> torch.Tensor:
        assert out is not None
        space = 0 if workspace is None else workspace.data_ptr()
        self.run_pointers(a.data_ptr(), b.data_ptr(), out.data_ptr(), space, *(t.data_ptr() for t in bias))
        return out

    def run_pointers(self, a: int, b: int, out: int, workspace: int, *bias: int) -> None:
        """Queue the kernels on the current stream of the device that they were compiled for."""
        addresses = (a, b, out, workspace, *bias)
        for launch, pointers in self._steps:
            launch(*[addresses[source] + offset for source, offset in pointers])


def compiled(steps: Sequence[Step], device: torch.device) -> StepsRun:
    """The steps compiled for a GPU. Raises ``SolverUnavailable`` with the compiler's or the driver's reason."""
    from tilewise.kernels.cuda.launch import kernel

    index = torch.cuda.current_device() if device.index is None else device.index
    found = []
    try:
        for step in steps:
            p = step.program
            loaded = kernel(p.source(), p.name, index)
            launch = loaded.launch(step.grid, p.threads, p.shared, len(step.pointers), step.scalars)
            found.append((launch, step.pointers))
    except Exception as error:  # NVRTC and the driver raise errors of their own
        text = str(error).strip().splitlines()
        raise SolverUnavailable(f"{type(error).__name__}: {text[-1] if text else error!r}"[:300]) from error
    return StepsRun(found)
