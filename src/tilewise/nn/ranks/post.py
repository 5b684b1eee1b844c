"""Messages between rank 0 and the other ranks of a program that goes on: nobody ever waits for one.

They lie in the store by which the ranks met (``torch.distributed``'s, or ``torchrun``'s). A collective would need every
rank at the same place, and one that has left, or is busy with something else, would hold up all others. A message is
looked for and read where it is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from tilewise.comm.agreement import several_ranks

__all__ = ["Post", "PostLost", "why_no_post"]

TIMEOUT_S = 20.0
"""Seconds for reading a message that is known to be there."""

T = TypeVar("T")


class PostLost(RuntimeError):
    """The store does not answer: the process that keeps it has ended, say."""

    def __init__(self, error: Exception) -> None:
        first = (str(error).splitlines() or [""])[0]
        super().__init__(f"the ranks' store does not answer, its process may have ended ({first:.120})")


class Post:
    """Numbered messages of one round, whose ``name`` is the same on all ranks: rank 0 tells, and the others answer.

    Every method makes one or two short requests to the store, except that rank 0 reads all answers at once. All raise
    :class:`PostLost` where the store does not answer.
    """

    def __init__(self, name: str) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

        def connected() -> Any:
            """The store, by a connection of this object's own: another thread may wait for something through its."""
            c10d: Any = dist.distributed_c10d  # there only where torch has it
            store = c10d._get_default_store()
            store.check(["tilewise"])  # where nobody keeps it any more, another connection would be tried for minutes
            own = store.clone()
            own.set_timeout(timedelta(seconds=TIMEOUT_S))
            return c10d.PrefixStore(f"tilewise/steps/{name}", own)

        self._store = _asked(connected)

    def tell(self, number: int, message: object) -> None:
        """Leave a message of rank 0 for all others."""
        _asked(lambda: self._store.set(f"told/{number}", json.dumps(message)))

    def told(self, number: int) -> Any:
        """Rank 0's message; ``None`` where it is not there yet."""
        key = f"told/{number}"
        return _asked(lambda: json.loads(self._store.get(key)) if self._store.check([key]) else None)

    def answer(self, number: int, message: object) -> None:
        """Leave this rank's answer for rank 0. The last but one, which was read by then, is removed.

        The last may not have been: a rank that leaves says so in place of its next answer, before it is asked.
        """

        def left() -> None:
            """The answer first, and its count after it: what is counted can be read."""
            self._store.set(self._key(number, self.rank), json.dumps(message))
            self._store.add(f"count/{number}", 1)
            if number > 1:
                self._store.delete_key(self._key(number - 2, self.rank))

        _asked(left)

    def answers(self, number: int) -> list[Any] | None:
        """The answers of all ranks but 0, in their order; ``None`` where one is missing yet."""
        if _asked(lambda: self._store.add(f"count/{number}", 0)) < self.ranks - 1:
            return None
        keys = [self._key(number, rank) for rank in range(1, self.ranks)]
        return [json.loads(text) for text in _asked(lambda: self._store.multi_get(keys))]

    def silent(self, number: int) -> list[int]:
        """The ranks whose answer is missing."""
        others = range(1, self.ranks)
        return _asked(lambda: [rank for rank in others if not self._store.check([self._key(number, rank)])])

    def _key(self, number: int, rank: int) -> str:
        """The store's key of an answer."""
        return f"answer/{number}/{rank}"


def why_no_post() -> str:
    """Why ranks cannot leave one another messages; empty where they can, and where there are no others."""
    if not several_ranks() or dist.distributed_c10d._get_default_store() is not None:
        return ""
    return "there are several ranks, which met without a store"


def _asked(request: Callable[[], T]) -> T:
    """What ``request()`` returns. Raises :class:`PostLost` in place of what a store raises."""
    try:
        return request()
    except RuntimeError as error:
        raise PostLost(error) from error
