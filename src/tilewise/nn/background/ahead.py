"""Kernels of problems that are planned in the background: compiled for many ahead while training and planning go on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from tilewise.kernels.building.target import architecture_of
from tilewise.kernels.building.upcoming import Upcoming, upcoming
from tilewise.machine.device import torch_device
from tilewise.machine.turns import wait_apart
from tilewise.planner import Options, Planner
from tilewise.planner.order import ROUNDS
from tilewise.planner.planner import Lacking, best_if_compiled
from tilewise.problems.base import Problem
from tilewise.solvers.common.triton_run import has_triton

__all__ = ["Ahead", "Entry"]

T = TypeVar("T")
Entry = tuple[Problem, bool]
"""A problem, and torch's deterministic flag under which it is planned."""
WAIT_S = 1.0
"""Most seconds of waiting for workers until it is looked what else there is to do."""


class Ahead:
    """Says which problem is planned next: one whose kernels are compiled, while workers compile those of others.

    A problem is begun by measuring what needs no kernel, which says which kernels are worth it. As in the foreground
    (:func:`tilewise.planner.order.ready_first`), but in any order, and with problems that come and go.
    """

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._kernels: Upcoming | None = None
        self._in_haste = True
        """Whether nothing is planned yet. A first plan is waited for: to begin other problems would put it off."""
        self._begun: dict[Entry, int] = {}
        """Problems that wait for kernels, and how often each was begun."""

    def pick(self, entries: Iterable[Entry], fits: Callable[[Entry], bool]) -> Entry | None:
        """The next of ``entries``: the first whose kernels are there, else one to be begun; only one that ``fits``.

        ``None`` where all wait for kernels, or too many.
        """
        kernels, unbegun = self._kernels, None
        for entry in entries:
            if kernels is None:
                if fits(entry):
                    return entry
            elif entry in self._begun:
                if kernels.is_ready(_name(entry)) and fits(entry):
                    return entry
            elif unbegun is None and fits(entry):
                unbegun = entry
        waits = self._in_haste and self._begun
        return None if kernels is None or kernels.has_enough or waits else unbegun

    @property
    def is_waiting(self) -> bool:
        """Whether kernels of problems that were begun are being compiled."""
        return bool(self._begun)

    def planned(self, entry: Entry, planner: Planner, options: Options, plan: Callable[[], T]) -> T | None:
        """What ``plan()`` returns, which plans a problem by ``planner`` within ``options``.

        ``None`` where kernels are compiled first.
        """
        rounds = self._begun.pop(entry, 0)
        own = type(planner) is Planner and options.rigor == "measure"
        kernels = self._opened(entry[0]) if own and rounds < ROUNDS else None
        if kernels is None:
            return plan()
        usual, planner.best = planner.best, best_if_compiled
        try:
            return plan()
        except Lacking as lacking:
            if kernels.add_jobs(_name(entry), lacking.jobs):
                self._begun[entry] = rounds + 1
                return None
        finally:
            planner.best = usual
        return plan()  # with what there is: workers cannot do more

    def _opened(self, problem: Problem) -> Upcoming | None:
        """What compiles kernels for ``problem``; ``None`` where nothing does."""
        if problem.device_type != "cuda" or not has_triton():
            return None
        if self._kernels is None:
            self._kernels = self._open.enter_context(upcoming(architecture_of(torch_device(problem.device))))
        return self._kernels

    def wait(self) -> None:
        """Wait a moment for workers, while the program goes on."""
        kernels = self._kernels
        if kernels is None:
            return
        before, until = kernels.count_done, time.monotonic() + WAIT_S
        wait_apart(lambda: kernels.count_done != before or time.monotonic() > until)

    def forget(self, entry: Entry) -> None:
        """A problem is decided, or given up."""
        self._in_haste = False
        self._begun.pop(entry, None)

    def close(self) -> None:
        """Compile no more."""
        self._kernels = None
        self._begun.clear()
        self._open.close()


def _name(entry: Entry) -> str:
    """By what name the kernels of a problem are known."""
    return f"{entry[0].key} {entry[1]}"
