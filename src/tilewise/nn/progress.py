"""Progress on stderr for planning that nobody asked for by name, and only where it takes long enough to be noticed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from tilewise import random_states

__all__ = ["LATE_S", "Late", "showing"]

LATE_S = 2.0
"""Seconds of planning before anything is shown."""


class Late:
    """A planner's progress callback: a bar on a terminal, elsewhere one line when it begins and one when it is done."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._total = 0
        self._bar: Any = None
        self._shown = False

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Planning goes on within; what is shown is gone, or told to be done, however it ends.

        Within another such block it is part of that.
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
                sys.stderr.write(f"tilewise: planned {self._total} problems in {time.monotonic() - start:.0f} s\n")

    def __call__(self, done: int, total: int, text: str) -> None:
        if self._start is None:
            return
        self._total = max(self._total, total)
        if not self._shown and time.monotonic() - self._start >= LATE_S:
            self._shown = True
            self._show(total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total, text=text)

    def _show(self, total: int) -> None:
        with random_states.kept():  # rich draws a number from Python's random when it is imported
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(file=sys.stderr)
        if not console.is_terminal:
            sys.stderr.write(f"tilewise: planning {total} problems\n")
            return
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[text]}"))
        self._bar = Progress(TextColumn("tilewise"), *columns, console=console, transient=True)
        self._bar.add_task("planning", total=total, text="")
        self._bar.start()


def showing(progress: object) -> AbstractContextManager[None]:
    """Planning goes on within; ``progress`` is a planner's, and shows of it where it is a :class:`Late`."""
    return progress.planning() if isinstance(progress, Late) else nullcontext()
