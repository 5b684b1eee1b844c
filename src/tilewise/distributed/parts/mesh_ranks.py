"""Finds the ranks of a ``DeviceMesh`` that share this rank's images, and their grid."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tilewise.distributed.parts.layout import NAMES, Grid

__all__ = ["among"]


def among(mesh: DeviceMesh, dims: tuple[str, ...]) -> tuple[list[int], Grid]:
    """The ranks that share this rank's images, in the order of their indices, and their grid.

    ``dims`` names the dimensions of images that are cut: "d", "h" or "w". They are the dimensions of ``mesh`` of the
    same names, or all its dimensions in this order where they have no names. Raises ``ValueError`` where ``dims`` and
    ``mesh`` do not fit together, or this rank is not in ``mesh``.
    """
    if not dims or any(dim not in NAMES for dim in dims) or len(set(dims)) != len(dims):
        raise ValueError(f"dims={dims}: different ones of {', '.join(NAMES)} would do")
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh={mesh!r:.80}: a DeviceMesh would do, such as init_device_mesh('cuda', (4,))")
    names = mesh.mesh_dim_names
    if names is None:
        if mesh.ndim != len(dims):
            raise ValueError(f"mesh has {mesh.ndim} dimensions without names: {len(dims)} for dims={dims} would do")
        names = dims
    if missing := [dim for dim in dims if dim not in names]:
        raise ValueError(f"mesh has dimensions {names}, not {', '.join(missing)}")
    here = mesh.get_coordinate()
    if here is None:
        raise ValueError(f"mesh: rank {dist.get_rank()} is not in it")
    picked = [names.index(dim) for dim in dims]
    ranks = mesh.mesh[tuple(slice(None) if i in picked else here[i] for i in range(mesh.ndim))]
    ranks = ranks.permute([sorted(picked).index(i) for i in picked])
    grid = Grid(tuple(NAMES[dim] for dim in dims), tuple(ranks.shape), tuple(here[i] for i in picked))
    return [int(rank) for rank in ranks.flatten()], grid
