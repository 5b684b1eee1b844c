"""Recorded calls that are planned in the background, between the steps of a program that stays as it is."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewise.comm.agreement import several_ranks
from tilewise.machine.device import torch_device
from tilewise.nn.background.later import LaterTable
from tilewise.nn.background.room import Room
from tilewise.nn.background.service import Job, service
from tilewise.nn.script.recorder import Recorder
from tilewise.problems.base import Problem

__all__ = ["CallsToPlan", "LaterRecorder"]


class LaterRecorder(Recorder, LaterTable):
    """As :class:`Recorder`, but when a step is over, what was recorded is planned in the background."""

    def plan(self, problems: Iterable[Problem], deterministic: bool) -> None:
        """Take what wisdom has, and have the rest planned later, except where nothing is measured anyway."""
        asked = list(problems)
        if several_ranks() or self.options.rigor == "wisdom_only":
            super(LaterTable, self).plan(asked, deterministic)
            return
        self.take_known(asked, deterministic)
        self.ask(asked, deterministic)

    def ready(self, problems: Iterable[Problem], deterministic: bool, device: torch.device) -> bool:
        """As :meth:`Recorder.ready`; ``False``, and nothing to record, where all that is missing is being planned."""
        required = tuple(problems)
        missing = self.missing(required, deterministic)
        if missing and all((problem, deterministic) in self._queue for problem in missing):
            return False
        return super().ready(required, deterministic, device)


class CallsToPlan:
    """The work of a session: the problems of its recorded calls, for at most ``share`` of the time."""

    def __init__(self, table: LaterRecorder, share: float) -> None:
        self.table, self.share = table, share
        table.asked = lambda: service().add(self)

    @property
    def pending(self) -> int:
        """How many problems are still to be planned."""
        return self.table.pending

    @property
    def devices(self) -> set[torch.device]:
        """The devices of what is still to be planned."""
        return {torch_device(device) for device in {problem.device for problem, _ in list(self.table._queue)}}

    def next(self, room: Room | None) -> Job | None:
        """What plans the next problem; ``None`` where there is none, or none fits into ``room``."""
        entry = self.table.next(room)
        if entry is None:
            return self.table.wait if self.table.is_waiting else None
        return lambda: self.table.advance(*entry)
