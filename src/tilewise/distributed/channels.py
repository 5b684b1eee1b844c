"""Sums over ranks that share something else than space, such as channels: the two halves of tensor parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tilewise.distributed.names import current_layer
from tilewise.distributed.shard import Shard, local

__all__ = ["sum_gradient_over", "sum_over"]

Held = TypeVar("Held", bound=torch.Tensor)
Group = dist.ProcessGroup | DeviceMesh
Add = Callable[[torch.Tensor], None]


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, add: Add, term: torch.Tensor) -> torch.Tensor:
        ctx.add = add
        total = term.clone(memory_format=torch.contiguous_format)
        add(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _SumBackward.apply(ctx.add, gradient)  # type: ignore[no-untyped-call]


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, add: Add, tensor: torch.Tensor) -> torch.Tensor:
        ctx.add = add
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _SumForward.apply(ctx.add, gradient)  # type: ignore[no-untyped-call]


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
    add = _adding(x, "sum_over", _group(group))
    return _told(x, "sum_over", lambda part: _SumForward.apply(add, part))  # type: ignore[no-untyped-call]


def sum_gradient_over(x: Held, group: Group) -> Held:
    """``x``, the same on every rank of ``group``, whose gradient will be the sum of those that the ranks find.

    Where each rank of ``group`` goes on with a slice of the channels of its own; see :func:`sum_over`, also for what it
    raises.
    """
    add = _adding(x, "sum_gradient_over", _group(group))
    return _told(x, "sum_gradient_over", lambda part: _SumBackward.apply(add, part))  # type: ignore[no-untyped-call]


def _adding(x: torch.Tensor, name: str, group: dist.ProcessGroup) -> Add:
    """Sums over ``group`` in place, of whose failure the other ranks of a shard hear."""
    link, what = x.space.link if isinstance(x, Shard) else None, f"the backward of {current_layer(name)}"

    def add(tensor: torch.Tensor) -> None:
        with contextlib.nullcontext() if link is None else link.telling(what):
            dist.all_reduce(tensor, group=group)

    return add


def _told(x: Held, name: str, act: Callable[[torch.Tensor], torch.Tensor]) -> Held:
    """``act`` of a plain tensor, or of a shard's part, whose other ranks hear of a failure."""
    if not isinstance(x, Shard):
        return act(x)  # type: ignore[return-value]
    with x.space.link.telling(current_layer(name)):
        part = act(local(x))
    return x.like(part)  # type: ignore[return-value]


def _group(group: Group) -> dist.ProcessGroup:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group is a mesh of {group.ndim} dimensions {group.mesh_dim_names}: one would do")
        group = group.get_group()
    if dist.get_rank(group) < 0:
        raise ValueError(f"group: rank {dist.get_rank()} is not in it")
    return group
