"""What all ranks of a link try together: whether it can be made, what is wrong with it, and how long it takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from tilewise.comm.link import Link
from tilewise.comm.symmetric import connected, machine, symmetric_buffer, why_not

__all__ = ["Call", "everywhere", "said", "shared", "timed", "why_not_shared"]

REPEATS = 9

Call = Callable[[], object]
T = TypeVar("T")


def everywhere(link: Link, make: Callable[[], T]) -> tuple[T | None, str]:
    """What ``make`` gives here, or where it raised on any rank, nothing on all of them, and why."""
    made, failure = None, ""
    try:
        made = make()
    except Exception as error:  # whatever the driver, torch or Triton says: it is done without
        failure = f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    failures = said(link, failure)
    return (None if failures else made), failures


def said(link: Link, text: str) -> str:
    """What ranks have to say, if anything."""
    every = zip(link.ranks, link.gather(text), strict=True)
    return "; ".join(f"rank {rank}: {said}" for rank, said in every if said)


def why_not_shared(link: Link, device: torch.device) -> str:
    """Why ranks have no memory that all of them see; empty where they may have."""
    told = link.gather({"not": why_not(device), "machine": machine()})
    reasons = [one["not"] for one in told if one["not"]]
    if len({one["machine"] for one in told}) > 1:
        reasons.append("ranks are on several machines")
    return reasons[0] if reasons else ""


def shared(
    link: Link, device: torch.device, nbytes: int, make: Callable[[list[torch.Tensor], object], T]
) -> tuple[T | None, str]:
    """What ``make`` gives here for all ranks' buffers, of ``nbytes`` each, and what keeps them; or why it does not."""
    own, failure = everywhere(link, lambda: symmetric_buffer(nbytes, device))
    if own is None:
        return None, failure
    return everywhere(link, lambda: make(*connected(link, own)))


def timed(link: Link, device: torch.device, calls: Sequence[Call], times: int, graphs: bool) -> list[float]:
    """Milliseconds of one of ``times`` equal parts of each call, medians, the slowest rank's.

    With ``graphs`` of replays of CUDA graphs, in which calls are captured.
    """
    for call in calls:
        call()
    torch.cuda.synchronize(device)
    if graphs:
        calls = [_captured(call) for call in calls]
    rows = []
    for _ in range(REPEATS):
        row = []
        for call in calls:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            dist.barrier(link.control)
            start.record()
            call()
            stop.record()
            torch.cuda.synchronize(device)
            row.append(start.elapsed_time(stop) / times)
        rows.append(row)
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    return [max(column) for column in zip(*link.gather(medians), strict=True)]


def _captured(call: Call) -> Call:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay
