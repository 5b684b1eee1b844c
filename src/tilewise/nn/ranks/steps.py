"""Steps that all ranks run and time at once: the slowest rank's time counts, and rank 0 decides for all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tilewise.comm.agreement import agree, gather, several_ranks

__all__ = ["ALONE", "Ranks", "StepFailed", "all_ranks"]

TELLING_S = 20.0
"""Seconds in which a rank whose step failed tells the others. They may wait for it in the middle of a step for ever."""


class StepFailed(RuntimeError):
    """The step of another rank raised ``said``, a type and its text; ``memory`` tells that it ran out of memory."""

    def __init__(self, rank: int, said: str, *, memory: bool) -> None:
        super().__init__(f"rank {rank}'s step raised {said}")
        self.memory = memory


class Ranks(Protocol):
    """The ranks that time steps together."""

    @property
    def leads(self) -> bool:
        """Whether this rank decides and speaks for all."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def any(self, text: str) -> str:
        """The first text of any rank that is not empty."""
        ...

    def agree(self, text: str, what: str) -> None:
        """Raise ``RankMismatch`` on all ranks where any two have different texts."""
        ...

    def first(self, value: Any) -> Any:
        """The ``value`` of the rank that leads, which travels as JSON."""
        ...

    def slowest(self, run: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """Run ``run`` on all ranks at once; the largest of each number that it returns.

        Raises what ``run`` raises here, and :class:`StepFailed` where it raised on another rank.
        """
        ...


class Alone:
    """The one rank of a program that has no others."""

    leads, count = True, 1

    def any(self, text: str) -> str:
        """As :meth:`Ranks.any`."""
        return text

    def agree(self, text: str, what: str) -> None:
        """As :meth:`Ranks.agree`."""

    def first(self, value: Any) -> Any:
        """As :meth:`Ranks.first`."""
        return value

    def slowest(self, run: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """As :meth:`Ranks.slowest`."""
        return run()


ALONE: Ranks = Alone()


class Together:
    """All ranks of ``torch.distributed``, which tell each other their times through ``group``, by Gloo.

    The group is one of their own: a step that fails between two collectives leaves those of the program out of step.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.leads, self.count = dist.get_rank() == 0, dist.get_world_size()

    def any(self, text: str) -> str:
        """As :meth:`Ranks.any`."""
        return next((said for said in gather(text, self._group) if said), "")

    def agree(self, text: str, what: str) -> None:
        """As :meth:`Ranks.agree`."""
        agree(text, what)

    def first(self, value: Any) -> Any:
        """As :meth:`Ranks.first`."""
        return gather(value if self.leads else None, self._group)[0]

    def slowest(self, run: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """As :meth:`Ranks.slowest`. All begin at a barrier."""
        dist.barrier(self._group)
        try:
            values = run()
        except BaseException as error:  # the others wait, whatever it is
            self._tell(error)
            raise
        answers = gather({"values": values}, self._group)
        for rank, answer in enumerate(answers):
            if "failed" in answer:
                raise StepFailed(rank, answer["failed"], memory=answer["memory"])
        return tuple(max(column) for column in zip(*(answer["values"] for answer in answers), strict=True))

    def _tell(self, error: BaseException) -> None:
        """Tell the others that the step failed here, as far as they listen."""
        lines = str(error).splitlines() or [""]
        memory = isinstance(error, torch.OutOfMemoryError)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TELLING_S), self._group)
        with contextlib.suppress(RuntimeError):
            gather({"failed": f"{type(error).__name__}: {lines[0]}", "memory": memory}, self._group)


@contextlib.contextmanager
def all_ranks() -> Iterator[Ranks]:
    """The ranks that time steps together, all of which enter the context at once; without others, this one alone."""
    if not several_ranks():
        yield ALONE
        return
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    try:
        yield Together(group)
    finally:
        dist.destroy_process_group(group)
