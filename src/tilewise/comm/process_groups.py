"""The process groups of ranks that share one image: how they are made, and how they are broken so that waiters wake."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["LAST_TAG", "ProcessGroups"]

LAST_TAG = 2**30
"""The tag of the receive that breaks a group. Those of exchanges are below it."""
NCCL_LATER_S = 60.0
"""Seconds by which NCCL's time limit is later than ours: where it runs out of time it ends the process."""


class ProcessGroups:
    """Process groups of ``ranks`` (global numbers, in the order of their index): one for halos and one for sums.

    Tensors on a GPU go by NCCL, whose groups carry nothing else, so there is a third one by Gloo. Operations that take
    longer than ``timeout`` seconds fail.
    """

    def __init__(self, ranks: Sequence[int], timeout: float, on_gpu: bool) -> None:
        self._ranks, self._timeout, self._on_gpu = tuple(ranks), timeout, on_gpu
        self.places = tuple(sorted(ranks).index(rank) for rank in ranks)
        """Of each rank, by index, its number in the groups."""
        self._others = [p for rank, p in zip(ranks, self.places, strict=True) if rank != dist.get_rank()]
        self._groups: list[dist.ProcessGroup] = []

    def make(self) -> None:
        """Make the groups, which all ranks do at once. Raises ``RuntimeError`` where one does not come."""
        for backend in (None, None, "gloo")[: 3 if self._on_gpu else 2]:
            self._groups.append(self._new_group(backend))

    def _new_group(self, backend: str | None) -> dist.ProcessGroup:
        """One further process group. Raises ``RuntimeError`` where a rank does not come."""
        late = self._on_gpu and backend is None
        limit = timedelta(seconds=self._timeout + (NCCL_LATER_S if late else 0))
        group = dist.new_group(list(self._ranks), timeout=limit, backend=backend, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group

    @property
    def halos(self) -> dist.ProcessGroup:
        """The group of exchanges."""
        return self._groups[0]

    @property
    def sums(self) -> dist.ProcessGroup:
        """The group of sums."""
        return self._groups[1]

    @property
    def control(self) -> dist.ProcessGroup:
        """The group of what is not on the device: by Gloo."""
        return self._groups[-1]

    def abort(self) -> None:
        """End every connection, so that ranks that wait at the other end wake. Groups may be made in part."""
        for group in self._groups:
            if self._on_gpu and group is not self._groups[-1]:
                group.abort()
            elif self._others:
                # Gloo has no abort: a receive that runs out of time ends the connections of its group.
                with contextlib.suppress(RuntimeError):
                    nothing = torch.empty(1, dtype=torch.float32, device="cpu")
                    work = dist.irecv(nothing, group=group, tag=LAST_TAG, group_src=self._others[0])
                    assert work is not None
                    work.wait(timedelta(milliseconds=1))
