"""The speed of links between ranks: measured between neighbours, or read from text such as ``300GB/s`` and ``10us``."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from tilewise.distributed.mesh.cost import LinkSpeed
from tilewise.plan import parse_bytes

__all__ = ["measure_link", "parse_bandwidth", "parse_latency"]

SMALL, LARGE = 1 << 10, 32 << 20
"""Bytes of the messages that show the latency and the bandwidth."""
IN_A_ROW = 8
"""Exchanges that are timed together."""
UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_bandwidth(text: str, argument: str = "bandwidth") -> float:
    """Bytes a second from text such as ``"300GB/s"``. Raises ``ValueError`` naming ``argument``."""
    try:
        value = parse_bytes(text.strip().removesuffix("/s"), argument)
    except ValueError:
        value = 0
    if not value:
        raise ValueError(f"{argument}={text!r}: bytes a second such as '300GB/s' would do")
    return float(value)


def parse_latency(text: str, argument: str = "latency") -> float:
    """Seconds from text such as ``"10us"`` (ns, us, ms, s). Raises ``ValueError`` naming ``argument``."""
    stripped = text.strip()
    unit = next((suffix for suffix in UNITS if stripped.endswith(suffix)), "")
    try:
        value = float(stripped.removesuffix(unit)) * UNITS[unit] if unit else math.nan
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{argument}={text!r}: a time such as '10us' would do (ns, us, ms or s)")
    return value


def measure_link(group: dist.ProcessGroup | None = None, *, nbytes: int = LARGE, repeats: int = 7) -> LinkSpeed:
    """Measure the link between neighbours of ``group``. All its ranks call this, and get the same result.

    Each rank exchanges messages with both neighbours of a ring at once, as with halos: 1 KiB shows the latency, and
    ``nbytes`` the bandwidth at which a rank receives. Several exchanges are timed together, as they follow each other
    in a step: the time of one alone would be that of the waiting host. The result is the median of ``repeats`` on the
    slowest rank. With NCCL tensors lie on the current GPU, with other backends in the host's memory. Raises
    ``ValueError`` for a group of one rank and for ``nbytes`` of no more than 1 KiB.

    In each of several ranks:

    >>> from tilewise.distributed.mesh import measure_link
    >>> link = measure_link()  # doctest: +SKIP
    >>> link.bandwidth, link.latency  # doctest: +SKIP
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
    moved_s = max(large - small, large / 2)  # a small message that takes as long as a large one is noise
    return LinkSpeed(2 * nbytes / moved_s, small)


def _exchange_s(
    group: dist.ProcessGroup | None, nbytes: int, device: torch.device, wait: Callable[[], object], repeats: int
) -> float:
    """The median seconds of one exchange of ``nbytes`` with each neighbour; ``wait`` waits for the device."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sent = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    received = [torch.empty_like(sent) for _ in range(2)]
    left, right = (rank - 1) % ranks, (rank + 1) % ranks
    operations = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=right, tag=0),
        dist.P2POp(dist.irecv, received[0], group=group, group_peer=left, tag=0),
        dist.P2POp(dist.isend, sent, group=group, group_peer=left, tag=1),
        dist.P2POp(dist.irecv, received[1], group=group, group_peer=right, tag=1),
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
    return statistics.median(times[2:])  # the first two make the connections
