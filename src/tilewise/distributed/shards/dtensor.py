"""Converts shards from and to ``torch.distributed.tensor.DTensor``, torch's own type for parts of a tensor."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Cut

from tilewise.distributed.parts.layout import NAMES, Cuts, Layout
from tilewise.distributed.parts.mesh_ranks import among
from tilewise.distributed.parts.names import current_layer
from tilewise.distributed.shards.shard import Shard, Space, recut

__all__ = ["chunk_cuts", "from_dtensor", "to_dtensor"]

_NAME_OF = {dim: name for name, dim in NAMES.items()}


def chunk_cuts(size: int, ranks: int) -> Cuts:
    """The cut points of ``size`` elements as ``torch.chunk`` and ``DTensor`` cut. The last parts may be empty."""
    step = -(-size // ranks)
    return tuple(min(size, step * rank) for rank in range(ranks + 1))


def from_dtensor(tensor: DTensor, space: Space) -> Shard:
    """This rank's part of ``tensor`` among the ranks of ``space``; differentiable.

    The tensor's mesh has the dimensions of the space by name, over the same ranks. Along each, its placement is
    ``Shard(dim)`` for the dimension that is cut there (``h`` is the last but one), or ``Replicate()``, and each rank
    then takes its part. Along other dimensions of its mesh the placement is ``Replicate()``, also that of the gradient.
    Raises ``ValueError`` for anything else.
    """
    if not isinstance(tensor, DTensor):
        raise ValueError(f"tensor of type {type(tensor).__name__}: a DTensor would do; scatter() takes a plain tensor")
    dims = tuple(_NAME_OF[dim] for dim in space.grid.dims)
    mesh = tensor.device_mesh
    ranks, grid = among(mesh, dims)
    if (tuple(ranks), grid) != (space.link.ranks, space.grid):
        raise ValueError(
            f"tensor's mesh has ranks {ranks} in a grid of {grid.shape}: {space.link.ranks} in {space.grid.shape}, "
            "those of the SpatialParallel, would do"
        )
    placements = [
        _placement(tensor, index, name, name in dims) for index, name in enumerate(mesh.mesh_dim_names or dims)
    ]
    if tuple(placements) != tuple(tensor.placements):
        tensor = tensor.redistribute(mesh, placements)
    shape = tuple(tensor.shape)
    layout = Layout(grid, tuple(chunk_cuts(shape[dim], n) for dim, n in zip(grid.dims, grid.shape, strict=True)))
    part: torch.Tensor = _Local.apply(tensor)  # type: ignore[no-untyped-call]
    return Shard.of(part.view(layout.part(shape)) if not part.numel() else part, layout, space)


class _Local(torch.autograd.Function):
    """The part of a ``DTensor`` on this rank; its gradient is a ``DTensor`` of the same placements, sizes and strides.

    torch's own ``to_local`` guesses the strides of the whole tensor from those of the part, wrongly where parts differ
    in size. torch 2.11 then gives the gradient another placement.
    """

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> torch.Tensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, tensor.placements
        ctx.shape, ctx.stride = tensor.shape, tensor.stride()
        part = tensor.to_local()
        # A collective under way has a tensor of another type, which clone() waits for.
        return part.view_as(part) if type(part) is torch.Tensor else part.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> DTensor:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "from_dtensor has no gradients of gradients (create_graph=True): scatter() of the whole tensor, or "
                "shard() of this rank's part, would do"
            )
        whole: DTensor = DTensor.from_local(
            gradient, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride
        )
        return whole


def _placement(tensor: DTensor, index: int, name: str, cut: bool) -> Any:
    """The placement of ``tensor`` along dimension ``index`` of its mesh, called ``name``, after a check."""
    placement = tensor.placements[index]
    if not cut:
        if placement.is_replicate():
            return placement
        raise ValueError(
            f"tensor has {placement!r} on mesh dimension {name!r}, which cuts no image: Replicate() would do"
        )
    dim = tensor.dim() + NAMES[name]
    if dim < 0:
        raise ValueError(f"tensor of {tensor.dim()} dimensions has no dimension {name!r}, which is cut")
    wanted = Cut(dim)
    if not placement.is_replicate() and placement != wanted:
        raise ValueError(f"tensor has {placement!r} on mesh dimension {name!r}: Shard({dim}) or Replicate() would do")
    return wanted


def to_dtensor(shard: Shard) -> DTensor:
    """``shard`` as a ``DTensor`` with ``Shard(dim)`` on each dimension of the mesh; differentiable.

    The mesh is that of the spatial dimensions alone, such as ``mesh["h"]``. Where the shard is not cut as
    ``torch.chunk`` cuts, as ``DTensor`` does, its parts move first, and gradients move back. Raises ``ValueError``
    where it has no mesh.
    """
    space, layout = shard.space, shard.spatial
    if space.mesh is None:
        raise ValueError("shard belongs to no mesh: one that SpatialParallel made would do")
    cuts = {
        dim: chunk_cuts(points[-1], len(points) - 1) for dim, points in zip(layout.grid.dims, layout.cuts, strict=True)
    }
    moved = recut(shard, cuts, current_layer("to_dtensor"))
    shape = tuple(shard.shape)
    strides = itertools.accumulate((max(size, 1) for size in reversed(shape[1:])), lambda a, b: a * b, initial=1)
    whole: DTensor = DTensor.from_local(
        moved.local.contiguous(),
        space.mesh,
        _placements(space.mesh, space, shard),
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(strides)[::-1],
    )
    return whole


def _placements(mesh: DeviceMesh, space: Space, shard: Shard) -> list[Cut | Replicate]:
    """The placements of a shard: its cut dimensions may have moved since, but the grid keeps the space's order."""
    dim_of = {_NAME_OF[dim]: dim_now for dim, dim_now in zip(space.grid.dims, shard.spatial.grid.dims, strict=True)}
    names = mesh.mesh_dim_names or tuple(dim_of)
    return [Cut(shard.dim() + dim_of[name]) for name in names]
