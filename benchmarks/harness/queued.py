"""What kernels of microseconds take on a GPU, without the host: calls wait in its queue behind a kernel that spins.

Timed one by one, as a layer runs, such calls show how long Python takes to launch them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from harness.sides import Call
from tilewise.machine.device import torch_device
from tilewise.machine.torch_state import framework_flags
from tilewise.planner.measuring import times as measure
from tilewise.planner.measuring.times import Took
from tilewise.problems.conv.problem import ConvProblem

__all__ = ["medians", "rounds"]

SPIN_CYCLES = 6_000_000
"""Some milliseconds, in which the host queues a round."""
WARM_UP = 3


def rounds(calls: Sequence[Call], device: torch.device, *, budget_ms: float, least: int, most: int) -> list[list[Took]]:
    """What each call took in each round, on a GPU over a cold L2 that holds nothing to be written back.

    As ``measure.rounds`` on a CPU.
    """
    if device.type != "cuda":
        return measure.rounds(calls, device, budget_ms=budget_ms, least=least, most=most)
    size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    unrelated, total = torch.zeros(size // 4, device=device), torch.zeros((), device=device)
    times: list[list[Took]] = [[] for _ in calls]
    taken, turn = 0.0, 0
    while turn < WARM_UP + most and (turn < WARM_UP + least or taken < budget_ms):
        torch.cuda._sleep(SPIN_CYCLES)
        order = list(range(len(calls)))[:: 1 if turn % 2 == 0 else -1]
        marks = []
        for index in order:
            torch.sum(unrelated, dim=0, out=total)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            begin = time.perf_counter()
            calls[index]()
            host = (time.perf_counter() - begin) * 1e3
            stop.record()
            marks.append((index, start, stop, host))
        torch.cuda.synchronize(device)
        for index, start, stop, host in marks:
            took = Took(float(start.elapsed_time(stop)), host)
            if turn >= WARM_UP:
                times[index].append(took)
                taken += took.device_ms
        turn += 1
    return times


def medians(
    problem: ConvProblem, calls: Sequence[Call], *, budget_ms: float = 200.0, least: int = 5, most: int = 31
) -> list[Took]:
    """Medians of :func:`rounds` under the problem's precision and torch's benchmark mode, as ``sides.race`` has."""
    with framework_flags(problem.device_type, problem.precision, deterministic=False):
        times = rounds(calls, torch_device(problem.device), budget_ms=budget_ms, least=least, most=most)
    return [
        Took(statistics.median(took.device_ms for took in each), statistics.median(took.host_ms for took in each))
        for each in times
    ]
