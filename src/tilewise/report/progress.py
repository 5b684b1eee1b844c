"""Progress of commands on stderr, where that is a terminal."""

from __future__ import annotations

import math
import sys
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

from tilewise.nn.progress import TimeLeft, in_words

__all__ = ["progress_bar", "time_bar"]


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

    Yields a function to call with the name of each next step. ``total`` is the number of steps. Where that is ``None``,
    as nobody can tell, the time that has passed is shown.
    """
    console = Console(file=sys.stderr)
    left = TimeLeft()
    columns: tuple[ProgressColumn, ...] = (SpinnerColumn(), TimeElapsedColumn())
    if total is not None:
        columns = (BarColumn(), MofNCompleteColumn(), _LeftColumn(left))
    with Progress(
        TextColumn("{task.description}"),
        *columns,
        TextColumn("{task.fields[text]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(title, total=total, text="")
        begun = 0

        def step(text: str) -> None:
            nonlocal begun
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
        return Text(f"at most {max(0, math.ceil(self._end - time.monotonic()))} s left")


@contextmanager
def time_bar(title: str, seconds: float) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on stderr where that is a terminal, of work that ends after ``seconds`` at the latest.

    Yields a function to call with the name of each next step.
    """
    begun = time.monotonic()
    console = Console(file=sys.stderr)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        _AtMostColumn(begun + seconds),
        TextColumn("{task.fields[text]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(title, total=max(seconds, 1e-3), text="")
        yield lambda text: bar.update(task, completed=time.monotonic() - begun, text=text)
