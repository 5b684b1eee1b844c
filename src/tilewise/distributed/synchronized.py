"""Ranks that take statistics together, over more images than one: found once for each process group, by all of them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tilewise.comm.agreement import named_ranks
from tilewise.comm.link import Link
from tilewise.comm.meeting import Meeting
from tilewise.distributed.shard import Space

__all__ = ["link_over"]


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
    advice = "a process_group of the ranks that compute this model would do"
    meeting = Meeting(ranks, f"the process_group of {what}", space.link.timeout, advice)
    said = meeting.tell({"image": sorted(space.link.ranks), "copy": space.copy})
    for rank, other in said.items():
        if missing := sorted(set(other["image"]) - set(ranks)):
            raise ValueError(
                f"{what}: process_group has rank {rank} and not {named_ranks(missing)} with which it shares images: "
                f"all of {named_ranks(other['image'])} or none of them, or None for all ranks, would do"
            )
    members = tuple(rank for rank in ranks if said[rank]["copy"] == list(space.copy))
    same = [link for link in (space.link, *space.wider.values()) if sorted(link.ranks) == list(members)]
    link = same[0] if same else Link(members, space.link.timeout, device.type)
    space.wider[group] = link
    return link
