"""Progress of commands on stderr: a bar where that is a terminal, and elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from tilewise.nn.progress import LATE_S, TimeLeft, in_words

__all__ = ["progress_bar", "time_bar"]

EVERY_S = 10.0
"""Seconds between two lines where stderr is no terminal."""


@contextmanager
def _lines(console: Console, told: Callable[[], str]) -> Iterator[None]:
    """Where stderr is no terminal, write what ``told`` gives as a line: after :data:`LATE_S` seconds, then regularly.

    A thread does that, since one piece of work may take minutes.
    """
    if console.is_terminal:
        yield
        return
    file, ended = sys.stderr, threading.Event()

    def tell() -> None:
        seconds = LATE_S
        while not ended.wait(seconds):
            with contextlib.suppress(OSError, ValueError):  # a stderr that was closed: nobody is there to be told
                file.write(f"tilewise: {told()}\n")
                file.flush()
            seconds = EVERY_S

    teller = threading.Thread(target=tell, name="tilewise progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


class _LeftColumn(ProgressColumn):
    """The time that is left at this moment."""

    def __init__(self, left: TimeLeft) -> None:
        super().__init__()
        self._left = left

    def render(self, task: Task) -> Text:
        """As text, such as "about 40 s left"."""
        return Text(in_words(self._left.seconds()))


@contextmanager
def progress_bar(title: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on stderr where that is a terminal, with the time that is left; it is gone when done.

    Elsewhere a line says the same after :data:`LATE_S` seconds, and every :data:`EVERY_S` from then on.

    Yields a function to call with the name of each next step. ``total`` is the number of steps. Where that is ``None``,
    as nobody can tell, the time that has passed is shown.
    """
    console = Console(file=sys.stderr)
    left = TimeLeft()
    columns: tuple[ProgressColumn, ...] = (SpinnerColumn(), TimeElapsedColumn())
    if total is not None:
        columns = (BarColumn(), MofNCompleteColumn(), _LeftColumn(left))
    begun, start, now = 0, time.monotonic(), ""

    def told() -> str:
        """All of it in one line, such as "planning: 3 of 14 done, now conv1 dgrad, about 40 s left"."""
        doing = f"now {now}" if now else "beginning"
        if total is None:
            return f"{title}: {doing}, {time.monotonic() - start:.0f} s so far"
        return f"{title}: {max(begun - 1, 0)} of {total} done, {doing}, {in_words(left.seconds())}"

    with (
        Progress(
            TextColumn("{task.description}"),
            *columns,
            TextColumn("{task.fields[text]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ) as bar,
        _lines(console, told),
    ):
        task = bar.add_task(title, total=total, text="")

        def step(text: str) -> None:
            nonlocal begun, now
            now = text
            left.begin(f"{begun}", begun, begun if total is None else total)
            bar.update(task, completed=begun, text=text)
            begun += 1

        yield step


class _AtMostColumn(ProgressColumn):
    """The time until a limit."""

    def __init__(self, end: float) -> None:
        super().__init__()
        self._end = end

    def render(self, task: Task) -> Text:
        """As text, such as "at most 12 s left"."""
        return Text(_at_most(self._end))


def _at_most(end: float) -> str:
    """The time until ``end`` by the monotonic clock, as text."""
    return f"at most {max(0, math.ceil(end - time.monotonic()))} s left"


@contextmanager
def time_bar(title: str, seconds: float) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on stderr where that is a terminal, of work that ends after ``seconds`` at the latest.

    Elsewhere lines say the same, as those of :func:`progress_bar`.

    Yields a function to call with the name of each next step.
    """
    begun, now = time.monotonic(), "beginning"
    console = Console(file=sys.stderr)
    with (
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            _AtMostColumn(begun + seconds),
            TextColumn("{task.fields[text]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ) as bar,
        _lines(console, lambda: f"{title}: {now}, {_at_most(begun + seconds)}"),
    ):
        task = bar.add_task(title, total=max(seconds, 1e-3), text="")

        def step(text: str) -> None:
            nonlocal now
            now = text
            bar.update(task, completed=time.monotonic() - begun, text=text)

        yield step
