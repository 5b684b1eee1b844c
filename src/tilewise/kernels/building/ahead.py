"""Compiling many kernels at once before they are needed one after the other."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
from collections.abc import Callable, Sequence

import torch

from tilewise.kernels.building import workers
from tilewise.machine.device import cpu_count
from tilewise.machine.turns import beside, pause, wait_apart

__all__ = ["compiled_apart", "compiled_side_by_side", "side_by_side"]

ROUNDS = 16
"""Most kernels of one job that are compiled one after the other: a job ends at the first that is missing."""
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

    wanted = _wanted(jobs, device)
    count = min(MOST_COMPILERS, cpu_count(), max(len(jobs), len(wanted)))
    threads = concurrent.futures.ThreadPoolExecutor(count)
    try:
        with workers.opened(max(len(jobs), len(wanted))) as pool:
            list(threads.map(pool.try_to_ask, wanted))
            list(threads.map(functools.partial(served, pool), jobs))
    finally:
        threads.shutdown(cancel_futures=True)


def _wanted(jobs: Sequence[Callable[[], object]], device: torch.device) -> list[str]:
    """What workers are to compile for ``jobs`` as far as can be told now: all kernels at once, not one by one."""
    found: dict[str, None] = {}
    for job in jobs:
        with contextlib.suppress(Exception), torch.cuda.device(device), workers.collecting() as wanted:
            job()
        found |= dict.fromkeys(wanted)
    return list(found)


def compiled_side_by_side(jobs: Sequence[Callable[[], str]], step: Callable[[str], None]) -> None:
    """Call all ``jobs`` in threads that worker processes serve, within
    :func:`~tilewise.kernels.building.target.compiling_for`.

    ``step`` is called in this thread with what each job returns, in their order. What a job raises is raised here. An
    interruption ends the workers.
    """

    def served(pool: workers.Pool, job: Callable[[], str]) -> str:
        """Do one job in this thread; what it compiles, a worker of ``pool`` compiles."""
        with pool.serving():
            return job()

    threads = concurrent.futures.ThreadPoolExecutor(min(MOST_COMPILERS, cpu_count(), max(1, len(jobs))))
    try:
        with workers.opened(len(jobs)) as pool:
            for name in threads.map(functools.partial(served, pool), jobs):
                step(name)
    finally:
        threads.shutdown(cancel_futures=True)


def compiled_apart(jobs: Sequence[Callable[[], object]]) -> None:
    """Call all ``jobs``, each of which compiles for a GPU, so that other processes compile while the program goes on.

    A job is begun anew where it met a kernel that had to be compiled, until all are done. All of it but the compiling
    is done in this thread, in slices beside the program. A job that fails, or whose kernels no process can compile, is
    left as it is: where its result is needed it is done as without turns.
    """
    with beside():
        _compiled_apart(jobs)


def _compiled_apart(jobs: Sequence[Callable[[], object]]) -> None:
    """As :func:`compiled_apart`, beside the program."""
    open_, asked = list(jobs), set[str]()
    for _ in range(ROUNDS):
        wanted: dict[str, None] = {}
        for job in list(open_):
            pause()
            done = False
            with contextlib.suppress(Exception), workers.collecting() as found:
                job()
                done = True
            new = [each for each in found if each not in asked]
            wanted |= dict.fromkeys(new)
            if done or not new:
                open_.remove(job)
        if not wanted:
            return
        asked |= wanted.keys()
        with workers.opened(len(wanted), gently=True) as pool:
            wait_apart(pool.compile_all(list(wanted)))
