"""How fast ranks talk: measured between neighbours, or read from text such as ``300GB/s`` and ``10us``."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from tilewise.distributed.mesh_cost import LinkSpeed
from tilewise.plan import parse_bytes

__all__ = ["measure_link", "parse_bandwidth", "parse_latency"]

SMALL, LARGE = 1 << 10, 32 << 20
IN_A_ROW = 8
UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_bandwidth(text: str, argument: str = "bandwidth") -> float:
    """Bytes a second of text such as ``"300GB/s"``. Raises ``ValueError`` naming ``argument``."""
    try:
        value = parse_bytes(text.strip().removesuffix("/s"), argument)
    except ValueError:
        value = 0
    if not value:
        raise ValueError(f"{argument}={text!r}: bytes a second such as '300GB/s' would do")
    return float(value)


def parse_latency(text: str, argument: str = "latency") -> float:
    """Seconds of text such as ``"10us"`` (ns, us, ms, s). Raises ``ValueError`` naming ``argument``."""
    words = text.strip()
    unit = next((u for u in UNITS if words.endswith(u)), "")
    try:
        value = float(words.removesuffix(unit)) * UNITS[unit] if unit else math.nan
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{argument}={text!r}: a time such as '10us' would do (ns, us, ms or s)")
    return value


def measure_link(group: dist.ProcessGroup | None = None, *, nbytes: int = LARGE, repeats: int = 7) -> LinkSpeed:
    """The link between neighbours of ``group``, the same on every rank; all its ranks call it.

    Each rank exchanges with both neighbours of a ring at once, as halos are: 1 KiB for the latency, ``nbytes`` for the
    bandwidth that a rank receives with; several follow each other, as a step's do, since a host that waits for one
    alone measures itself. The slowest rank counts; medians of ``repeats``. On NCCL tensors lie on the
    current GPU, on other backends in the host's memory. Raises ``ValueError`` for a group of one rank and for
    ``nbytes`` of no more than 1 KiB.
    """
    ranks = dist.get_world_size(group)
    if ranks < 2:
        raise ValueError(f"group has {ranks} rank: a link is between two or more")
    if nbytes <= SMALL:
        raise ValueError(f"nbytes={nbytes}: more than {SMALL} would do")
    on_gpu = "nccl" in dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    wait: Callable[[], object] = torch.cuda.synchronize if on_gpu else lambda: None
    small, large = (_exchange_s(group, size, device, wait, repeats) for size in (SMALL, nbytes))
    times = torch.tensor([small, large], dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    small, large = times.tolist()
    moved_s = max(large - small, large / 2)  # where a small message takes as long, its time is noise
    return LinkSpeed(2 * nbytes / moved_s, small)


def _exchange_s(
    group: dist.ProcessGroup | None, nbytes: int, device: torch.device, wait: Callable[[], object], repeats: int
) -> float:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    own = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    boxes = [torch.empty_like(own) for _ in range(2)]
    left, right = (rank - 1) % ranks, (rank + 1) % ranks
    operations = [
        dist.P2POp(dist.isend, own, group=group, group_peer=right, tag=0),
        dist.P2POp(dist.irecv, boxes[0], group=group, group_peer=left, tag=0),
        dist.P2POp(dist.isend, own, group=group, group_peer=left, tag=1),
        dist.P2POp(dist.irecv, boxes[1], group=group, group_peer=right, tag=1),
    ]
    times = []
    for _ in range(repeats + 2):
        dist.barrier(group)
        wait()
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        wait()
        times.append((time.perf_counter() - start) / IN_A_ROW)
    return statistics.median(times[2:])  # the first ones connect
