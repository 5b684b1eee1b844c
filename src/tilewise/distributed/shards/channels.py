"""Sums over ranks that divide something other than space among them, such as channels in tensor parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tilewise.comm.link import Link
from tilewise.distributed.parts.names import current_layer
from tilewise.distributed.parts.replicated import Sums, sum_gradient, sum_over_ranks
from tilewise.distributed.shards.shard import Shard, local

__all__ = ["sum_gradient_over", "sum_over"]

Held = TypeVar("Held", bound=torch.Tensor)
Group = dist.ProcessGroup | DeviceMesh


class _Ranks:
    """The ranks of ``group``, which add up tensors; the ranks of ``link``, if given, are told of errors as well."""

    def __init__(self, group: dist.ProcessGroup, link: Link | None) -> None:
        self._group, self._link = group, link

    def telling(self, what: str) -> contextlib.AbstractContextManager[object]:
        """See :meth:`Link.telling`."""
        return contextlib.nullcontext() if self._link is None else self._link.telling(what)

    def sum(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` over the ranks in place, and return it."""
        dist.all_reduce(tensor, group=self._group)
        return tensor


def sum_over(x: Held, group: Group) -> Held:
    """The sum of the terms ``x`` of the ranks of ``group``, on each of them; the gradient of each term is the sum's.

    ``group`` is a process group, or a mesh of one dimension such as ``mesh["c"]``. Its ranks hold the same part of the
    image, and have computed different terms of the same shape. Between :func:`sum_gradient_over` and this function each
    rank computes with its own slice of the channels ("f" and "g" of Shoeybi et al. 2019, "Megatron-LM", section 3).
    With a mesh of ``("c", "h")`` and ``SpatialParallel(model, mesh, dims=("h",))``, in the model's forward in each of
    several ranks:

    >>> x = sum_gradient_over(x, mesh["c"])  # the same on all ranks of "c"  # doctest: +SKIP
    >>> x = F.relu(self.conv1(x))  # this rank's slice of conv1's output channels, its bias too  # doctest: +SKIP
    >>> x = sum_over(self.conv2(x), mesh["c"])  # its slice of conv2's input channels, without bias  # doctest: +SKIP
    >>> x = x + self.bias.view(-1, 1, 1)  # the same on all ranks of "c" again  # doctest: +SKIP

    Between the two functions each rank has its own parameters and gradients. Outside, parameters and gradients are the
    same on all ranks of ``group``, and nothing more must be summed. All the ranks call this at the same point of the
    program. Another collective can be used as ``x.like(collective(x.local))``; those of
    ``torch.distributed.nn.functional`` sum gradients too, which is right only where ranks have different losses.

    Raises ``ValueError`` for a mesh of several dimensions, or a group that this rank is not in.
    """
    return _by(sum_over_ranks, x, "sum_over", group)


def sum_gradient_over(x: Held, group: Group) -> Held:
    """``x``, the same on every rank of ``group``; its gradient becomes the sum of the gradients of these ranks.

    Call it before each rank of ``group`` computes with its own slice of the channels. :func:`sum_over` shows how, and
    what is raised.

    In each of several ranks:

    >>> x = tilewise.distributed.sum_gradient_over(x, mesh["c"])  # doctest: +SKIP
    """
    return _by(sum_gradient, x, "sum_gradient_over", group)


def _by(act: Callable[[Sums, str, torch.Tensor], torch.Tensor], x: Held, name: str, group: Group) -> Held:
    """Apply ``act`` to a plain tensor, or to the part of a shard."""
    process_group, what = _process_group(group), current_layer(name)
    if isinstance(x, Shard):
        return x.like(act(_Ranks(process_group, x.space.link), what, local(x)))  # type: ignore[return-value]
    return act(_Ranks(process_group, None), what, x)  # type: ignore[return-value]


def _process_group(group: Group) -> dist.ProcessGroup:
    """The process group of ``group``. Raises ``ValueError`` for a mesh of several dimensions or without this rank."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group is a mesh of {group.ndim} dimensions {group.mesh_dim_names}: one would do")
        group = group.get_group()
    if dist.get_rank(group) < 0:
        raise ValueError(f"group: rank {dist.get_rank()} is not in it")
    return group
