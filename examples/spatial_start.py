"""What the examples on several devices share: ranks from torchrun, a mesh and devices for them, training, comparing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tilewise.distributed import SpatialParallel

__all__ = ["compared", "say", "start", "train", "wrapped"]

TOLERANCE = 1e-4
"""Greatest difference of losses, which start near 1: sums are added up in another order, and training grows that."""


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


def train(
    model: nn.Module,
    outputs: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    target: torch.Tensor,
    steps: int,
    *,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    lr: float,
) -> list[float]:
    """The losses of ``steps`` steps on all of ``x``: ``loss`` of ``outputs`` and ``target``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        found = loss(outputs(x), target)
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(found.detach()))
    return losses


def compared(split: Sequence[float], alone: Sequence[float]) -> int:
    """The exit status, 0 where the losses of ranks and of one device agree; says both of each step."""
    for step, (a, b) in enumerate(zip(split, alone, strict=True)):
        say(f"step {step}: split {a:.6f}, one device {b:.6f}")
    furthest = max(abs(a - b) for a, b in zip(split, alone, strict=True))
    say(f"losses differ by {furthest:.1e} at most")
    return int(not furthest <= TOLERANCE)
