"""The bytes of tensors that are alive on a device while a call runs: at marks, and the most between them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tilewise.execute import release_workspaces
from tilewise.machine.allocations import BUSY, countable, recorded
from tilewise.planner.measuring.times import NOISE

__all__ = ["CpuMeter", "GpuMeter", "Meter", "Trace", "allocator_cap", "meter_of", "storage_bytes"]

Call = Callable[[], object]
MARK = "tilewise memory mark"
STEP = "tilewise memory step"


@dataclass(frozen=True, slots=True)
class Trace:
    """What a run held, in bytes.

    ``alive`` has the bytes at each mark, in order. ``most[i]`` is the most before mark ``i``, since the mark before it
    or the start. ``most`` has one entry more, for the time after the last mark. ``peak`` includes the warm-up run.
    """

    alive: tuple[int, ...]
    most: tuple[int, ...]
    peak: int


class Meter:
    """A counter of the bytes on one device.

    ``granularity`` is the bytes by which a large block may exceed what was asked for. ``keeps`` says whether a kernel's
    workspace stays allocated for the next kernel. ``unseen`` is the bytes that a step may take without being counted.
    """

    granularity = 0
    keeps = False
    unseen = 0

    def traced(self, warm: Call, step: Call) -> Trace:
        """Run ``warm``, then ``step``, which may call :meth:`mark`, and return what they held."""
        raise NotImplementedError

    def mark(self) -> None:
        """Note the bytes that are alive."""
        raise NotImplementedError

    def charged(self, size: int) -> int:
        """The bytes that a tensor of ``size`` bytes may count."""
        return size


class GpuMeter(Meter):
    """The bytes that torch's caching allocator has handed out (``torch.cuda.memory_allocated``), with its rounding.

    The allocator counts on the host as calls are made, so nothing waits for the GPU. Its blocks are multiples of 512
    bytes. A block of more than 1 MiB is not split where less than 1 MiB would be left.
    """

    granularity = 1 << 20

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._alive: list[int] = []
        self._most: list[int] = []

    def traced(self, warm: Call, step: Call) -> Trace:
        """As :meth:`Meter.traced`."""
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
        """As :meth:`Meter.mark`, with the most since the mark before."""
        allocated = self._now()
        self._alive.append(allocated["current"])
        self._most.append(allocated["peak"])
        torch.cuda.reset_peak_memory_stats(self._device)

    def charged(self, size: int) -> int:
        """As :meth:`Meter.charged`: a small tensor by its blocks, a large one with what its block may exceed it."""
        rounded = -(-size // 512) * 512
        return rounded + (self.granularity if size > self.granularity else 0)

    def _now(self) -> Mapping[str, int]:
        """The bytes handed out now."""
        stats: Mapping[str, Any] = torch.cuda.memory_stats_as_nested_dict(self._device)
        counts: Mapping[str, int] = stats["allocated_bytes"]["all"]
        return counts


class CpuMeter(Meter):
    """The bytes that torch's CPU allocator hands out during the run, added to those of the tensors of ``held()``.

    The allocator reports to torch's profiler. Memory that libraries take for themselves and that other threads take is
    not seen; ``unseen`` is as much as a planner may miss while it measures a call. The thread's kept workspace is given
    back first, so that the run's own counts; it then stays for the next kernel.
    """

    keeps = True
    unseen = NOISE

    def __init__(self, held: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._held = held

    def traced(self, warm: Call, step: Call) -> Trace:
        """As :meth:`Meter.traced`."""
        if not countable():
            raise RuntimeError(BUSY)
        release_workspaces()
        gc.collect()
        # Kept meanwhile, as torch warns of what is older than its recording and freed within it: gradients that a step
        # of the caller's own drops first. It does not count their end either, so that no number changes.
        held = list(self._held())
        before = storage_bytes(held)

        def run() -> None:
            """The warm-up run, then the step, marked as such."""
            warm()
            with torch.autograd.profiler.record_function(STEP):
                pass
            step()

        return _replayed(recorded(run), before)

    def mark(self) -> None:
        """As :meth:`Meter.mark`, by an event in the profile."""
        with torch.autograd.profiler.record_function(MARK):
            pass


def _replayed(events: Iterable[Any], before: int) -> Trace:
    """The trace of a run, from the allocator's events in their order. ``before`` is the bytes alive at the start."""
    alive: list[int] = []
    most: list[int] = []
    current = peak = high = before
    for event in events:
        kind = event.kind()
        if kind == "memory_alloc":
            current += event.cpu_memory_usage()
            high = max(high, current)
        elif kind == "push" and event.name() == STEP:
            alive, most, peak, high = [], [], max(peak, high), current
        elif kind == "push" and event.name() == MARK:
            alive.append(current)
            most.append(high)
            high = current
    most.append(high)
    return Trace(tuple(alive), tuple(most), max(peak, *most))


def storage_bytes(values: Iterable[object]) -> int:
    """The bytes of the storages behind the tensors in ``values``, nested or not; a shared storage counts once."""
    sizes = {}
    for value in tree_leaves(list(values)):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def meter_of(device: torch.device, held: Callable[[], Iterable[torch.Tensor]]) -> Meter:
    """A meter for ``device``. ``held()`` gives the tensors that exist when a step starts, which a CPU's meter needs."""
    return GpuMeter(device) if device.type == "cuda" else CpuMeter(held)


@contextmanager
def allocator_cap(limit: int, device: torch.device) -> Iterator[None]:
    """On a GPU, let torch's allocator take at most ``limit`` bytes from the device, fragments included.

    The process's own cap is restored at the end. Nothing happens on other devices.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    fraction_of = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    before = 1.0 if fraction_of is None else fraction_of(device)
    torch.cuda.set_per_process_memory_fraction(min(before, limit / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
