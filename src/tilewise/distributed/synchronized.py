"""Ranks that take statistics together, over more images than one: found once for each process group, by all of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tilewise.comm.link import Link, PeerError
from tilewise.distributed.shard import Space

__all__ = ["link_over"]

_meetings: dict[tuple[int, ...], itertools.count[int]] = {}


def link_over(space: Space, what: str, group: dist.ProcessGroup | None, device: torch.device) -> Link:
    """The link of the ranks of ``group`` (``None``: of the job) whose elements count: each of them once.

    Of ranks that hold copies, along the ``replicated`` dimensions of the mesh, those like this one are meant. ``space``
    keeps the link, its own where no other ranks are meant. Every rank of the group calls it at the same point of the
    program. Raises ``ValueError`` naming the layer where the group has a part of the ranks of an image, and
    :class:`~tilewise.comm.link.PeerError` where some of its ranks do not come.
    """
    known = space.wider.get(group)
    if known is not None:
        return known
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(f"{what}: process_group: rank {dist.get_rank()} is not in it; None, for all ranks, would do")
    ranks = tuple(sorted(dist.get_process_group_ranks(dist.group.WORLD if group is None else group)))
    said = _told(ranks, {"image": sorted(space.link.ranks), "copy": space.copy}, what, space.link.timeout)
    for rank, other in said.items():
        if missing := sorted(set(other["image"]) - set(ranks)):
            raise ValueError(
                f"{what}: process_group has rank {rank} and not {_named(missing)} with which it shares images: all of "
                f"{_named(other['image'])} or none of them, or None for all ranks, would do"
            )
    members = tuple(rank for rank in ranks if said[rank]["copy"] == list(space.copy))
    same = [link for link in (space.link, *space.wider.values()) if sorted(link.ranks) == list(members)]
    link = same[0] if same else Link(members, space.link.timeout, device.type)
    space.wider[group] = link
    return link


def _told(ranks: tuple[int, ...], own: dict[str, Any], what: str, timeout: float) -> dict[int, dict[str, Any]]:
    """What each of ``ranks`` says of itself, by rank: through the store, as they may be no group yet."""
    store = distributed_c10d._get_default_store()
    number = next(_meetings.setdefault(ranks, itertools.count()))
    keys = {rank: f"tilewise/together/{'-'.join(map(str, ranks))}/{number}/{rank}" for rank in ranks}
    store.set(keys[dist.get_rank()], json.dumps(own))
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout))
    except RuntimeError as error:
        late = [rank for rank, key in keys.items() if not store.check([key])]
        raise PeerError(
            f"{what}: {_named(late)} of process_group did not come to it within {timeout:g} s: a group of the ranks "
            "that compute this model would do"
        ) from error
    return {rank: json.loads(store.get(key)) for rank, key in keys.items()}


def _named(ranks: Iterable[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)
