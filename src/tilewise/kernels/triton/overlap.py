"""Kernels that are launched while the one before them still runs, and wait for it themselves.

A kernel usually starts when all blocks of the one before it have ended, which takes about a microsecond. With
programmatic dependent launch (CUDA programming guide, section of that name; compute capability 9.0) it may start as
soon as all of these have begun, and waits inside, before it reads what they write. In a chain of kernels all but the
first may be launched so: the first one waits for everything before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tilewise.kernels.building.target import architecture_of, sought

__all__ = ["begin", "may_overlap"]

wait, let_go = getattr(cuda, "gdc_wait", None), getattr(cuda, "gdc_launch_dependents", None)
"""Triton's functions for it; ``None`` in versions that lack them."""
LEAST = 9
"""The major number of the first compute capability that has it."""


@triton.jit
def begin(WAITS: tl.constexpr, LEADS: tl.constexpr):
    """Let the kernel behind this one start if it ``LEADS`` one, and if it ``WAITS``, wait for the one before it.

    All blocks must call it, before they touch what other kernels of the chain read or write.
    """
    if LEADS:
        tl.extra.cuda.gdc_launch_dependents()
    if WAITS:
        tl.extra.cuda.gdc_wait()


def may_overlap(device: torch.device) -> bool:
    """Whether kernels for ``device``, or for the GPU that is compiled for, may be launched so."""
    if wait is None or let_go is None:
        return False
    there = sought()
    if there is None and device.type == "cuda":
        there = architecture_of(device)
    return there is not None and there.major >= LEAST
