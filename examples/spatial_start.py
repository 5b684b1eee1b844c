"""What the examples on several devices begin with: ranks from torchrun, a mesh of them, and a device for each."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tilewise.distributed import SpatialParallel

__all__ = ["say", "start", "wrapped"]


def start() -> torch.device:
    """This rank's device; joins the others of torchrun, over NCCL where each has a GPU and over gloo otherwise."""
    local, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_gpus = torch.cuda.device_count() >= ranks
    if dist.is_initialized():
        on_gpus = "nccl" in dist.get_backend()
    else:
        dist.init_process_group("nccl" if on_gpus else "gloo")
    if not on_gpus:
        return torch.device("cpu")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def wrapped(model: nn.Module, device: torch.device, dims: Sequence[str]) -> SpatialParallel:
    """``model`` on images split over all ranks: along the first of ``dims``, along two where their number is square."""
    ranks = dist.get_world_size()
    side = int(ranks**0.5)
    shape = (side, side) if side > 1 and side * side == ranks and len(dims) > 1 else (ranks,)
    names = tuple(dims[: len(shape)])
    return SpatialParallel(model, init_device_mesh(device.type, shape, mesh_dim_names=names), dims=names)


def say(text: str) -> None:
    """One line, from one rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)
