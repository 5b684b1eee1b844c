"""What solvers of recurrent layers on a GPU ask of it, and how they count time in estimates."""

from __future__ import annotations

import torch

from tilewise.kernels.building.target import sought
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.common.tiles import PROCESSORS

__all__ = ["CYCLES_A_MICROSECOND", "architecture", "precise", "processors", "unavailable_by"]

CYCLES_A_MICROSECOND = 1_750
"""Of a GPU's multiprocessors, in estimates: an H100's while it computes."""


def precise(p: RecurrentProblem) -> bool:
    """Whether products of fp32 numbers are as exact as in fp32."""
    return p.dtype == "fp32" and p.precision != "tf32"


def architecture() -> tuple[int, int]:
    """The compute capability of the GPUs that kernels are for; Hopper's where there is none."""
    found = sought()
    if found is not None:
        return found.major, found.minor
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)


def processors() -> int:
    """Multiprocessors of the GPU, of an H100 where there is none."""
    if sought() is not None or not torch.cuda.is_available():
        return PROCESSORS
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def unavailable_by(error: Exception) -> SolverUnavailable:
    """The loss of a config by an error of NVRTC or of the driver, with its last line."""
    text = str(error).strip().splitlines()
    return SolverUnavailable(f"{type(error).__name__}: {text[-1] if text else error!r}"[:300])
