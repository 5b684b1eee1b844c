"""Recorded calls that are planned in the background, between the steps of a program that stays as it is."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from tilewise.machine.device import torch_device
from tilewise.nn.background.later import LaterTable
from tilewise.nn.background.room import Room
from tilewise.nn.background.service import Job, service
from tilewise.nn.script.recorder import Recorder
from tilewise.problems.base import Problem

__all__ = ["CallsToPlan", "LaterRecorder"]

MOST_BETWEEN = 4096
"""Calls without the one by which steps are told before another one takes its place."""


class LaterRecorder(Recorder, LaterTable):
    """As :class:`Recorder`, but when a step is over, what was recorded is planned in the background."""

    def plan(self, problems: Iterable[Problem], deterministic: bool) -> None:
        """Take what wisdom has, and have the rest planned later."""
        asked = list(problems)
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
        self._threads = {threading.get_ident(), threading.main_thread().ident}
        self._first: int | None = None
        self._since = 0
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
        return None if entry is None else lambda: self.table.plan_one(*entry)

    def called(self, x: torch.Tensor, weight: object) -> None:
        """A convolution is called: where a step may begin with it, planning takes its turn.

        With gradients that is a call outside of any graph, else one of the weight that was seen first.
        """
        if threading.get_ident() not in self._threads:
            return
        if torch.is_grad_enabled():
            if getattr(x, "grad_fn", None) is None:
                service().boundary()
            return
        if self._first is None or self._since > MOST_BETWEEN:
            self._first = id(weight)
        self._since += 1
        if id(weight) == self._first:
            self._since = 0
            service().boundary()
