"""Several processes that train one net, each on a GPU of its own, through ``torch.distributed``.

As in Caffe each rank reads batches of its own, of ``batch_size`` records, and gradients are averaged before they are
clipped. Rank 0 tests and writes snapshots. Statistics of BatchNorm are those of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from tilewise.frontends.caffe.training.actions import Action

__all__ = ["ALONE", "Ranks", "joined"]

ORDER = (Action.NONE, Action.SNAPSHOT, Action.STOP)
"""What all do where ranks are asked for different things: the last of this order."""


@dataclass(frozen=True)
class Ranks:
    """This process's rank among ``count``. ``words`` is the group in which numbers of the host are exchanged."""

    rank: int = 0
    count: int = 1
    words: Any = None

    @property
    def first(self) -> bool:
        """Whether this rank tests, tells and writes."""
        return self.rank == 0

    def average(self, tensors: list[Tensor]) -> None:
        """Replace tensors by their means over all ranks."""
        if self.count == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        flat /= self.count
        parts = flat.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])

    @torch.no_grad()
    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks the values that rank 0 has."""
        if self.count > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def same(self, value: int) -> int:
        """Rank 0's number below 2**63."""
        if self.count == 1:
            return value
        told = torch.tensor([value], dtype=torch.int64, device="cpu")
        dist.broadcast(told, 0, group=self.words)
        return int(told)

    def agreed(self, requested: Callable[[], Action]) -> Action:
        """What all ranks do: what one of them is asked for."""
        action = requested()
        if self.count == 1:
            return action
        told = torch.tensor([ORDER.index(action)], dtype=torch.int64, device="cpu")
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.words)
        return ORDER[int(told)]


ALONE = Ranks()
"""One process."""


def joined(rank: int, count: int, meeting: str, backend: str) -> Ranks:
    """Join ``count`` processes that meet by the file ``meeting``, which does not exist before.

    ``backend`` is ``"nccl"`` for GPUs, ``"gloo"`` for CPUs.
    """
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=count)
    words = dist.new_group(backend="gloo") if backend != "gloo" else dist.group.WORLD
    return Ranks(rank, count, words)
