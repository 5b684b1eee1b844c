"""Progress on stderr for planning that was not asked for by name, shown only where it takes a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from tilewise.machine import random_states

__all__ = ["LATE_S", "Late", "showing"]

LATE_S = 2.0
"""Seconds of planning before anything is shown."""


class Late:
    """A planner's progress callback that shows something only after :data:`LATE_S` seconds.

    On a terminal that is a bar, elsewhere one line when it begins and one when it is done: ``doing`` ("planning") or
    ``done`` ("planned") so many of ``what``.
    """

    def __init__(self, what: str = "problems", doing: str = "planning", done: str = "planned") -> None:
        self._what, self._doing, self._finished = what, doing, done
        self._start: float | None = None
        self._total = 0
        self._bar: Any = None
        self._shown = False

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Show the progress of the planning in this block, and end the display when the block ends, by an error too.

        A block within another one belongs to the outer one.
        """
        if self._start is not None:
            yield
            return
        self._start, self._total, self._shown = time.monotonic(), 0, False
        try:
            yield
        finally:
            start, self._start = self._start, None
            if self._bar is not None:
                self._bar.stop()
                self._bar = None
            if self._shown:
                sys.stderr.write(
                    f"tilewise: {self._finished} {self._total} {self._what} in {time.monotonic() - start:.0f} s\n"
                )

    def __call__(self, done: int, total: int, text: str) -> None:
        """Take note that ``done`` of ``total`` problems are planned and that ``text`` is next."""
        if self._start is None:
            return
        self._total = max(self._total, total)
        if not self._shown and time.monotonic() - self._start >= LATE_S:
            self._shown = True
            self._show(total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total, text=text)

    def _show(self, total: int) -> None:
        """Begin to show progress: a bar on a terminal, else one line."""
        with random_states.kept():  # rich draws a number from Python's random when it is imported
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(file=sys.stderr)
        if not console.is_terminal:
            sys.stderr.write(f"tilewise: {self._doing} {total} {self._what}\n")
            return
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[text]}"))
        self._bar = Progress(TextColumn("tilewise"), *columns, console=console, transient=True)
        self._bar.add_task(self._doing, total=total, text="")
        self._bar.start()


def showing(progress: object) -> AbstractContextManager[None]:
    """Show the progress of the planning in this block where ``progress`` is a :class:`Late`; do nothing elsewhere."""
    return progress.planning() if isinstance(progress, Late) else nullcontext()
