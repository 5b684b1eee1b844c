"""Sums over ranks that share something else than space, such as channels: the two halves of tensor parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tilewise.comm.link import Link
from tilewise.distributed.names import current_layer
from tilewise.distributed.replicated import Sums, sum_gradient, sum_over_ranks
from tilewise.distributed.shard import Shard, local

__all__ = ["sum_gradient_over", "sum_over"]

Held = TypeVar("Held", bound=torch.Tensor)
Group = dist.ProcessGroup | DeviceMesh


class _Ranks:
    """The ranks of ``group``, of whose failure those of ``link`` hear too."""

    def __init__(self, group: dist.ProcessGroup, link: Link | None) -> None:
        self._group, self._link = group, link

    def telling(self, what: str) -> contextlib.AbstractContextManager[object]:
        """See :meth:`Link.telling`."""
        return contextlib.nullcontext() if self._link is None else self._link.telling(what)

    def sum(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, summed over the ranks in place."""
        dist.all_reduce(tensor, group=self._group)
        return tensor


def sum_over(x: Held, group: Group) -> Held:
    """The sum of the terms ``x`` of the ranks of ``group``, on each of them; the gradient of each term is the sum's.

    ``group`` is a process group, or a mesh of one dimension such as ``mesh["c"]``: not of ranks among which the image
    is cut, but of those that hold the same part of it and computed different terms, of the same shape. It ends what
    :func:`sum_gradient_over` begins: between the two, each rank computes with its own slice of the channels ("g" and
    "f" of Shoeybi et al. 2019, "Megatron-LM", section 3). With a mesh of ``("c", "h")`` and
    ``SpatialParallel(model, mesh, dims=("h",))``, in the model's forward::

        x = sum_gradient_over(x, mesh["c"])           # the same on all ranks of "c"
        x = F.relu(self.conv1(x))                     # this rank's slice of conv1's output channels, its bias too
        x = sum_over(self.conv2(x), mesh["c"])        # this rank's slice of conv2's input channels, without bias
        x = x + self.bias.view(-1, 1, 1)              # the same on all ranks of "c" again

    Parameters between the two are each rank's own and so are their gradients; what is outside of them is the same on
    all ranks of ``group``, and so are gradients: nothing more is to be summed. Every one of the ranks calls it at the
    same point of the program. A collective of one's own goes by ``x.like(collective(x.local))``; that of
    ``torch.distributed.nn.functional`` sums gradients too, which is right only where ranks have different losses.

    Raises ``ValueError`` for a mesh of several dimensions, or a group that this rank is not in.
    """
    return _by(sum_over_ranks, x, "sum_over", group)


def sum_gradient_over(x: Held, group: Group) -> Held:
    """``x``, the same on every rank of ``group``, whose gradient will be the sum of those that the ranks find.

    Where each rank of ``group`` goes on with a slice of the channels of its own; see :func:`sum_over`, also for what it
    raises.
    """
    return _by(sum_gradient, x, "sum_gradient_over", group)


def _by(act: Callable[[Sums, str, torch.Tensor], torch.Tensor], x: Held, name: str, group: Group) -> Held:
    """``act`` of a plain tensor, or of a shard's part."""
    found, what = _group(group), current_layer(name)
    if isinstance(x, Shard):
        return x.like(act(_Ranks(found, x.space.link), what, local(x)))  # type: ignore[return-value]
    return act(_Ranks(found, None), what, x)  # type: ignore[return-value]


def _group(group: Group) -> dist.ProcessGroup:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group is a mesh of {group.ndim} dimensions {group.mesh_dim_names}: one would do")
        group = group.get_group()
    if dist.get_rank(group) < 0:
        raise ValueError(f"group: rank {dist.get_rank()} is not in it")
    return group
