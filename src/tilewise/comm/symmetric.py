"""GPU memory that all ranks of a link see, by torch's symmetric memory, without multicast."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path

import torch
import torch.distributed as dist

from tilewise.comm.link import Link

__all__ = ["connected", "machine", "symmetric_buffer", "why_not"]

BOOT = Path("/proc/sys/kernel/random/boot_id")


def machine() -> str:
    """Text that tells the machine that this process runs on from others, even of the same name."""
    return f"{platform.node()} {BOOT.read_text().strip() if BOOT.exists() else ''}"


def why_not(device: torch.device) -> str:
    """Why there is no shared memory on ``device``; empty where there may be."""
    if device.type != "cuda":
        return f"on {device.type}"
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return "this torch has no symmetric memory"
    return ""


def symmetric_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory of this rank, all zero, that other ranks may be given access to.

    Raises what torch raises where that is not possible.
    """
    import torch.distributed._symmetric_memory as symmetric

    buffer: torch.Tensor = symmetric.empty(nbytes, dtype=torch.uint8, device=device).zero_()
    torch.cuda.synchronize(device)
    return buffer


def connected(link: Link, own: torch.Tensor) -> tuple[list[torch.Tensor], object]:
    """The buffers of all ranks, by index, as seen from here, and an object that keeps them alive.

    Every rank calls this with its :func:`symmetric_buffer`; all have one size. Raises what torch raises where GPUs do
    not reach each other's memory.
    """
    import torch.distributed._symmetric_memory as symmetric

    handle = symmetric.rendezvous(own, link.group)
    buffers = [handle.get_buffer(place, tuple(own.shape), own.dtype) for place in link.places]
    dist.barrier(link.control)
    return buffers, (own, handle)
