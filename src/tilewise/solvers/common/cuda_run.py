"""Kernels in CUDA C++, compiled and launched one after another as a solver's run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tilewise.kernels.building.target import sought
from tilewise.kernels.building.workers import all_of
from tilewise.kernels.native.sequence import LaunchSequence, launch_list
from tilewise.solvers.base import SolverUnavailable

if TYPE_CHECKING:
    from tilewise.kernels.cuda.launch import Launch, Program, Unloaded

__all__ = ["BIAS", "FIRST", "OUT", "SECOND", "WORKSPACE", "Step", "StepsRun", "compiled"]

FIRST, SECOND, OUT, WORKSPACE, BIAS = range(5)
"""Numbers of the tensors that a step's pointers refer to: operands, result, workspace and bias."""


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel launch of ``grid`` blocks.

    ``pointers`` are the kernel's pointer arguments in order: the number of a tensor (:data:`FIRST` and so on) and an
    offset into it in bytes. ``scalars`` are the arguments after them.
    """

    program: Program
    grid: int
    pointers: tuple[tuple[int, int], ...]
    scalars: tuple[int | float, ...]


class StepsRun:
    """Kernel launches in order as a :data:`~tilewise.solvers.base.Run`.

    Called with tensors, or through :meth:`run_pointers` with their addresses.
    """

    __slots__ = ("_device", "_native", "_steps", "_stream", "sequence")
    sequence: LaunchSequence
    """What the driver is told of them."""

    def __init__(self, steps: Sequence[tuple[Launch, tuple[tuple[int, int], ...]]], device: int) -> None:
        self._steps = tuple(steps)
        self._device = device
        self._stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        told = (launch.told(pointers) for launch, pointers in steps)
        self.sequence = LaunchSequence(tuple(one for one in told if all(one.grid)), device)
        self._native = launch_list(self.sequence, self._launch)

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
        if self._native is not None:
            self._native(self._stream(self._device), a, b, out, workspace, *bias)
        else:
            self._launch(a, b, out, workspace, *bias)

    def _launch(self, *addresses: int) -> None:
        """Launch one kernel after the other."""
        for launch, pointers in self._steps:
            launch(*[addresses[source] + offset for source, offset in pointers])


def compiled(steps: Sequence[Step], device: torch.device) -> StepsRun | Unloaded:
    """Compile the steps for a GPU and return them as one run.

    Within :func:`~tilewise.kernels.building.target.compiling_for` they are only compiled. Raises ``SolverUnavailable``
    with the compiler's or the driver's reason.
    """
    from tilewise.kernels.cuda.launch import Unloaded, compile_cubin, kernel

    architecture = sought()
    index = 0
    if architecture is None:
        index = torch.cuda.current_device() if device.index is None else device.index

    def load(step: Step) -> Any:
        """The loaded kernel of a step; for another machine's GPU its code."""
        p = step.program
        if architecture is not None:
            return compile_cubin(p.source(), architecture.instructions)
        return kernel(p.source(), p.name, index)

    bound = []
    try:
        for step, loaded in zip(steps, all_of([functools.partial(load, step) for step in steps]), strict=True):
            if architecture is None:
                p = step.program
                launch = loaded.launch(step.grid, p.threads, p.shared, len(step.pointers), step.scalars)
                bound.append((launch, step.pointers))
    except Exception as error:  # NVRTC and the driver raise errors of their own
        text = str(error).strip().splitlines()
        raise SolverUnavailable(f"{type(error).__name__}: {text[-1] if text else error!r}"[:300]) from error
    return StepsRun(bound, index) if architecture is None else Unloaded(architecture)
