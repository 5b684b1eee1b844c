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
from tilewise.comm.failure_detector import SETTLE_S, PeerError
from tilewise.comm.presence import here
from tilewise.comm.verdict import judge

__all__ = ["Meeting"]

LOOK_S = 0.25
"""How long a rank waits at a time for those that have not come, before it looks whether another failed."""

_numbers: dict[tuple[int, ...], itertools.count[int]] = {}


class Meeting:
    """An occasion on which each of ``ranks`` (global numbers) says something once. ``what`` names it in errors.

    Every one of the ranks makes it at the same point of the program, then calls :meth:`tell`, or :meth:`fail` where it
    cannot. A rank that says nothing within ``timeout`` seconds is an error on all others, whose text ends with
    ``advice``.
    """

    def __init__(self, ranks: Sequence[int], what: str, timeout: float, advice: str = "") -> None:
        self.ranks, self._what, self._timeout = tuple(sorted(ranks)), what, timeout
        self._advice = advice and f": {advice}"
        number = next(_numbers.setdefault(self.ranks, itertools.count()))
        name = f"tilewise/together/{'-'.join(map(str, self.ranks))}/{number}"
        self._keys = {rank: f"{name}/{rank}" for rank in self.ranks}

    def tell(self, own: object) -> dict[int, Any]:
        """Tell the other ranks ``own``, and return what each rank told, by rank; values are sent as JSON.

        Raises :class:`PeerError` where one of them failed, ended or did not come.
        """
        self._say({"said": own})
        return {rank: entry["said"] for rank, entry in self._heard().items()}

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this rank failed, and why."""
        me = dist.get_rank()
        causes = [(me, f"rank {me} failed in {self._what}: {type(error).__name__}: {error}")]
        self._say({"failed": error.causes if isinstance(error, PeerError) else causes})

    def _say(self, entry: dict[str, object]) -> None:
        """Store this rank's entry."""
        distributed_c10d._get_default_store().set(self._keys[dist.get_rank()], json.dumps(entry))

    def _heard(self) -> dict[int, dict[str, Any]]:
        """Every rank's entry, by rank. Raises :class:`PeerError`."""
        store, deadline = distributed_c10d._get_default_store(), time.monotonic() + self._timeout
        gone_since = None
        while True:
            late = self._wait(store, min(LOOK_S, max(deadline - time.monotonic(), 0.001)))
            entries = {rank: json.loads(store.get(key)) for rank, key in self._keys.items() if rank not in late}
            causes = dict(cause for entry in entries.values() for cause in entry.get("failed", ()))
            if not causes:
                gone_since = gone_since or self._gone_since(late)
                causes = self._causes(late, gone_since)
            if causes:
                # Ranks of other images have no connection on which they would hear of it.
                self._say({"failed": list(causes.items())})
                raise PeerError(
                    f"{'; '.join(causes.values())} (this rank waited in {self._what})", tuple(causes.items())
                )
            if not late:
                return entries
            if time.monotonic() >= deadline:
                within = f"did not come to it within {self._timeout:g} s"
                text = f"{self._what}: {named_ranks(late)} {within}{self._advice}"
                raise PeerError(text, [(rank, f"{self._what}: rank {rank} {within}") for rank in late])

    def _gone_since(self, late: Sequence[int]) -> float | None:
        """Now, where a process of the ranks ``late`` is gone: it comes to nothing any more."""
        _, gone = here().news(late)
        return time.monotonic() if gone else None

    def _causes(self, late: Sequence[int], gone_since: float | None) -> dict[int, str]:
        """Which ranks failed, where one of the ranks ``late`` is gone, and in what way; none while that is not certain.

        A rank that is gone may have ended because of another, and has said so then.
        """
        if gone_since is None:
            return {}
        heard, gone = here().news(rank for rank in self.ranks if rank != dist.get_rank())
        verdict = judge(heard, gone, late, self._timeout)
        certain = verdict.sure or time.monotonic() > gone_since + SETTLE_S
        return dict(verdict.causes) if certain else {}

    def _wait(self, store: Any, seconds: float) -> list[int]:
        """The ranks without an entry after so many ``seconds``."""
        try:
            store.wait(list(self._keys.values()), timedelta(seconds=seconds))
        except RuntimeError:
            return [rank for rank, key in self._keys.items() if not store.check([key])]
        return []
