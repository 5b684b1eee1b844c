"""How much of its cores a process shares with others, now or while something is measured.

Its cores are those that it may run on: a job that was given 16 of 64 is not slowed by what runs on the others. Linux
counts in ``/proc/stat`` how long each core was idle. What is left of a span's time, less what this process
computed itself, was used by others, by other machines on a shared host too. The counts are in hundredths of a second,
so that only a span of some length tells the share: shorter ones are taken together with those before them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from tilewise.machine.device import cpu_count

__all__ = ["Moment", "begin", "helped_by", "not_waiting", "others_now", "others_since"]

SYSTEM, PROCESSES = Path("/proc/stat"), Path("/proc")
LEAST_S = 0.25
"""Seconds of measuring that tell the share: counts of two cores are then exact to some hundredths."""
ROUGH_S = 0.05
"""Seconds that tell it roughly, where nothing may be waited for."""
FRESH_S = 10.0
"""Seconds for which a share is taken to be that of now."""


class Moment(NamedTuple):
    """The beginning of a span: the time, how long its cores were idle by then, and how long this process computed.

    In seconds; with it count the processes that help it.
    """

    at: float
    idle: float
    own: float


class _Span(NamedTuple):
    """A span that was looked at: its end, its length by all cores, and how much of it others used, in seconds."""

    end: float
    cores: float
    others: float


_impatient: ContextVar[bool] = ContextVar("impatient", default=False)
_helpers: list[Callable[[], list[int]]] = []
"""Each tells the ids of processes that work for this one."""
_spans: deque[_Span] = deque(maxlen=512)
"""What was looked at last, the newest last."""


def begin() -> Moment | None:
    """The beginning of a span for :func:`others_since`; ``None`` where the system does not tell."""
    try:
        with SYSTEM.open(encoding="ascii") as file:
            ticks = sum(int(words[4]) + int(words[5]) for words in _counts(file))  # idle, or waiting for a disk
    except (OSError, ValueError, IndexError):
        return None
    return Moment(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time() + _helpers_s())


def _counts(file: Iterable[str]) -> Iterator[list[str]]:
    """The words of the line of all cores, or of each line of a core where this process may run on some alone.

    Raises ``ValueError`` where the file does not have them all.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if len(cores) >= (os.cpu_count() or 1):
        cores = set()
    wanted = {f"cpu{core}" for core in cores} or {"cpu"}
    found = 0
    for words in map(str.split, file):
        if words and words[0] in wanted:
            yield words
            found += 1
            if found == len(wanted):
                return
    raise ValueError(f"{SYSTEM} has {found} of the lines {', '.join(sorted(wanted))}")


def others_since(moment: Moment | None) -> float | None:
    """The share of all cores, from 0 to 1, that other processes used since ``moment``; ``None`` where nothing tells.

    A span shorter than :data:`LEAST_S` is taken together with those before it. Where these are too short as well, this
    waits until they are not, once for many measurements. Within :func:`not_waiting` nothing tells then.
    """
    if moment is None or not _look(moment):
        return None
    if _impatient.get() and _length() < ROUGH_S:
        return None
    while not _impatient.get() and (missing := LEAST_S - _length()) > 0:
        after = begin()
        time.sleep(missing)
        if after is None or not _look(after):
            return None
    return _share()


@contextlib.contextmanager
def not_waiting() -> Iterator[None]:
    """Tell the load in this thread without ever waiting, for measurements that a program is not to notice.

    Spans of :data:`ROUGH_S` together are then enough; below that the load is unknown.
    """
    before = _impatient.set(True)
    try:
        yield
    finally:
        _impatient.reset(before)


@contextlib.contextmanager
def helped_by(processes: Callable[[], list[int]]) -> Iterator[None]:
    """Within the block what these processes compute counts as this process's own, and not as others' load."""
    _helpers.append(processes)
    try:
        yield
    finally:
        _helpers.remove(processes)


def _helpers_s() -> float:
    """Seconds that the processes which help this one have computed."""
    ticks = 0
    for number in {number for processes in _helpers for number in processes()}:
        with contextlib.suppress(OSError, ValueError, IndexError):
            # After the name, which is in brackets and may hold anything: the state, and ten numbers before the times.
            words = (PROCESSES / str(number) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0


def others_now() -> float | None:
    """The share of all cores that other processes use now, seen within the last seconds; ``None`` if nothing tells."""
    if not _spans or time.monotonic() - _spans[-1].end > FRESH_S:
        return others_since(begin())
    return _share()


def _look(moment: Moment) -> bool:
    """Keep the span from ``moment`` to now. Returns whether the system told."""
    now = begin()
    if now is None:
        return False
    cores = (now.at - moment.at) * cpu_count()
    others = cores - (now.idle - moment.idle) - (now.own - moment.own)
    _spans.append(_Span(now.at, cores, others))
    return True


def _recent() -> list[_Span]:
    """The newest spans that are long enough together, or all of the last seconds where they are not."""
    found: list[_Span] = []
    length, least = 0.0, LEAST_S * cpu_count()
    for span in reversed(_spans):
        if length >= least or _spans[-1].end - span.end > FRESH_S:
            break
        found.append(span)
        length += span.cores
    return found


def _length() -> float:
    """Seconds that the newest spans last together."""
    return sum(span.cores for span in _recent()) / cpu_count() + 1e-6


def _share() -> float:
    """The share of all cores that others used in the newest spans."""
    spans = _recent()
    others, cores = (sum(values) for values in ((s.others for s in spans), (s.cores for s in spans)))
    return min(max(others / max(cores, 1e-9), 0.0), 1.0)
