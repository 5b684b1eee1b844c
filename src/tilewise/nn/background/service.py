"""The thread of this process that plans in the background, and the turns that it gets between steps.

A thread, since what is measured must run on the device, and with the threads, of the program; another process would
measure beside training, and both would be disturbed. It runs only while the program, at a step's boundary, lends it the
baton. So training and measuring never overlap.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, Protocol, TypeVar

import torch

from tilewise.machine.device import is_capturing
from tilewise.machine.load import not_waiting
from tilewise.machine.turns import taking
from tilewise.nn.background.allowance import Allowance
from tilewise.nn.background.backwards import Backwards
from tilewise.nn.background.baton import Baton, Stopped
from tilewise.nn.background.open_graphs import OpenGraphs
from tilewise.nn.background.prepare import ignore_captures
from tilewise.nn.background.room import Room
from tilewise.nn.layers.call import disturbed
from tilewise.nn.layers.plan_table import planning

__all__ = ["Service", "Work", "held_off", "service", "tick", "without_turns"]

LAUNCHING_S = 2e-4
"""On a GPU, what a turn costs beside its own time: the host's lead over the device is lost."""
FIRST_STEPS = 3
"""Boundaries on a GPU before the first turn: by then a step has shown how much memory it needs."""
ENDING_S = 10.0
"""Seconds for the thread to end with the program. One that the interpreter ends could crash in a library."""
PATIENCE = 200
"""Steps of one model that wait for the comparison of another, which may have ended its training in the middle."""
LOOK_S = 0.5
"""Seconds of a turn within :meth:`Service.finish`."""

P = ParamSpec("P")
T = TypeVar("T")
Job = Callable[[], object]


class Work(Protocol):
    """What one model still has to plan."""

    share: float
    """The share of time that its planning may take."""

    @property
    def devices(self) -> Iterable[torch.device]:
        """The devices that it plans for."""
        ...

    @property
    def pending(self) -> int:
        """How many problems are still to be planned."""
        ...

    def next(self, room: Room | None) -> Job | None:
        """The next piece of work; ``None`` where nothing is left, or nothing fits into ``room`` at this moment."""
        ...


class Service:
    """The background planning of one process: works, in the order in which they were added, and one thread for all.

    It holds works weakly: each lives as long as its model.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.graphs, self.room = OpenGraphs(), Room()
        self.allowance = Allowance(0.0, clock)
        self._clock = clock
        self._baton = Baton(clock)
        self._backwards = Backwards()
        self.graphs.on_backward = self._backward_begins
        self._works: list[weakref.ref[Work]] = []
        self._thread: threading.Thread | None = None
        self._lending = threading.Lock()
        self._held_off = self._steps = 0
        self.turns = 0
        """How many turns there were: a step with one in it takes longer."""
        self._comparing: weakref.ref[object] | None = None
        self._refused = 0
        self._crowded = False
        """Whether works may take memory that training may need: nobody trains meanwhile."""

    def works(self) -> list[Work]:
        """The works of models that still exist."""
        return [work for work in (ref() for ref in self._works) if work is not None]

    def add(self, work: Work) -> None:
        """Plan ``work`` from now on, after those before it."""
        if work in self.works():
            return
        if not any(other.pending for other in self.works()):
            self.allowance.restart()
        self._works = [ref for ref in self._works if ref() is not None]
        self._works.append(weakref.ref(work))
        self._steps = 0

    def remove(self, work: Work) -> None:
        """Do no more of ``work``. A search that is under way goes on to its end, for wisdom."""
        self._works = [ref for ref in self._works if ref() not in (None, work)]

    @property
    def is_planning(self) -> bool:
        """Whether problems of any model are still to be planned."""
        return any(work.pending for work in self.works())

    def is_between_steps(self, devices: Iterable[torch.device]) -> bool:
        """Whether layers of models on ``devices`` may change at this moment."""
        return not self._held_off and not self._is_no_moment(devices)

    @property
    def has_graph(self) -> bool:
        """Whether a graph may still be differentiated, or is at this moment."""
        return self.graphs.any() or torch._C._current_graph_task_id() != -1

    def compare(self, asking: object) -> bool:
        """Whether ``asking`` may compare steps now: one at a time does, since others' switches would disturb it.

        One that was not heard of for long (its model is trained no more) has to let the next one go on.
        """
        comparing = None if self._comparing is None else self._comparing()
        if comparing is asking or comparing is None or self._refused >= PATIENCE:
            self._comparing, self._refused = weakref.ref(asking), 0
            return True
        self._refused += 1
        return False

    def compared(self, done: object) -> None:
        """``done`` compares no more."""
        if self._comparing is not None and self._comparing() is done:
            self._comparing = None

    @contextlib.contextmanager
    def held_off(self) -> Iterator[None]:
        """Give no turns within the block."""
        self._held_off += 1
        try:
            yield
        finally:
            self._held_off -= 1

    def boundary(self) -> None:
        """A step is over, or none has begun: give the thread a turn where one is due and nothing forbids it.

        Nothing happens while a graph may still be differentiated, within backward, while a CUDA graph is captured, and
        where something watches torch's operators.
        """
        if not self._works or self._held_off:
            return
        pending = [work for work in self.works() if work.pending]
        if not pending or self._is_no_moment(device for work in pending for device in work.devices):
            return
        self._steps += 1
        self._baton.slices.stepped()
        self.allowance.share = min(work.share for work in pending)
        seconds = self.allowance.seconds()
        if seconds > 0 and self._lending.acquire(blocking=False):
            try:
                self._turn(pending, seconds)
            finally:
                self._lending.release()

    def finish(self, work: Work, tell: Callable[[int], object]) -> None:
        """Do all of ``work`` now. ``tell`` hears how many problems are left. Ctrl-C keeps what was measured.

        Raises ``RuntimeError`` while a CUDA graph is captured or a graph may still be differentiated.
        """
        if self._is_no_moment(work.devices):
            raise RuntimeError(
                "tilewise.wait: layers change over between steps only, and a graph may still be differentiated or is "
                "being captured: call it after backward, or delete the outputs of the forward first"
            )
        if work not in self.works():
            raise RuntimeError("tilewise.wait: another process plans this model; call tilewise.optimize in this one")
        with self._lending, planning():
            self._crowded = True
            self._baton.slices.hurry()
            self._works.sort(key=lambda ref: ref() is not work)
            try:
                while work.pending:
                    tell(work.pending)
                    self._lend([work], LOOK_S)
                    self._baton.wait_while_apart(LOOK_S)
            finally:
                self._crowded = False
                self._baton.slices.take_time()
        tell(0)

    def stop(self) -> None:
        """End the thread. What it measured is in wisdom."""
        if self._thread is not None:
            self._baton.stop()
            self._thread.join(ENDING_S)
        self._thread = None

    def forget(self) -> None:
        """In a forked child: undo what the thread, which does not exist there, would undo at its end."""
        self._baton.slices.put_back()

    def _is_no_moment(self, devices: Iterable[torch.device]) -> bool:
        """Whether nothing may be measured or changed at this moment."""
        return self.has_graph or disturbed() or any(map(is_capturing, devices))

    def _turn(self, pending: list[Work], seconds: float) -> None:
        """Give the thread a turn of so many ``seconds``, after the device has done what is queued."""
        devices = {device for work in pending for device in work.devices if device.type == "cuda"}
        if devices and self._steps <= FIRST_STEPS:
            return
        lock = planning()
        if not lock.acquire(blocking=False):  # type: ignore[attr-defined]
            return  # another thread plans
        try:
            self._lend(pending, seconds)
        finally:
            lock.release()  # type: ignore[attr-defined]

    def _lend(self, works: list[Work], seconds: float) -> None:
        """Lend the baton, and account for the time."""
        devices = {device for work in works for device in work.devices if device.type == "cuda"}
        if self._baton.is_apart:
            return
        for device in devices:
            torch.cuda.synchronize(device)
        begin = self._clock()
        for device in devices:
            self.room.look(device)
        self._start()
        slices = self._baton.slices
        slices.share, slices.ahead = self.allowance.share, all(d.type == "cuda" for w in works for d in w.devices)
        self.turns += 1
        try:
            self._baton.lend(seconds)
        finally:
            for device in devices:
                torch.cuda.synchronize(device)
                self.room.begin(device)
            self.allowance.spend(self._clock() - begin + (LAUNCHING_S if devices else 0.0))

    def _start(self) -> None:
        """Start the thread where it does not run."""
        if self._thread is None or not self._thread.is_alive():
            self._baton = Baton(self._clock)
            if self._crowded:
                self._baton.slices.hurry()
            self._thread = threading.Thread(
                target=_plan, args=(self._baton, self._next), name="tilewise planning", daemon=True
            )
            self._thread.start()

    def _backward_begins(self) -> None:
        """A backward begins: on a GPU the program does without Python's lock while it launches that."""
        if self._baton.slices.is_cutting:
            self._backwards.begin(self._baton.slices.moment)

    def _next(self) -> Job | None:
        """The next piece of work of any model."""
        for work in self.works():
            job = work.next(None if self._crowded else self.room)
            if job is not None:
                return job
        return None


def _plan(baton: Baton, next_job: Callable[[], Job | None]) -> None:
    """The thread: do one piece of work after the other while it has the baton."""
    try:
        with taking(baton), not_waiting():
            baton.rest()
            # A program may record a CUDA graph at any time, which must not fail by what this thread does beside it.
            baton.keeps_to_turns = torch.cuda.is_available() and not ignore_captures()
            while True:
                job = next_job()
                if job is None:
                    baton.rest()
                    continue
                job()
                del job  # it may hold a model's plans
                baton.pause()
    except Stopped:
        pass
    finally:
        baton.end()


_service = Service()


def service() -> Service:
    """The background planning of this process."""
    return _service


def tick() -> None:
    """Say that a step is over, where the program's steps are not seen: of a compiled model, say.

    Planning in the background takes its turn here, if one is due. By itself it does so as a forward of a model begins
    that :func:`tilewise.optimize` was called on with ``wait=False``.

    >>> model = torch.nn.Conv2d(3, 8, 3)  # compiled, say
    >>> for _ in range(2):
    ...     model(torch.randn(2, 3, 16, 16)).sum().backward()
    ...     tilewise.background.tick()
    """
    _service.boundary()


def held_off() -> contextlib.AbstractContextManager[None]:
    """A context in which nothing is planned in the background: something is being captured, timed or compared.

    >>> with tilewise.background.held_off():
    ...     y = torch.nn.Conv2d(3, 8, 3)(torch.randn(2, 3, 16, 16))  # timed, say
    """
    return _service.held_off()


def without_turns(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator: nothing is planned in the background while ``function`` runs, which plans or measures itself."""

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        with held_off():
            return function(*args, **kwargs)

    return alone


def _leave_to_parent() -> None:
    """In a forked child, begin anew: the thread lives in the parent, which goes on planning."""
    global _service
    _service.forget()
    _service = Service()


def _at_exit() -> None:
    """End the thread of the process that exits."""
    _service.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
atexit.register(_at_exit)
