"""What the processes of the wisdom tests do; importable without pytest, so that they start fast."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

from tilewise.plan import Config, Measurement, Plan
from tilewise.wisdom import Wisdom, WisdomWarning
from tilewise.wisdom.database import Database

ENVIRONMENT = "cpu: 2 threads, torch 2.13.0"
CONSTRAINTS = "workspace=67108864"
PROBLEMS = [f"problem {i}" for i in range(10)]
BATCH = 20
"""Measurements recorded in one transaction."""


def some_measurements(count: int = BATCH, solver: str = "fft", *, told: bool = True) -> list[Measurement]:
    """Distinct measurements, in the order in which a store returns them.

    If they are ``told``, every other one tells the host's times and how sure its times are.
    """
    measured = [Measurement(solver, 1, Config(basis=(32, 32), tile=100 + i), 0.5 + i, 4096 * i) for i in range(count)]
    sure: dict[str, Any] = {"host_ms": 0.25, "baseline_host_ms": 0.0, "dispersion": 0.125, "runs": 5, "load": 0.5}
    return [replace(m, **sure) if told and i % 2 else m for i, m in enumerate(measured)]


def some_plan(problem: str) -> Plan:
    """A plan with parts."""
    leaf = Plan(f"{problem} part", "fft", 1, Config(basis=(32, 32)), time_ms=1.5, workspace=4096)
    return Plan(problem, "micro_batch", 1, Config(sizes=(64, 64)), (leaf,), (2,), 3.25, 4096)


def fill(wisdom: Wisdom, *, told: bool = True, own: bool = False) -> None:
    """Keep measurements and a plan for each of ``PROBLEMS``, and a profile."""
    wisdom.record_many(ENVIRONMENT, {problem: some_measurements(told=told) for problem in PROBLEMS}, own=own)
    wisdom.remember_many(ENVIRONMENT, CONSTRAINTS, {problem: some_plan(problem) for problem in PROBLEMS}, own=own)
    wisdom.remember_profile(ENVIRONMENT, {"bandwidth": 3e12})


def filled(path: Path) -> Path:
    """``path``, where a store now holds what :func:`fill` keeps."""
    fill(Wisdom(path))
    return path


def integrity(path: Path) -> str:
    """SQLite's own verdict on the file."""
    with closing(sqlite3.connect(path)) as db:
        return str(db.execute("PRAGMA integrity_check").fetchone()[0])


def journal_of(path: Path) -> str:
    """The journal mode in the header of a file that nobody has open."""
    return {b"\x01\x01": "delete", b"\x02\x02": "wal"}[path.read_bytes()[18:20]]


def aside(path: Path) -> list[str]:
    """Names of files moved aside."""
    return sorted(p.name for p in path.parent.iterdir() if p.name.startswith((f"{path.name}.d", f"{path.name}.f")))


def write_many(path: Path, writer: int, rounds: int, start: Barrier, results: Connection) -> None:
    """Record and remember ``rounds`` problems of its own and one shared by all; send the warnings there were."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wisdom = Wisdom(path)
        start.wait()
        for i in range(rounds):
            wisdom.record(ENVIRONMENT, f"writer {writer} problem {i}", some_measurements())
            wisdom.remember(
                ENVIRONMENT, f"writer {writer} problem {i}", CONSTRAINTS, some_plan(f"writer {writer} problem {i}")
            )
            wisdom.record(ENVIRONMENT, "shared", some_measurements(1, solver=f"solver {writer}"))
            assert len(wisdom.measurements(ENVIRONMENT, f"writer {writer} problem {i}")) == BATCH
    results.send([str(warning.message) for warning in caught])


def write_for_ever(path: Path, begun: Event) -> None:
    """Record until killed."""
    wisdom = Wisdom(path)
    begun.set()
    i = 0
    while True:
        wisdom.record(ENVIRONMENT, f"problem {i % 50}", some_measurements())
        wisdom.remember(ENVIRONMENT, f"problem {i % 50}", CONSTRAINTS, some_plan(f"problem {i % 50}"))
        i += 1


def as_nobody(action: Callable[..., Any], arguments: Sequence[Any], results: Connection) -> None:
    """Run ``action`` without the power to write everywhere, and send its result."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    results.send(action(*arguments))


def use_read_only(path: Path) -> tuple[list[str], bool, int, int]:
    """Use a store that cannot be written: the warnings, whether it is in memory, what was and what is there."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wisdom = Wisdom(path)
        before = len(wisdom.measurements(ENVIRONMENT, "old"))
        wisdom.record(ENVIRONMENT, "new", some_measurements())
        wisdom.record(ENVIRONMENT, "newer", some_measurements())
        after = len(wisdom.measurements(ENVIRONMENT, "new"))
    return [str(warning.message) for warning in caught], wisdom.in_memory, before, after


def use_full_disk(path: Path, results: Connection) -> None:
    """Use a store that may not grow, as on a full disk; send as :func:`use_read_only` does."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size = path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wisdom = Wisdom(path)
        for i in range(100):
            wisdom.record(ENVIRONMENT, f"new {i}", some_measurements())
        found = [len(wisdom.measurements(ENVIRONMENT, problem)) for problem in ("old", "new 0", "new 99")]
    results.send(([str(warning.message) for warning in caught if warning.category is WisdomWarning], found))


def read_slowly(path: Path, held: Event, go_on: Event) -> None:
    """Be in the middle of a transaction until told to go on."""

    def work(db: sqlite3.Connection) -> None:
        db.execute("SELECT count(*) FROM plan")
        held.set()
        go_on.wait(30)

    Database(path).read(work)


def hold_lock(path: Path, held: Event, seconds: float) -> None:
    """Keep the database locked for writing, as a user's own SQLite shell may."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        held.set()
        time.sleep(seconds)
        db.execute("ROLLBACK")
