"""What all ranks of a link try together: whether something can be made, what is wrong with it, and its time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from tilewise.comm.link import Link
from tilewise.comm.symmetric import connected, machine, symmetric_buffer, why_not

__all__ = ["Call", "everywhere", "make_on_symmetric_buffers", "said", "timed", "why_not_symmetric"]

REPEATS = 9

Call = Callable[[], object]
T = TypeVar("T")


def everywhere(link: Link, make: Callable[[], T]) -> tuple[T | None, str]:
    """The result of ``make()`` on this rank and an empty text; ``None`` and the reasons where it raised on any rank."""
    result, failure = None, ""
    try:
        result = make()
    except Exception as error:  # whatever the driver, torch or Triton says: it is done without
        failure = f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    failures = said(link, failure)
    return (None if failures else result), failures


def said(link: Link, text: str) -> str:
    """The texts of all ranks that are not empty, joined, with their ranks."""
    every = zip(link.ranks, link.gather(text), strict=True)
    return "; ".join(f"rank {rank}: {said}" for rank, said in every if said)


def why_not_symmetric(link: Link, device: torch.device) -> str:
    """Why the ranks cannot have memory that all of them see; empty where they may."""
    answers = link.gather({"not": why_not(device), "machine": machine()})
    reasons = [answer["not"] for answer in answers if answer["not"]]
    if len({answer["machine"] for answer in answers}) > 1:
        reasons.append("ranks are on several machines")
    return reasons[0] if reasons else ""


def make_on_symmetric_buffers(
    link: Link, device: torch.device, nbytes: int, make: Callable[[list[torch.Tensor], object], T]
) -> tuple[T | None, str]:
    """The result of ``make(buffers, keeper)`` for buffers of ``nbytes`` on all ranks, or ``None`` and the reason."""
    buffer, failure = everywhere(link, lambda: symmetric_buffer(nbytes, device))
    if buffer is None:
        return None, failure
    return everywhere(link, lambda: make(*connected(link, buffer)))


def timed(link: Link, device: torch.device, calls: Sequence[Call], times: int, graphs: bool) -> list[float]:
    """Median milliseconds of each call divided by ``times``, the number of its equal parts, on the slowest rank.

    With ``graphs`` the calls are captured, and replays of CUDA graphs are timed.
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
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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
    """A function that replays a CUDA graph of ``call``."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay
