"""Ranks started by a benchmark: processes with NCCL on GPUs and gloo on CPUs, and how they time what they do together.

On a CPU they are forked from this process, which has imported torch; CUDA does not survive a fork, so on GPUs they are
spawned. Each leaves what it found as JSON.
"""

from __future__ import annotations

import importlib
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from harness.settings import NothingToMeasure

__all__ = ["Clock", "each_of_ranks", "graphed", "run_ranks", "usable"]

Call = Callable[[], object]
LEAST, WARM_UP = 5, 3
POLL_S = 0.2
FLUSHES = 6
"""Reads of memory twice as large as L2 before a call: 0.2 ms, in which the host gets as far as launching it."""


def usable(ranks: Sequence[int], device: torch.device) -> tuple[list[int], list[str]]:
    """Numbers of ranks that this machine has devices for, and a note for each other.

    Raises :class:`NothingToMeasure` where torch cannot talk between processes.
    """
    if not dist.is_available():
        raise NothingToMeasure("this torch has no torch.distributed")
    most = torch.cuda.device_count() if device.type == "cuda" else max(ranks, default=1)
    notes = [f"{n} ranks: not measured, there are {most} GPUs" for n in ranks if n > most]
    return [n for n in ranks if n <= most], notes


def run_ranks(ranks: int, device: torch.device, function: str, arguments: dict[str, Any]) -> list[Any]:
    """What ``function`` (``"module:name"``) returns on each rank for ``(device, arguments)``, all plain JSON values.

    It runs within ``torch.distributed``, on device number ``rank``. Raises what a rank raised, as
    :mod:`torch.multiprocessing` tells it.
    """
    (found,) = each_of_ranks(ranks, device, function, arguments)
    return found


def each_of_ranks(ranks: int, device: torch.device, function: str, arguments: dict[str, Any]) -> Iterator[list[Any]]:
    """As :func:`run_ranks`, for a function that is a generator: each value of all ranks, as soon as all have it.

    Where this is left early, or interrupted, the ranks are ended.
    """
    with tempfile.TemporaryDirectory(prefix="tilewise-ranks-") as folder:
        context = torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
            _rank, (ranks, device.type, function, arguments, folder), ranks, join=False,
            start_method="spawn" if device.type == "cuda" else "fork",
        )  # fmt: skip
        ended, index = False, 0
        try:
            while not ended:
                ended = context.join(POLL_S)
                while all(path.exists() for path in _paths(folder, ranks, index)):
                    yield [json.loads(path.read_text("utf-8")) for path in _paths(folder, ranks, index)]
                    index += 1
        finally:
            for process in context.processes:
                process.kill()
                process.join()


def _paths(folder: str, ranks: int, index: int) -> list[Path]:
    return [Path(folder) / f"{rank}-{index}.json" for rank in range(ranks)]


def _rank(rank: int, ranks: int, kind: str, function: str, arguments: dict[str, Any], folder: str) -> None:
    if kind == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)  # the parent's threads are not in a fork, and ranks share the cores
    store = f"file://{Path(folder) / 'store'}"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", init_method=store, rank=rank, world_size=ranks)
    module, _, name = function.partition(":")
    found = getattr(importlib.import_module(module), name)(device, arguments)
    for index, value in enumerate(found if isinstance(found, Iterator) else [found]):
        path = _paths(folder, ranks, index)[rank]
        path.with_suffix(".part").write_text(json.dumps(value), "utf-8")
        path.with_suffix(".part").rename(path)
    dist.barrier()
    dist.destroy_process_group()


class Replay:
    """Replays of a captured call. It keeps the call's tensors, as a graph holds their addresses alone."""

    def __init__(self, graph: torch.cuda.CUDAGraph, call: Call) -> None:
        self._graph, self._call = graph, call

    def __call__(self) -> None:
        """Run it again."""
        self._graph.replay()


def graphed(device: torch.device, calls: Sequence[Call]) -> list[Call]:
    """``calls`` as replays of CUDA graphs that share memory, captured in order; on a CPU the calls themselves.

    A call may use what the one before it made. No graph of autograd may reach in from outside: its nodes would run on
    the streams where they were made.
    """
    if device.type != "cuda":
        return list(calls)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            for call in calls:
                call()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    replays: list[Call] = []
    pool = None
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            call()
        pool = graph.pool()
        replays.append(Replay(graph, call))
    for replay in replays:
        replay()
    torch.cuda.synchronize(device)
    return replays


class Clock:
    """Times calls that all ranks make together; the slowest rank counts. Every rank makes the same calls of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._token = torch.zeros(1, device=device)
        if device.type == "cuda":
            size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
            self._unrelated, self._sum = torch.zeros(size // 4, device=device), torch.zeros((), device=device)

    def medians_ms(self, calls: Sequence[Call], repeats: int) -> list[float]:
        """Medians of ``repeats`` rounds of all calls in turn, over a cold L2 on a GPU."""
        times = torch.tensor([[self._once(call) for call in calls] for _ in range(max(repeats, LEAST) + WARM_UP)])
        times = times.to(self._device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return [statistics.median(column) for column in times[WARM_UP:].T.tolist()]

    def _once(self, call: Call) -> float:
        if self._device.type != "cuda":
            import time

            dist.barrier()
            begin = time.perf_counter()
            call()
            return (time.perf_counter() - begin) * 1e3
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        dist.barrier()
        for _ in range(FLUSHES):
            torch.sum(self._unrelated, dim=0, out=self._sum)
        dist.all_reduce(self._token)  # all GPUs begin at once, however their hosts are late
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize(self._device)
        return float(start.elapsed_time(stop))
