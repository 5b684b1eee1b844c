"""Times and memory peaks: over cold caches, on a GPU by CUDA events, medians, both sides of a ratio in turns.

Nothing here is called while a CUDA graph is being captured; :class:`Timer` says so.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from tilewise.device import is_capturing
from tilewise.heap import AllocatorError, hand_back, releasing
from tilewise.planner.cold import other_data
from tilewise.resident import reset_peak, resident, settle

__all__ = [
    "Timer",
    "Took",
    "check_peak_is_known",
    "interleaved",
    "lead_ms",
    "peak_bytes",
    "peak_is_known",
    "rounds",
]

Call = Callable[[], object]
LEAD_MS, MOST_LEAD_MS = 0.1, 2.0
"""How long a GPU is kept busy while a call is launched: as much as many take, and at most."""
LEAD = 1.5
"""The lead of a call in the time that it took to launch before."""
NOISE = 128 << 10
"""Bytes of a resident set that are not told from none: pages of the interpreter, of other threads and of the looks."""
LONG_MS = 50.0
"""A longer first run tells how many rounds fit: what it loaded is little beside it."""
UNKNOWN = "a workspace limit cannot be checked here, workspace=None would do"


class Took(NamedTuple):
    """Milliseconds of one run: on the device that computes, and apart from it on the host to launch it."""

    device_ms: float
    host_ms: float

    @property
    def ms(self) -> float:
        """The longer: a layer that takes longer to launch than to run costs the host's time in a network."""
        return max(self)

    @property
    def weighed_ms(self) -> float:
        """Mean of the device's time and :attr:`ms`, by which plans are chosen.

        Some networks queue so far ahead that a launch costs nothing (a CUDA graph always does), in others the device
        waits for each. Small kernels take as long to launch as one another, and then the faster is the better.
        """
        return (self.device_ms + self.ms) / 2

    def replayed(self) -> Took:
        """The same from a CUDA graph, which takes nothing to launch."""
        return self._replace(host_ms=0.0)

    def with_host(self, factor: float) -> float:
        """The same were the host so many times slower, as a busy one may be."""
        return max(self.device_ms, factor * self.host_ms)


class Timer:
    """Times calls on one device; ``time(call)`` is one run.

    On a GPU over a cold L2; on a CPU over caches as they are, or where they are to be ``cold`` filled with other data.
    """

    def __init__(self, device: torch.device, *, cold: bool = False) -> None:
        if is_capturing(device):
            raise RuntimeError("nothing can be measured while a CUDA graph is being captured")
        self.device = device
        self._cuda = device.type == "cuda"
        self._sum = torch.zeros((), dtype=torch.float32, device=device)
        self._unrelated = other_data() if cold and not self._cuda else None
        if self._cuda:
            size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
            self._unrelated = torch.zeros(size // 4, dtype=torch.float32, device=device)
            self._start, self._stop = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            self._flush()
            self._flush_ms = max(self._run(self._flush).device_ms, 1e-3)

    def time_ms(self, call: Call) -> float:
        """One run, as :attr:`Took.ms` has it."""
        return self.time(call).ms

    def time(self, call: Call, lead_ms: float = LEAD_MS) -> Took:
        """One run. On a GPU over a cold L2 that holds nothing to be written back; with a ``lead_ms`` of 0 as it is.

        The GPU has other work for ``lead_ms``: a call that the host launches in less is timed without waiting for it.
        """
        if not self._cuda:
            if self._unrelated is not None:
                self._flush()
            start = time.perf_counter()
            call()
            return Took((time.perf_counter() - start) * 1e3, 0.0)
        for _ in range(math.ceil(min(lead_ms, MOST_LEAD_MS) / self._flush_ms)):
            self._flush()
        return self._run(call)

    def _flush(self) -> None:
        """Have the caches hold unrelated data, and nothing to be written back."""
        assert self._unrelated is not None
        torch.sum(self._unrelated, dim=0, out=self._sum)

    def _run(self, call: Call) -> Took:
        self._start.record()
        begin = time.perf_counter()
        call()
        host = (time.perf_counter() - begin) * 1e3
        self._stop.record()
        self._stop.synchronize()
        return Took(float(self._start.elapsed_time(self._stop)), host)

    def median_ms(self, call: Call, repeats: int = 3) -> float:
        """Median of ``repeats`` runs, for a caller who has warmed up."""
        return statistics.median(self.time_ms(call) for _ in range(repeats))

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._cuda:
            torch.cuda.synchronize(self.device)


def lead_ms(before: Took) -> float:
    """The lead for a call that took so long before."""
    return max(LEAD_MS, LEAD * before.host_ms)


def interleaved(
    calls: Sequence[Call],
    device: torch.device,
    *,
    repeats: int = 0,
    budget_ms: float = 200.0,
    least: int = 5,
    most: int = 51,
) -> list[float]:
    """Median milliseconds of each call over :func:`rounds`."""
    times = rounds(calls, device, repeats=repeats, budget_ms=budget_ms, least=least, most=most)
    return [statistics.median(took.ms for took in values) for values in times]


def rounds(
    calls: Sequence[Call],
    device: torch.device,
    *,
    repeats: int = 0,
    budget_ms: float = 200.0,
    least: int = 5,
    most: int = 51,
    decided: Callable[[list[list[Took]]], bool] | None = None,
    launched: bool = True,
) -> list[list[Took]]:
    """What each call took in each round, run in turns so that a drift of clocks or load meets all alike; caches cold.

    One round warms up. ``repeats`` rounds follow, or as many as ``budget_ms`` holds within ``least`` and ``most``, or
    fewer where after a round what was found so far is ``decided``. Where nothing is ``launched``, as in replays of CUDA
    graphs, the host's times are none.
    """
    timer = Timer(device, cold=True)
    warm = [timer.time(call) for call in calls]
    if not repeats:
        if max(took.ms for took in warm) < LONG_MS:
            again = [timer.time(call, lead_ms(took)) for call, took in zip(calls, warm, strict=True)]
            warm = [min(each, key=lambda took: took.ms) for each in zip(warm, again, strict=True)]
        repeats = max(least, min(most, int(budget_ms / max(sum(took.ms for took in warm), 1e-3))))
    times: list[list[Took]] = [[] for _ in calls]
    last = list(warm)
    for turn in range(repeats):
        order = range(len(calls)) if turn % 2 == 0 else range(len(calls) - 1, -1, -1)
        for index in order:
            last[index] = timer.time(calls[index], lead_ms(last[index]))
            times[index].append(last[index] if launched else last[index].replayed())
        if decided is not None and decided(times):
            break
    return times


def peak_bytes(call: Call, device: torch.device, result_bytes: int = 0, scratch: bool = True) -> int:
    """Bytes that one run of ``call`` takes at its peak beyond what was allocated before.

    ``result_bytes`` are taken off for a call that allocates its own result. On a GPU the peak of the caching allocator,
    with ``scratch`` cuBLAS's workspace as if it were fresh. On a CPU the growth of the resident set at its peak, which
    Linux keeps, less the pages of files (a library's code) that were read for the first time; growth below
    :data:`NOISE` is none. Raises ``RuntimeError`` where the system cannot tell, as :func:`check_peak_is_known` says
    beforehand.
    """
    if device.type == "cuda":
        if scratch:
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.reset_peak_memory_stats(device)
        before = _requested(device)["current"]
        call()
        return max(0, _requested(device)["peak"] - before - result_bytes)
    with _no_collection():
        hand_back()
        settle()
        start = _peak_from_here()
        kept = call()
        end = resident()
    del kept
    grown = end["VmHWM"] - start["VmRSS"] - max(0, end["RssFile"] - start["RssFile"]) - result_bytes
    return grown if grown > NOISE else 0


def _peak_from_here() -> dict[str, int]:
    """What is resident, where the peak starts again. ``RuntimeError`` where Linux does not tell."""
    try:
        reset_peak()
        return resident()
    except RuntimeError as error:
        raise RuntimeError(f"{error}: {UNKNOWN}") from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: what it frees meanwhile would hide what a call takes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def check_peak_is_known(device: torch.device) -> None:
    """Raise ``RuntimeError`` with the reason where :func:`peak_bytes` cannot tell."""
    if device.type != "cuda":
        try:
            releasing()
        except AllocatorError as error:
            raise RuntimeError(f"what the memory allocator keeps hides what a call takes, {error}: {UNKNOWN}") from None
        _peak_from_here()


def peak_is_known(device: torch.device) -> bool:
    """Whether :func:`peak_bytes` can tell."""
    try:
        check_peak_is_known(device)
    except RuntimeError:
        return False
    return True


def _requested(device: torch.device) -> dict[str, int]:
    """Bytes asked of the caching allocator: its blocks may be larger, which is its own affair."""
    counts: dict[str, int] = torch.cuda.memory_stats_as_nested_dict(device)["requested_bytes"]["all"]
    return counts
