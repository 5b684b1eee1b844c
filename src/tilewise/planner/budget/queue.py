"""A step as a queue of launches: what it takes, and which of several options make it the fastest.

The host launches operators one after the other. A device works them off in order, each as soon as it is launched and
the one before it is done. So a step is over when both are: an option that saves the device time gains nothing where the
device waits for the host, and one that costs the host time costs nothing where the host is ahead.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tilewise.planner.budget.program import load_solver, stdout_kept

__all__ = ["Change", "Chosen", "Launch", "choose_options", "device_waits", "queue_ms"]

TIME_LIMIT_S = 5.0
"""Seconds for HiGHS. Programs of a network of 160 layers take up to a second."""
ROUNDING = 1e-9
"""The share of a step's time by which two choices may differ and count as equally fast."""
NEVER = -math.inf


@dataclass(frozen=True, slots=True)
class Change:
    """What one ``option`` (an index) adds to a launch: milliseconds of the host and the device, negative for a gain."""

    option: int
    host_ms: float
    device_ms: float


@dataclass(frozen=True, slots=True)
class Launch:
    """One operator: the host's milliseconds until it is launched, and the device's to compute it.

    ``waits`` says that the host waits for all launches before it, as ``item()`` does, before its own time begins.
    Each of ``changes`` holds where its option is chosen.
    """

    host_ms: float
    device_ms: float = 0.0
    waits: bool = False
    changes: tuple[Change, ...] = ()

    def taken(self, chosen: Collection[int]) -> tuple[float, float]:
        """Milliseconds of host and device with the options ``chosen``."""
        held = [change for change in self.changes if change.option in chosen]
        return self.host_ms + sum(c.host_ms for c in held), self.device_ms + sum(c.device_ms for c in held)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The ``options`` of a fastest step, its time, and whether the choice is proven to be the best."""

    options: frozenset[int]
    step_ms: float
    optimal: bool = True


def queue_ms(queue: Iterable[Launch], chosen: Collection[int] = ()) -> float:
    """Milliseconds of a step with the options ``chosen``: until host and device are done.

    >>> queue_ms([Launch(1.0, 5.0), Launch(1.0, 2.0)])  # the host is ahead
    8.0
    >>> queue_ms([Launch(4.0, 1.0), Launch(4.0, 1.0)])  # the device waits
    9.0
    """
    host = free = 0.0
    for launch in queue:
        host_ms, device_ms = launch.taken(chosen)
        if launch.waits:
            host = max(host, free)
        host += host_ms
        if device_ms > 0:
            free = max(host, free) + device_ms
    return max(host, free)


def device_waits(queue: Sequence[Launch], chosen: Collection[int]) -> bool:
    """Whether the device ever waits for the host between its first operator and the end of the step."""
    first = next((i for i, launch in enumerate(queue) if launch.taken(chosen)[1] > 0), None)
    if first is None:
        return True
    head = math.fsum(launch.taken(chosen)[0] for launch in queue[: first + 1])
    busy = math.fsum(launch.taken(chosen)[1] for launch in queue)
    return queue_ms(queue, chosen) > (head + busy) * (1 + ROUNDING)


def choose_options(queue: Sequence[Launch], time_limit_s: float = TIME_LIMIT_S) -> Chosen:
    """The options with which the step of ``queue`` is the fastest; of equally fast ones none that gains nothing.

    It is a 0-1 program: an option is a binary variable, and the times at which host and device are done with each
    launch are continuous ones. HiGHS gets ``time_limit_s``; without a proof by then the best choice that is known
    counts.

    >>> far_ahead = [Launch(0.1, 5.0, changes=(Change(0, 0.2, -1.0),)), Launch(0.1, 5.0)]
    >>> sorted(choose_options(far_ahead).options)
    [0]
    >>> waited_for = [Launch(5.0, 1.0, changes=(Change(0, 0.2, -0.1),)), Launch(5.0, 1.0)]
    >>> sorted(choose_options(waited_for).options)
    []
    """
    gain = _gains(queue)
    if not gain:
        return Chosen(frozenset(), queue_ms(queue))
    found, optimal = _solved(queue, sorted(gain), time_limit_s)
    gaining = frozenset(option for option, ms in gain.items() if ms > 0)
    known = [gaining, frozenset(), *([] if found is None else [found])]
    best = min(known, key=lambda chosen: queue_ms(queue, chosen))
    step_ms = queue_ms(queue, best)
    for option in sorted(best, key=lambda option: gain[option]):
        if queue_ms(queue, best - {option}) <= step_ms * (1 + ROUNDING):
            best -= {option}
    return Chosen(best, queue_ms(queue, best), optimal)


def _gains(queue: Iterable[Launch]) -> dict[int, float]:
    """The device's milliseconds that each option saves in all."""
    gains: dict[int, float] = {}
    for launch in queue:
        for change in launch.changes:
            gains[change.option] = gains.get(change.option, 0.0) - change.device_ms
    return gains


@dataclass
class _Program:
    """Rows ``sum(coefficient * variable) >= least``. Variables are the options, then times."""

    options: dict[int, int]
    rows: list[tuple[dict[int, float], float]] = field(default_factory=list)
    variables: int = 0

    def __post_init__(self) -> None:
        self.variables = len(self.options)

    def later(self, time: int, before: int | None, ms: float, changes: Iterable[tuple[int, float]]) -> None:
        """``time`` is ``ms`` and what options add (pairs of an option and its ms) after ``before``, or the start."""
        row = {time: 1.0}
        if before is not None:
            row[before] = -1.0
        for option, added in changes:
            place = self.options[option]
            row[place] = row.get(place, 0.0) - added
        self.rows.append((row, ms))

    def time(self) -> int:
        """A new variable for a time."""
        self.variables += 1
        return self.variables - 1


def _program(queue: Sequence[Launch], options: Sequence[int]) -> tuple[_Program, int]:
    """The program, and its variable for the end of the step."""
    program = _Program({option: place for place, option in enumerate(options)})
    host: int | None = None
    free: int | None = None
    for run in _runs(queue):
        if isinstance(run, Launch):
            host, free = _add_launch(program, run, host, free)
        else:
            host, free = _add_fixed(program, run, host, free)
    end = program.time()
    for time in (host, free):
        if time is not None:
            program.later(end, time, 0.0, ())
    return program, end


def _runs(queue: Sequence[Launch]) -> list[Launch | list[Launch]]:
    """The launches that options change, and between them lists of those that none does."""
    runs: list[Launch | list[Launch]] = []
    for launch in queue:
        if launch.changes:
            runs.append(launch)
        elif runs and isinstance(runs[-1], list):
            runs[-1].append(launch)
        else:
            runs.append([launch])
    return runs


def _add_launch(program: _Program, launch: Launch, host: int | None, free: int | None) -> tuple[int, int]:
    """Add a launch that options change; the variables of when host and device are done with it."""
    of_host = [(change.option, change.host_ms) for change in launch.changes]
    of_device = [(change.option, change.device_ms) for change in launch.changes]
    launched, done = program.time(), program.time()
    program.later(launched, host, launch.host_ms, of_host)
    if launch.waits and free is not None:
        program.later(launched, free, launch.host_ms, of_host)
    program.later(done, launched, launch.device_ms, of_device)
    if free is not None:
        program.later(done, free, launch.device_ms, of_device)
    return launched, done


def _add_fixed(program: _Program, run: Iterable[Launch], host: int | None, free: int | None) -> tuple[int, int]:
    """Add launches that no option changes as one: what each end adds at most to each beginning."""
    to_host, to_free = (0.0, NEVER), (NEVER, 0.0)  # from host, from device
    for launch in run:
        if launch.waits:
            to_host = max(to_host[0], to_free[0]), max(to_host[1], to_free[1])
        to_host = to_host[0] + launch.host_ms, to_host[1] + launch.host_ms
        if launch.device_ms > 0:
            to_free = tuple(max(h, f) + launch.device_ms for h, f in zip(to_host, to_free, strict=True))  # type: ignore[assignment]
    launched, done = program.time(), program.time()
    for time, (from_host, from_free) in ((launched, to_host), (done, to_free)):
        if from_host > NEVER:
            program.later(time, host, from_host, ())
        if free is not None and from_free > NEVER:
            program.later(time, free, from_free, ())
    return launched, done


def _solved(queue: Sequence[Launch], options: Sequence[int], time_limit_s: float) -> tuple[frozenset[int] | None, bool]:
    """The options by HiGHS, ``None`` where it has found none in time, and whether they are proven the best."""
    program, end = _program(queue, options)
    milp, constraints, bounds, matrix = load_solver()
    entries = [(i, column, value) for i, (row, _) in enumerate(program.rows) for column, value in row.items()]
    rows, columns, values = zip(*entries, strict=True)
    table = matrix((values, (rows, columns)), shape=(len(program.rows), program.variables))
    binary = np.arange(program.variables) < len(options)
    objective = np.zeros(program.variables)
    objective[end] = 1.0
    with stdout_kept():
        result = milp(
            objective,
            integrality=binary.astype(np.int8),
            bounds=bounds(0.0, np.where(binary, 1.0, np.inf)),
            constraints=constraints(table, np.array([least for _, least in program.rows]), np.inf),
            options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
        )
    if result.x is None:
        return None, False
    return frozenset(option for place, option in enumerate(options) if result.x[place] > 0.5), result.status == 0
