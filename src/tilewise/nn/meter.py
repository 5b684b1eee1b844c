"""Bytes of tensors alive on a device while a call runs: at chosen moments, and at the most between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _autograd as autograd
from torch._C import _profiler as profiler
from torch.utils._pytree import tree_leaves

from tilewise.execute import release_workspaces

__all__ = ["CpuMeter", "GpuMeter", "Meter", "Trace", "allocator_cap", "meter_of", "storage_bytes"]

Call = Callable[[], object]
MARK = "tilewise memory mark"
STEP = "tilewise memory step"


@dataclass(frozen=True, slots=True)
class Trace:
    """What a run held. ``alive``: bytes at each mark, in order; ``most[i]``: the most before mark ``i``, from the mark
    before it or the start on. ``most`` has one entry more, for what came after the last mark. ``peak`` is over the warm
    run, too.
    """

    alive: tuple[int, ...]
    most: tuple[int, ...]
    peak: int


class Meter:
    """Counts on one device. ``granularity``: bytes by which a large block may exceed what is asked for.

    ``keeps``: whether what a kernel takes as workspace stays taken for the next.
    """

    granularity = 0
    keeps = False

    def traced(self, warm: Call, step: Call) -> Trace:
        """Run ``warm``, then ``step``, in which :meth:`mark` may be called."""
        raise NotImplementedError

    def mark(self) -> None:
        """Note what is alive."""
        raise NotImplementedError

    def charged(self, size: int) -> int:
        """Bytes that a tensor of ``size`` bytes may count."""
        return size


class GpuMeter(Meter):
    """What torch's caching allocator has handed out (``torch.cuda.memory_allocated``), rounding included.

    The allocator counts on the host as calls are made, so nothing waits for the GPU. Its blocks are multiples of 512
    bytes, and a block of more than 1 MiB is not cut where less than 1 MiB would be left.
    """

    granularity = 1 << 20

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._alive: list[int] = []
        self._most: list[int] = []

    def traced(self, warm: Call, step: Call) -> Trace:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        warm()
        torch.cuda.synchronize(self._device)
        first = self._now()["peak"]
        self._alive, self._most = [], []
        torch.cuda.reset_peak_memory_stats(self._device)
        step()
        torch.cuda.synchronize(self._device)
        most = (*self._most, self._now()["peak"])
        return Trace(tuple(self._alive), most, max(first, *most))

    def mark(self) -> None:
        now = self._now()
        self._alive.append(now["current"])
        self._most.append(now["peak"])
        torch.cuda.reset_peak_memory_stats(self._device)

    def charged(self, size: int) -> int:
        rounded = -(-size // 512) * 512
        return rounded + (self.granularity if size > self.granularity else 0)

    def _now(self) -> Mapping[str, int]:
        stats: Mapping[str, Any] = torch.cuda.memory_stats_as_nested_dict(self._device)
        counts: Mapping[str, int] = stats["allocated_bytes"]["all"]
        return counts


class CpuMeter(Meter):
    """What torch's CPU allocator hands out during the run, on top of ``held``: tensors that were there before.

    The allocator reports to torch's profiler. What libraries take for themselves it does not see, nor what other
    threads do. The thread's workspace is given back first, so that the run's own is what counts; it then stays for the
    next kernel.
    """

    keeps = True

    def __init__(self, held: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._held = held

    def traced(self, warm: Call, step: Call) -> Trace:
        if autograd._profiler_enabled():
            raise RuntimeError("a profiler is running, and a CPU's memory is counted by torch's: stop it first")
        release_workspaces()
        before = storage_bytes(self._held())
        config = profiler.ProfilerConfig(
            profiler.ProfilerState.CPU, False, True, False, False, False, profiler._ExperimentalConfig()
        )
        autograd._enable_profiler_legacy(config)  # the newer one writes to stderr
        try:
            warm()
            with torch.autograd.profiler.record_function(STEP):
                pass
            step()
        finally:
            threads = autograd._disable_profiler_legacy()
        return _replayed((event for events in threads for event in events), before)

    def mark(self) -> None:
        with torch.autograd.profiler.record_function(MARK):
            pass


def _replayed(events: Iterable[Any], before: int) -> Trace:
    """The trace of a run from the allocator's events, in their order."""
    alive: list[int] = []
    most: list[int] = []
    now = peak = high = before
    for event in events:
        kind = event.kind()
        if kind == "memory_alloc":
            now += event.cpu_memory_usage()
            high = max(high, now)
        elif kind == "push" and event.name() == STEP:
            alive, most, peak, high = [], [], max(peak, high), now
        elif kind == "push" and event.name() == MARK:
            alive.append(now)
            most.append(high)
            high = now
    most.append(high)
    return Trace(tuple(alive), tuple(most), max(peak, *most))


def storage_bytes(values: Iterable[object]) -> int:
    """Bytes of the storages behind the tensors in ``values``, nested or not, each once."""
    found = {}
    for value in tree_leaves(list(values)):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def meter_of(device: torch.device, held: Callable[[], Iterable[torch.Tensor]]) -> Meter:
    """The meter of ``device``; ``held`` gives the tensors that a step starts with, which a CPU's asks for."""
    return GpuMeter(device) if device.type == "cuda" else CpuMeter(held)


@contextmanager
def allocator_cap(limit: int, device: torch.device) -> Iterator[None]:
    """On a GPU, torch's allocator takes no more than ``limit`` bytes from the device, fragments included.

    The process's own cap is put back, whatever it was.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    known = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    before = 1.0 if known is None else known(device)
    torch.cuda.set_per_process_memory_fraction(min(before, limit / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
