"""Times and memory peaks: over cold caches, on a GPU by CUDA events, medians, both sides of a ratio in turns.

Nothing here is called while a CUDA graph is being captured; :class:`Timer` says so.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tilewise.machine.allocations import BUSY, countable, most_alive, recorded
from tilewise.machine.device import is_capturing
from tilewise.machine.heap import AllocatorError, drop_end, filled, hand_back, releasing
from tilewise.machine.resident import flush_counters, reset_peak, resident
from tilewise.machine.threads import at_once
from tilewise.machine.turns import in_turns, pause, whole
from tilewise.plan import format_bytes
from tilewise.planner.measuring.cold import other_data
from tilewise.planner.measuring.repeats import launches_of
from tilewise.planner.measuring.took import Took

__all__ = [
    "NOISE",
    "Timer",
    "Took",
    "check_peak_is_known",
    "counted_bytes",
    "interleaved",
    "lead_ms",
    "peak_bytes",
    "peak_is_known",
    "rounds",
]

Call = Callable[[], object]
Alike = Callable[[int], Sequence[Call]]
"""Gives as many calls as are asked for, or fewer, at least one, that do the same on copies of their operands."""
LEAD_MS, MOST_LEAD_MS = 0.1, 10.0
"""Milliseconds for which a GPU is kept busy while a call is launched: the usual and the most.

A launch that takes longer than that shows in the device's time."""
FLUSHES = 8
"""How often caches are filled to see how long that takes, by which the GPU is kept busy."""
LEAD = 1.5
"""The GPU is kept busy for this many times what a call took to launch before."""
NOISE = 128 << 10
"""Bytes of growth of the resident set that cannot be told from none.

Pages of the interpreter, of other threads and of measuring itself come and go, and small blocks fit free pieces."""
MEETING_S = 0.1
"""Seconds for which torch's threads wait for one another at the most; it takes them some 0.1 ms."""
LONG_MS = 50.0
"""A first run above so many ms tells how many rounds fit: loading took little of it."""
UNKNOWN = "a workspace limit cannot be checked here, workspace=None would do"


class Timer:
    """Times calls on one device; ``time(call)`` is one run.

    On a GPU the L2 cache is cold. On a CPU caches are left as they are, or with ``cold`` filled with other data.
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
            self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush()
            # Of several, as the first begins only when it was launched, which may take as long as it does.
            self._flush_ms = max(self._run(self._flush_often).device_ms / FLUSHES, 1e-3)

    def time_ms(self, call: Call) -> float:
        """Milliseconds of one run, the larger of the device's and the host's."""
        return self.time(call).ms

    def time(self, call: Call, lead_ms: float = LEAD_MS, written: torch.Tensor | None = None) -> Took:
        """Time one run. On a GPU the L2 cache is cold and holds nothing to be written back, unless ``lead_ms`` is 0.

        The GPU is kept busy for ``lead_ms``: a call that the host launches in less is timed without waiting for it.
        There the cache holds what it can of ``written``, which is written anew as it is.
        """
        pause()
        if not self._cuda:
            if self._unrelated is not None:
                self._flush()
            start = time.perf_counter()
            call()
            return Took((time.perf_counter() - start) * 1e3, 0.0)
        self._prepare(lead_ms, written)
        return self._run(call)

    def time_each(self, calls: Sequence[Call], lead_ms: float = LEAD_MS, written: torch.Tensor | None = None) -> Took:
        """Time one run of each of ``calls``, one after the other: what one of them takes.

        They should read different copies of what is not ``written``: the L2 cache is filled once, before the first.
        ``lead_ms`` is that of one call, as :meth:`time` has it.
        """
        if len(calls) == 1:
            return self.time(calls[0], lead_ms, written)
        pause()
        if self._cuda:
            self._prepare(lead_ms * len(calls), written)

        def run() -> None:
            for call in calls:
                call()

        took = self._run(run)
        return Took(took.device_ms / len(calls), took.host_ms / len(calls))

    def time_warm(self, call: Call, count: int, lead_ms: float = LEAD_MS) -> float:
        """Milliseconds on a GPU of one of ``count`` runs in a row, after one that leaves its operands in the caches."""
        pause()
        self._prepare(lead_ms * (count + 1), None)
        call()
        return self._run(lambda: [call() for _ in range(count)]).device_ms / count

    def _prepare(self, lead_ms: float, written: torch.Tensor | None) -> None:
        """Keep the GPU busy for a while, after which its L2 cache is cold but for what is ``written``."""
        for _ in range(math.ceil(min(lead_ms, MOST_LEAD_MS) / self._flush_ms)):
            self._flush()
        if written is not None:
            written.mul_(1.0)

    def _flush(self) -> None:
        """Fill the caches with unrelated data that need not be written back."""
        assert self._unrelated is not None
        torch.sum(self._unrelated, dim=0, out=self._sum)

    def _flush_often(self) -> None:
        """Fill the caches :data:`FLUSHES` times."""
        for _ in range(FLUSHES):
            self._flush()

    def _run(self, call: Call) -> Took:
        """Time one run on a GPU by its events."""
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
        """Wait until the device has done everything queued so far."""
        if self._cuda:
            torch.cuda.synchronize(self.device)


def lead_ms(before: Took) -> float:
    """Milliseconds to keep the GPU busy for a call that took ``before`` when last timed."""
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
    written: torch.Tensor | None = None,
    alike: Sequence[Alike] = (),
) -> list[list[Took]]:
    """What each call took in each round, run in turns so that a drift of clocks or load meets all alike; caches cold.

    One round warms up. ``repeats`` rounds follow, or as many as ``budget_ms`` holds within ``least`` and ``most``, or
    fewer where after a round what was found so far is ``decided``. Where nothing is ``launched``, as in replays of CUDA
    graphs, the host's times are none. On a GPU the caches hold what they can of ``written``, all else is cold.

    ``alike`` has for each call what gives several such calls, on copies of their operands. With it short calls on a GPU
    are timed several at once, all calls as many: see :func:`.repeats.launches_of`.
    """
    timer = Timer(device, cold=True)
    warm = [timer.time(call) for call in calls]
    if not repeats and max(took.ms for took in warm) < LONG_MS:
        again = [timer.time(call, lead_ms(took)) for call, took in zip(calls, warm, strict=True)]
        warm = [min(pair, key=lambda took: took.ms) for pair in zip(warm, again, strict=True)]
    several = _several(calls, alike, warm, device)
    if not repeats:
        turn_ms = sum(len(each) * took.ms for each, took in zip(several, warm, strict=True))
        repeats = max(least, min(most, int(budget_ms / max(turn_ms, 1e-3))))
    times: list[list[Took]] = [[] for _ in calls]
    last = list(warm)
    for turn in range(repeats):
        order = range(len(calls)) if turn % 2 == 0 else range(len(calls) - 1, -1, -1)
        for index in order:
            last[index] = timer.time_each(several[index], lead_ms(last[index]), written)
            times[index].append(last[index] if launched else last[index].replayed())
        if decided is not None and decided(times):
            break
    return times


def _several(
    calls: Sequence[Call], alike: Sequence[Alike], warm: Sequence[Took], device: torch.device
) -> list[Sequence[Call]]:
    """The calls that are timed at once in place of each: as many for all, as the fastest of them needs."""
    count = launches_of(min((took.device_ms for took in warm), default=math.inf), device.type) if alike else 1
    if count == 1:
        return [(call,) for call in calls]
    made = [each(count) for each in alike]
    for each in made:  # a call allocates less the second time
        each[-1]()
    return [each[: min(map(len, made))] for each in made]


def peak_bytes(
    call: Call, device: torch.device, result_bytes: int = 0, scratch: bool = True, *, rough: bool = False
) -> int:
    """Bytes that one run of ``call`` takes at its peak beyond what was allocated before.

    ``result_bytes`` are taken off for a call that allocates its own result. On a GPU the peak of the caching allocator,
    with ``scratch`` cuBLAS's workspace as if it were fresh. On a CPU ``call`` runs twice, and the larger of two numbers
    counts. One is what torch's allocator handed out at the most in this thread, to the byte. The other is the growth
    of the resident set at its peak, less the pages of files (a library's code) that were read for the first time. It
    shows what is taken from elsewhere. That is told only roughly: growth below :data:`NOISE` is none, and for a
    ``rough`` call, which does take from elsewhere, so much is added. Raises ``RuntimeError`` where the system cannot
    tell, as :func:`check_peak_is_known` says beforehand.

    Between a program's steps cuBLAS's workspaces stay: its CUDA graphs may use them. What a solver declares of them
    counts all the same.
    """
    pause()
    if device.type == "cuda":
        if scratch and not in_turns():
            torch._C._cuda_clearCublasWorkspaces()
        with whole():
            torch.cuda.reset_peak_memory_stats(device)
            before = _requested(device)["current"]
            call()
            return max(0, _requested(device)["peak"] - before - result_bytes)
    with whole():
        grown = _growth(call) - result_bytes
    pause()
    with whole():
        counted = counted_bytes(call, result_bytes) if countable() else 0
    if rough:
        return max(counted, grown) + NOISE
    return max(counted, grown if grown > NOISE else 0)


def counted_bytes(call: Call, result_bytes: int = 0) -> int:
    """Bytes of torch's allocator that one run of ``call`` takes at its peak on a CPU, in this thread, to the byte.

    ``result_bytes`` are taken off. Raises ``RuntimeError`` while another profiler runs.
    """
    with _no_collection():  # of a tensor that is older than the recording torch warns when it is freed
        return max(0, most_alive(recorded(call)) - result_bytes)


def _growth(call: Call) -> int:
    """Bytes by which the resident set grows at its peak, every block of the heap in full."""
    with _no_collection():
        _drop_ends()
        hand_back()
        flush_counters()
        start = _peak_from_here()
        with filled():
            result = call()
        end = resident()
    del result
    return end["VmHWM"] - start["VmRSS"] - max(0, end["RssFile"] - start["RssFile"])


def _drop_ends() -> None:
    """Hand free memory in the arenas of torch's threads back to the system, so that what they take shows as growth."""
    threads = torch.get_num_threads()
    if threads == 1:
        return
    all_here = threading.Barrier(threads)

    def drop(_: int) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):  # a smaller team, of which each thread was here
            all_here.wait(MEETING_S)  # so that no thread takes two
        drop_end()

    at_once(drop, threads, threads)


def _peak_from_here() -> dict[str, int]:
    """Reset the peak of resident memory, and return what is resident.

    Raises ``RuntimeError`` where Linux does not tell.
    """
    try:
        reset_peak()
        return resident()
    except RuntimeError as error:
        raise RuntimeError(f"{error}: {UNKNOWN}") from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Turn garbage collection off meanwhile: what it frees would hide what a call takes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def check_peak_is_known(device: torch.device, limit: int | None = None) -> None:
    """Raise ``RuntimeError`` with the reason where :func:`peak_bytes` cannot tell, or not of so small a ``limit``."""
    if device.type != "cuda":
        try:
            releasing()
        except AllocatorError as error:
            raise RuntimeError(f"what the memory allocator keeps hides what a call takes, {error}: {UNKNOWN}") from None
        _peak_from_here()
        if limit is not None and limit < NOISE and not countable():
            raise RuntimeError(
                f"{BUSY}. Without it less than {format_bytes(NOISE)} cannot be told from none: workspace="
                f"{format_bytes(NOISE)!r} or more would do"
            )


def peak_is_known(device: torch.device) -> bool:
    """Whether :func:`peak_bytes` can tell how much memory a call takes here."""
    try:
        check_peak_is_known(device)
    except RuntimeError:
        return False
    return True


def _requested(device: torch.device) -> dict[str, int]:
    """Bytes asked of the caching allocator, current and peak. Its blocks may be larger, which does not count."""
    counts: dict[str, int] = torch.cuda.memory_stats_as_nested_dict(device)["requested_bytes"]["all"]
    return counts
