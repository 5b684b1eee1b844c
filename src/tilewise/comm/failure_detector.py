"""What the ranks of one link say of failures, and which of them failed by all that is known."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from tilewise.comm import presence
from tilewise.comm.agreement import named_ranks
from tilewise.comm.verdict import Cause, Verdict, judge

__all__ = ["FailureDetector", "PeerError"]

SETTLE_S = 1.5
"""How long a rank that lost another listens to the rest, where it is not known before who failed."""
LOOK_S = 0.01
AFTERMATH_S = 0.3
"""How long an error that may come of another rank's end waits for that to show."""
LONGEST = 8000
"""Characters of an error's text that others hear."""


class PeerError(RuntimeError):
    """Another rank failed, ended, or did not answer in time; the message says which, why, and where this one waited.

    ``causes`` has the ranks that failed, each with what happened to it in words.

    In each of several ranks, one of which may fail:

    >>> try:  # doctest: +SKIP
    ...     y = parallel(parallel.scatter(x))
    ... except tilewise.distributed.PeerError as error:
    ...     print(error.ranks, error)
    """

    def __init__(self, text: str, causes: Sequence[Cause] = ()) -> None:
        super().__init__(text)
        self.causes = tuple(causes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that failed, without those that stopped only because of others."""
        return tuple(rank for rank, _ in self.causes)


class FailureDetector:
    """Tells the other ones of ``ranks`` (global numbers) why this rank stops, and finds out why others did.

    It does so over the connections of :mod:`tilewise.comm.presence`, which last when everything else breaks. ``key``
    names the link that is concerned, and ``timeout`` is how many seconds a rank may take to answer.
    """

    def __init__(self, ranks: Sequence[int], key: str, timeout: float) -> None:
        self._ranks, self._key, self._timeout = tuple(ranks), key, timeout
        self._this_rank = dist.get_rank()
        self._others = [rank for rank in ranks if rank != self._this_rank]
        self._presence = presence.here()

    def meet(self) -> None:
        """Connect with the other ranks. Raises :class:`PeerError` where one does not come, and tells the rest."""
        try:
            self._presence.meet(self._ranks, self._key, self._timeout)
        except presence.NotThere as error:
            became = "ended, or could not be reached," if error.came else "did not come"
            causes = [(rank, f"rank {rank} {became} within {self._timeout:g} s") for rank in error.ranks]
            text = f"{'; '.join(text for _, text in causes)} to make connections"
            self._say({"kind": "heard", "causes": causes})
            raise PeerError(text, causes) from error

    def tell_failed(self, what: str, error: BaseException) -> PeerError:
        """Tell the other ranks that this one fails in ``what``. Returns the error that they raise.

        A :class:`PeerError` is passed on with its own causes.
        """
        if isinstance(error, PeerError):
            self._say({"kind": "heard", "causes": error.causes})
            return PeerError(str(error), error.causes)
        error_text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        text = f"rank {self._this_rank} failed in {what}: {error_text[:LONGEST]}"
        self._say({"kind": "failed", "text": text, "lost": self._lost_before(error)})
        return PeerError(text, [(self._this_rank, text)])

    def tell_waited(self, what: str, awaited: Sequence[int]) -> None:
        """Tell the other ranks that this one waited in vain, in ``what``, for those in ``awaited``."""
        self._say({"kind": "waited", "for": awaited, "text": what})

    def diagnose(self, what: str, awaited: Sequence[int], error: BaseException) -> PeerError:
        """The error for a wait in ``what`` that ended in ``error``: which ranks failed, as far as is known."""
        causes = self._verdict(awaited, SETTLE_S).causes
        own = f"this rank waited in {what}"
        if causes:
            return PeerError(f"{'; '.join(text for _, text in causes)} ({own})", causes)
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        skipped = "ranks wait for each other, as where one skips a layer"
        return PeerError(f"{skipped}: {own} for {named_ranks(awaited)}, {first_line}")

    def stopped(self) -> int | None:
        """A rank that said it stopped, or whose process went before its program ended; else ``None``."""
        messages, gone = self._news()
        for rank, entries in messages.items():
            kinds = {entry.get("kind") for entry in entries}
            if kinds - {"ended"} or (rank in gone and not kinds):
                return rank
        return None

    def _say(self, entry: dict[str, Any]) -> None:
        """Send an entry, as :func:`~tilewise.comm.verdict.judge` reads it, to the other ranks, marked with the link."""
        self._presence.say(self._others, {"link": self._key, **entry})

    def _lost_before(self, error: BaseException) -> list[int]:
        """Ranks that were gone before ``error`` and may have caused it, so that they failed and not this rank."""
        # A connection of the user's own that breaks is a RuntimeError.
        verdict = self._verdict((), AFTERMATH_S if isinstance(error, RuntimeError) else 0)
        return [rank for rank, _ in verdict.causes if verdict.sure]

    def _verdict(self, awaited: Sequence[int], seconds: float) -> Verdict:
        """Which ranks failed: as soon as that is certain, else by what is known after ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            verdict = judge(*self._news(), awaited, self._timeout)
            if verdict.sure or time.monotonic() >= deadline:
                return verdict
            time.sleep(LOOK_S)

    def _news(self) -> tuple[dict[int, list[dict[str, Any]]], set[int]]:
        """What the other ranks said about this link or their end, and the set of ranks whose processes are gone."""
        heard, gone = self._presence.news(self._others)
        return {r: [e for e in told if e.get("link", self._key) == self._key] for r, told in heard.items()}, gone
