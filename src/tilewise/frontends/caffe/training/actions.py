"""What a training does when it gets Ctrl-C or its terminal hangs up: stop with a snapshot, only snapshot, or go on."""

from __future__ import annotations

import enum
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

__all__ = ["Action", "SignalActions"]


class Action(enum.Enum):
    """What the solver is asked for between two iterations."""

    NONE = "none"
    STOP = "stop"
    SNAPSHOT = "snapshot"


class SignalActions:
    """Within its block Ctrl-C (SIGINT) and a hang-up (SIGHUP) are remembered until the solver asks for them.

    ``sigint`` and ``sighup`` are ``"stop"``, ``"snapshot"`` or ``"none"``, as Caffe's ``-sigint_effect`` and
    ``-sighup_effect``; with ``"none"`` the signal is ignored. Signals belong to a process's main thread, so that in any
    other thread nothing is changed. Raises ``ValueError`` for another effect.

    ::

        with SignalActions(sigint="stop", sighup="snapshot") as actions:
            solver.solve(actions.requested)
    """

    def __init__(self, sigint: str = "stop", sighup: str = "snapshot") -> None:
        effects = [action.value for action in Action]
        for name, effect in (("sigint_effect", sigint), ("sighup_effect", sighup)):
            if effect not in effects:
                raise ValueError(f"{name}={effect!r}: {', '.join(effects)} would do")
        # Where both have arrived the hang-up is answered first, as in Caffe.
        self._effects = {signal.SIGHUP: Action(sighup), signal.SIGINT: Action(sigint)}
        self._arrived: set[int] = set()
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._remember) for each in self._effects}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)  # type: ignore[arg-type]
        self._before = {}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._arrived.add(number)

    def requested(self) -> Action:
        """What a signal asks for that has arrived since this was last called."""
        for each, action in self._effects.items():
            if each in self._arrived:
                self._arrived.discard(each)
                return action
        return Action.NONE
