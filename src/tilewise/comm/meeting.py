"""Ranks that tell each other something before, or without, a process group: through the store they started from."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tilewise.comm.agreement import named_ranks
from tilewise.comm.link import PeerError

__all__ = ["Meeting"]

LOOK_S = 0.25
"""How long a rank waits at a time for those that have not come, before it looks whether another failed."""

_numbers: dict[tuple[int, ...], itertools.count[int]] = {}


class Meeting:
    """What each of ``ranks`` (global numbers) says once; ``what`` names the occasion in errors.

    Every one of them makes it at the same point of the program, then calls :meth:`tell`, or :meth:`fail` where it
    cannot. One that says nothing within ``timeout`` seconds is an error on all others, with ``advice`` in it.
    """

    def __init__(self, ranks: Sequence[int], what: str, timeout: float, advice: str = "") -> None:
        self.ranks, self._what, self._timeout = tuple(sorted(ranks)), what, timeout
        self._advice = advice and f": {advice}"
        number = next(_numbers.setdefault(self.ranks, itertools.count()))
        name = f"tilewise/together/{'-'.join(map(str, self.ranks))}/{number}"
        self._keys = {rank: f"{name}/{rank}" for rank in self.ranks}

    def tell(self, own: object) -> dict[int, Any]:
        """Say ``own``, and what each rank says, by rank, read as JSON.

        Raises :class:`PeerError` where one of them failed or did not come.
        """
        self._say({"said": own})
        entries = self._heard()
        return {rank: entry["said"] for rank, entry in entries.items()}

    def fail(self, error: BaseException) -> None:
        """Have the others hear that this rank cannot tell anything."""
        self._say({"failed": f"{type(error).__name__}: {error}"})

    def _say(self, entry: dict[str, object]) -> None:
        distributed_c10d._get_default_store().set(self._keys[dist.get_rank()], json.dumps(entry))

    def _heard(self) -> dict[int, dict[str, Any]]:
        store, deadline = distributed_c10d._get_default_store(), time.monotonic() + self._timeout
        while True:
            late = self._wait(store, min(LOOK_S, max(deadline - time.monotonic(), 0.001)))
            found = {rank: json.loads(store.get(key)) for rank, key in self._keys.items() if rank not in late}
            if failed := {rank: entry["failed"] for rank, entry in found.items() if "failed" in entry}:
                rank = next(iter(failed))
                raise PeerError(f"rank {rank} failed in {self._what}: {failed[rank]}")
            if not late:
                return found
            if time.monotonic() >= deadline:
                within = f"did not come to it within {self._timeout:g} s"
                raise PeerError(f"{self._what}: {named_ranks(late)} {within}{self._advice}")

    def _wait(self, store: Any, seconds: float) -> list[int]:
        """The ranks that have said nothing after so long."""
        try:
            store.wait(list(self._keys.values()), timedelta(seconds=seconds))
        except RuntimeError:
            return [rank for rank, key in self._keys.items() if not store.check([key])]
        return []
