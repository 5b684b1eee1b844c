"""Memory of GPUs that all ranks of a link see, by torch's symmetric memory; without multicast."""

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
    """The machine that this process runs on, told apart from others of the same name."""
    return f"{platform.node()} {BOOT.read_text().strip() if BOOT.exists() else ''}"


def why_not(device: torch.device) -> str:
    """Why there is no such memory on ``device``; empty where there may be."""
    if device.type != "cuda":
        return f"on {device.type}"
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return "this torch has no symmetric memory"
    return ""


def symmetric_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory of this rank's, all zero, that others may be shown. Raises what torch raises where there is none."""
    import torch.distributed._symmetric_memory as symmetric

    own: torch.Tensor = symmetric.empty(nbytes, dtype=torch.uint8, device=device).zero_()
    torch.cuda.synchronize(device)
    return own


def connected(link: Link, own: torch.Tensor) -> tuple[list[torch.Tensor], object]:
    """The buffers of all ranks, by index, as seen from here, and what keeps them there.

    Every rank calls it with its :func:`symmetric_buffer`, of one size on all. Raises what torch raises where GPUs do
    not reach each other's memory.
    """
    import torch.distributed._symmetric_memory as symmetric

    handle = symmetric.rendezvous(own, link.group)
    found = [handle.get_buffer(place, tuple(own.shape), own.dtype) for place in link.places]
    dist.barrier(link.control)
    return found, (own, handle)
