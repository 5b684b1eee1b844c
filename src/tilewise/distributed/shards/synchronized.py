"""Finds the ranks that compute statistics together over several images, once for each process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tilewise.comm.agreement import named_ranks
from tilewise.comm.link import Link
from tilewise.comm.meeting import Meeting
from tilewise.distributed.shards.shard import Space

__all__ = ["link_over"]


def link_over(space: Space, what: str, group: dist.ProcessGroup | None, device: torch.device) -> Link:
    """The link of the ranks of ``group`` over which statistics are summed; ``None`` stands for all ranks of the job.

    Where ranks hold copies, along the ``replicated`` dimensions of the mesh, the link has only those with the same
    place there as this rank, so that each element counts once. ``space`` keeps the link. It is the space's own link
    where that has the same ranks. Every rank of the group calls this at the same point of the program. Raises
    ``ValueError`` naming the layer ``what`` where the group has only some of the ranks of an image, and
    :class:`~tilewise.comm.link.PeerError` where some of its ranks do not call this.
    """
    known = space.wider.get(group)
    if known is not None:
        return known
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(f"{what}: process_group: rank {dist.get_rank()} is not in it; None, for all ranks, would do")
    ranks = tuple(sorted(dist.get_process_group_ranks(dist.group.WORLD if group is None else group)))
    advice = "a process_group of the ranks that compute this model would do"
    meeting = Meeting(ranks, f"the process_group of {what}", space.link.timeout, advice)
    told = meeting.tell({"image": sorted(space.link.ranks), "copy": space.copy})
    for rank, other in told.items():
        if missing := sorted(set(other["image"]) - set(ranks)):
            raise ValueError(
                f"{what}: process_group has rank {rank} and not {named_ranks(missing)} with which it shares images: "
                f"all of {named_ranks(other['image'])} or none of them, or None for all ranks, would do"
            )
    members = tuple(rank for rank in ranks if told[rank]["copy"] == list(space.copy))
    same = [link for link in (space.link, *space.wider.values()) if sorted(link.ranks) == list(members)]
    link = same[0] if same else Link(members, space.link.timeout, device.type)
    space.wider[group] = link
    return link
