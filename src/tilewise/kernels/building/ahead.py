"""Compiling many kernels at once before they are needed one after the other."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
from collections.abc import Callable, Sequence

import torch

from tilewise.kernels.building import workers

__all__ = ["side_by_side"]

MOST_COMPILERS = 16
"""Most jobs that run at a time."""


def side_by_side(jobs: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Call all ``jobs``, each of which compiles for the GPU ``device``, in threads that worker processes serve.

    A job that fails is not reported here: it fails again where its kernel is needed, and the reason is kept there. An
    interruption ends the workers.
    """

    def served(pool: workers.Pool, job: Callable[[], object]) -> None:
        """Do one job in this thread; what it compiles, a worker of ``pool`` compiles."""
        with contextlib.suppress(Exception), torch.cuda.device(device), pool.serving():
            job()

    threads = concurrent.futures.ThreadPoolExecutor(min(MOST_COMPILERS, os.cpu_count() or 1, len(jobs)))
    try:
        with workers.opened(len(jobs)) as pool:
            list(threads.map(functools.partial(served, pool), jobs))
    finally:
        threads.shutdown(cancel_futures=True)
