"""Times and memory peaks: CUDA events over a cold L2, medians, both sides of a ratio in turns.

Nothing here is called while a CUDA graph is being captured; :func:`check_can_measure` says so.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tilewise.device import is_capturing

__all__ = ["Timer", "framework_flags", "interleaved", "peak_bytes", "without_benchmark"]

get_fp32_precision = torch._C._get_fp32_precision_getter
set_fp32_precision = torch._C._set_fp32_precision_setter
Call = Callable[[], object]


class Timer:
    """Times calls on one device; ``time_ms(call)`` is one run in milliseconds over a cold cache."""

    def __init__(self, device: torch.device) -> None:
        if is_capturing(device):
            raise RuntimeError("nothing can be measured while a CUDA graph is being captured")
        self.device = device
        self._cuda = device.type == "cuda"
        if self._cuda:
            size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
            self._flush = torch.empty(size, dtype=torch.uint8, device=device)
            self._start, self._stop = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )

    def time_ms(self, call: Call) -> float:
        """One run: on a GPU the longer of its time there, over a cold L2, and the host's time to launch it.

        A layer that the host takes longer to launch than the GPU to run costs the host's time in a network.
        """
        if not self._cuda:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        self._flush.zero_()
        self._start.record()
        begin = time.perf_counter()
        call()
        host = (time.perf_counter() - begin) * 1e3
        self._stop.record()
        self._stop.synchronize()
        return max(float(self._start.elapsed_time(self._stop)), host)

    def median_ms(self, call: Call, repeats: int = 3) -> float:
        """Median of ``repeats`` runs, for a caller who has warmed up."""
        return statistics.median(self.time_ms(call) for _ in range(repeats))

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._cuda:
            torch.cuda.synchronize(self.device)


def interleaved(
    calls: Sequence[Call],
    device: torch.device,
    *,
    repeats: int = 0,
    budget_ms: float = 200.0,
    least: int = 5,
    most: int = 51,
) -> list[float]:
    """Median milliseconds of each call, run in turns so that a drift of clocks or load meets all alike.

    One round warms up. ``repeats`` rounds follow, or as many as ``budget_ms`` holds within ``least`` and ``most``.
    """
    timer = Timer(device)
    warm = [timer.time_ms(call) for call in calls]
    if not repeats:
        warm = [min(first, timer.time_ms(call)) for first, call in zip(warm, calls, strict=True)]
        repeats = max(least, min(most, int(budget_ms / max(sum(warm), 1e-3))))
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats):
        order = range(len(calls)) if turn % 2 == 0 else range(len(calls) - 1, -1, -1)
        for index in order:
            times[index].append(timer.time_ms(calls[index]))
    return [statistics.median(values) for values in times]


def peak_bytes(call: Call, device: torch.device, result_bytes: int = 0, scratch: bool = True) -> int:
    """Bytes that one run of ``call`` takes at its peak beyond what was allocated before.

    ``result_bytes`` are taken off for a call that allocates its own result. On a GPU the peak of the caching allocator,
    with ``scratch`` cuBLAS's workspace as if it were fresh; on a CPU the growth of the resident set at its peak, which
    Linux keeps. Raises ``RuntimeError`` where the system cannot tell.
    """
    if device.type == "cuda":
        if scratch:
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.reset_peak_memory_stats(device)
        before = _requested(device)["current"]
        call()
        return max(0, _requested(device)["peak"] - before - result_bytes)
    trim()
    before = _reset_peak_resident()
    kept = call()
    grown = _resident("VmHWM") - before
    del kept
    return max(0, grown - result_bytes)


def _requested(device: torch.device) -> dict[str, int]:
    """Bytes asked of the caching allocator: its blocks may be larger, which is its own affair."""
    counts: dict[str, int] = torch.cuda.memory_stats_as_nested_dict(device)["requested_bytes"]["all"]
    return counts


@functools.cache
def _libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        libc.malloc_trim.argtypes = [ctypes.c_size_t]
    except (OSError, AttributeError, TypeError):
        return None
    return libc


def trim() -> None:
    """Hand freed heap pages back, so that what a call takes shows as growth."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


def _resident(field: str) -> int:
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except OSError as error:
        raise RuntimeError("a CPU workspace limit needs Linux's /proc to be checked; leave workspace=None") from error
    raise RuntimeError(f"/proc/self/status has no {field}: a CPU workspace limit cannot be checked here")


def _reset_peak_resident() -> int:
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError as error:
        raise RuntimeError(
            "/proc/self/clear_refs cannot be written: a CPU workspace limit cannot be checked"
        ) from error
    return _resident("VmRSS")


@contextmanager
def framework_flags(precision: str, deterministic: bool) -> Iterator[None]:
    """torch's flags as a plan's baseline is measured: benchmark mode, the problem's precision, as deterministic.

    They are the process's own, so plan from one thread at a time.
    """
    cudnn = torch.backends.cudnn
    saved = cudnn.benchmark, cudnn.deterministic
    precisions = {op: get_fp32_precision("cuda", op) for op in ("conv", "rnn")}
    try:
        legacy = torch._C._get_cudnn_allow_tf32()
    except RuntimeError:  # the user has mixed torch's old and new flags; only the new ones are then restored
        legacy = None
    cudnn.benchmark, cudnn.deterministic = True, deterministic
    torch._C._set_cudnn_allow_tf32(precision == "tf32")
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = saved
        if legacy is not None:
            torch._C._set_cudnn_allow_tf32(legacy)
        for op, value in precisions.items():
            set_fp32_precision("cuda", op, value)


@contextmanager
def without_benchmark() -> Iterator[None]:
    """torch without its benchmark mode, for work that is not timed."""
    saved = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = saved
