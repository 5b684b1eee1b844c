"""Progress on stderr for planning that was not asked for by name, shown only where it takes a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from tilewise.machine import random_states

__all__ = ["LATE_S", "Late", "TimeLeft", "counted", "in_words", "showing"]

LATE_S = 2.0
"""Seconds of planning before anything is shown."""
EVERY_S = 30.0
"""Seconds between two lines where stderr is no terminal."""
USUAL_S = 2.0
"""Seconds that a problem is taken to need before any is planned."""


class TimeLeft:
    """Estimates how long the rest takes, from what is done so far and how much effort each piece is expected to take.

    ``efforts`` has the expected effort of each piece by its name, in any unit; what it does not name takes the mean.

    >>> seconds = iter([0.0, 30.0])
    >>> left = TimeLeft({"small": 1.0, "large": 3.0}, lambda: next(seconds))
    >>> left.begin("small", 0, 2)
    >>> left.begin("large", 1, 2)
    >>> round(left.seconds(30.0))
    32
    """

    def __init__(self, efforts: Mapping[str, float] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._efforts = dict(efforts or {})
        self._clock = clock
        self._mean = sum(self._efforts.values()) / len(self._efforts) if self._efforts else 1.0
        self._start: float | None = None
        self._now_s = 0.0
        """When the piece that is under way began, in seconds since the start."""
        self._done = self._under_way = self._total = 0.0
        """In pieces of mean effort: what is done, what is under way, and all."""
        self._names: list[str] = []

    def begin(self, name: str, done: int, total: int) -> None:
        """The piece called ``name`` begins, after ``done`` others of ``total``."""
        now = self._clock()
        if self._start is None:
            self._start = now
        self._now_s = now - self._start
        self._done = self._weight_of(self._names) + max(0, done - len(self._names))
        self._names = [*self._names[:done], name] if name else self._names[:done]
        self._under_way = self._weight(name) if name else 0.0
        unknown = max(0, total - len(self._efforts))
        self._total = max(sum(self._efforts.values()) / self._mean + unknown, self._done + self._under_way)
        if done >= total:
            self._done, self._under_way = self._total, 0.0

    def seconds(self, since_start: float | None = None) -> float:
        """Seconds until all is done, as expected now, or ``since_start`` seconds after the start."""
        elapsed = self._elapsed() if since_start is None else since_start
        each = (self._now_s + USUAL_S) / (self._done + 1.0)  # one piece more, of the usual length
        under_way = max(each * self._under_way - (elapsed - self._now_s), 0.0)
        return under_way + each * max(self._total - self._done - self._under_way, 0.0)

    def _elapsed(self) -> float:
        return 0.0 if self._start is None else self._clock() - self._start

    def _weight(self, name: str) -> float:
        return self._efforts.get(name, self._mean) / self._mean

    def _weight_of(self, names: list[str]) -> float:
        return sum(map(self._weight, names))


def in_words(seconds: float) -> str:
    """A time that is left, as people say it.

    >>> in_words(3), in_words(48), in_words(200), in_words(7500)
    ('a few seconds left', 'about 50 s left', 'about 4 min left', 'about 2.1 h left')
    """
    if seconds < 5:
        return "a few seconds left"
    if seconds < 90:
        return f"about {-(-seconds // 5) * 5:.0f} s left"
    if seconds < 90 * 60:
        return f"about {-(-seconds // 60):.0f} min left"
    return f"about {seconds / 3600:.1f} h left"


def counted(count: int, what: str) -> str:
    """A count with its noun, whose plural stands first in ``what``.

    >>> counted(1, "pairs of steps"), counted(2, "problems")
    ('1 pair of steps', '2 problems')
    """
    if count != 1:
        return f"{count} {what}"
    first, space, rest = what.partition(" ")
    return f"1 {first.removesuffix('s')}{space}{rest}"


class Late:
    """A planner's progress callback that shows something only after :data:`LATE_S` seconds.

    On a terminal that is a bar with the time that is left, elsewhere a line when it begins, one every
    :data:`EVERY_S` seconds and one when it is done: ``doing`` ("planning") or ``done`` ("planned") so many of ``what``.
    """

    def __init__(self, what: str = "problems", doing: str = "planning", done: str = "planned") -> None:
        self._what, self._doing, self._finished = what, doing, done
        self._start: float | None = None
        self._total = 0
        self._bar: Any = None
        self._shown = self._brief = False
        self._told_at = 0.0
        self._left = TimeLeft()

    @contextmanager
    def planning(self, efforts: Mapping[str, float] | None = None, *, brief: bool = False) -> Iterator[None]:
        """Show the progress of the planning in this block, and end the display when the block ends, by an error too.

        ``efforts`` are those of :class:`TimeLeft`, by what is told as text. A block within another one belongs to the
        outer one. With ``brief`` no line says that it begins or ends: the caller has said what is planned.
        """
        if self._start is not None:
            yield
            return
        self._start, self._total, self._shown = time.monotonic(), 0, False
        self._left, self._brief = TimeLeft(efforts), brief
        try:
            yield
        finally:
            start, self._start = self._start, None
            if self._bar is not None:
                self._bar.stop()
                self._bar = None
            if self._shown and not brief:
                what = counted(self._total, self._what)
                sys.stderr.write(f"tilewise: {self._finished} {what} in {time.monotonic() - start:.0f} s\n")

    def __call__(self, done: int, total: int, text: str) -> None:
        """Take note that ``done`` of ``total`` problems are planned and that ``text`` is next."""
        if self._start is None:
            return
        self._total = max(self._total, total)
        self._left.begin(text, done, total)
        now = time.monotonic()
        if not self._shown and now - self._start >= LATE_S:
            self._shown, self._told_at = True, now
            self._show(done, total)
        elif self._shown and self._bar is None and now - self._told_at >= EVERY_S:
            self._told_at = now
            left = in_words(self._left.seconds())
            sys.stderr.write(f"tilewise: {done} of {counted(total, self._what)} {self._finished}, {left}\n")
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total, text=text)

    def _show(self, done: int, total: int) -> None:
        """Begin to show progress: a bar on a terminal, else one line."""
        with random_states.kept():  # rich draws a number from Python's random when it is imported
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
            from rich.text import Text

        left = self._left

        class LeftColumn(ProgressColumn):
            """The time that is left at this moment."""

            def render(self, task: Any) -> Text:
                return Text(in_words(left.seconds()))

        console = Console(file=sys.stderr)
        if not console.is_terminal:
            if not self._brief:
                what = counted(total, self._what)
                sys.stderr.write(f"tilewise: {self._doing} {what}, {in_words(self._left.seconds())}\n")
            return
        columns = (BarColumn(), MofNCompleteColumn(), LeftColumn(), TextColumn("{task.fields[text]}"))
        self._bar = Progress(TextColumn("tilewise"), *columns, console=console, transient=True)
        self._bar.add_task(self._doing, total=total, completed=done, text="")
        self._bar.start()


def showing(progress: object, efforts: Mapping[str, float] | None = None) -> AbstractContextManager[None]:
    """Show the progress of the planning in this block where ``progress`` is a :class:`Late`; do nothing elsewhere.

    ``efforts`` are those of :class:`TimeLeft`.
    """
    return progress.planning(efforts) if isinstance(progress, Late) else nullcontext()
