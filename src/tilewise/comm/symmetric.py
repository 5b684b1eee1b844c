"""Memory of GPUs that all ranks of a link see, by torch's symmetric memory; without multicast."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path

import torch
import torch.distributed as dist

from tilewise.comm.link import Link

__all__ = ["machine", "symmetric_buffers", "why_not"]

BOOT = Path("/proc/sys/kernel/random/boot_id")


def machine() -> str:
    """The machine that this process runs on, told apart from others of the same name."""
    return f"{platform.node()} {BOOT.read_text().strip() if BOOT.exists() else ''}"


def why_not(device: torch.device) -> str:
    """Why there is no such memory on ``device``; empty where there may be."""
    if device.type != "cuda":
        return f"on {device.type}"
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return "this torch has no symmetric memory"
    return ""


def symmetric_buffers(link: Link, nbytes: int, device: torch.device) -> tuple[list[torch.Tensor], object]:
    """A buffer of each rank, by index, as seen from here, all zero, and what keeps them there.

    Every rank calls it. Raises what torch raises where GPUs do not reach each other's memory.
    """
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    own.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric.rendezvous(own, link.group)
    found = [handle.get_buffer(place, (nbytes,), torch.uint8) for place in link.places]
    dist.barrier(link.control)
    return found, (own, handle)
