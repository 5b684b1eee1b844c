"""Measurements, plans and device profiles by environment and problem."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tilewise.cache import named_path
from tilewise.plan import Measurement, Plan
from tilewise.version import VERSION
from tilewise.wisdom import document, rows, tables
from tilewise.wisdom.database import Database, WisdomWarning
from tilewise.wisdom.paths import default_path
from tilewise.wisdom.tables import Found, Row

if TYPE_CHECKING:
    import sqlite3

__all__ = ["Kept", "Summary", "Wisdom"]

T = TypeVar("T")

MOST_REPORTED = 4096
"""Rows that are not valid of which it is remembered that they were told."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a store holds for one environment.

    ``measurements`` counts the ``lost`` ones too; ``newest`` is in seconds since 1970.
    """

    environment: str
    problems: int
    measurements: int
    lost: int
    plans: int
    profiled: bool
    newest: float


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """What a row holds, and whether it is this user's ``own``: sealed by a process that measured or checked it here."""

    value: T
    own: bool


class Wisdom:
    """What was measured and planned, in a SQLite file that many processes may use at once.

    ``path`` is the file, ``~`` in it the home directory; ``None`` is ``wisdom.sqlite3`` in the
    user's cache directory, which ``TILEWISE_CACHE_DIR`` moves. Nothing is opened or made before it
    is needed. An object may be used from many threads, over forks, pickled and copied: no
    connection outlives one call, and one call runs at a time in a process.

    A file that cannot be used is a :class:`WisdomWarning`, never an error: one that is damaged,
    foreign or of a newer schema is renamed and a fresh one begun; where none can be written, what
    is measured is kept in memory. Rows that do not pass validation are ignored with a warning.
    ``docs/wisdom.md`` is the manual.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self._database = Database(default_path() if path is None else named_path(path))
        self._reported: set[int] = set()

    def __repr__(self) -> str:
        return f"Wisdom({str(self.path)!r})"

    def __reduce__(self) -> tuple[type[Wisdom], tuple[Path]]:
        return Wisdom, (self.path,)

    def __deepcopy__(self, memo: object) -> Wisdom:
        return self

    @property
    def path(self) -> Path:
        """The file, whether or not it exists."""
        return self._database.path

    @property
    def in_memory(self) -> bool:
        """Whether the file turned out unusable, so that what is kept is lost with this object."""
        return self._database.in_memory

    def close(self) -> None:
        """Drop what was kept in memory for want of a file, which is tried again when next used."""
        self._database.close()

    def measurements(self, environment: str, problem: str) -> list[Measurement]:
        """What was measured of one problem, by solver, whatever the versions."""
        return self.measurements_many(environment, [problem])[problem]

    def measurements_many(self, environment: str, problems: Iterable[str]) -> dict[str, list[Measurement]]:
        """:meth:`measurements` of each problem, read at once; an empty list where there is none."""
        kept = self.kept_measurements(environment, problems)
        return {problem: [entry.value for entry in found] for problem, found in kept.items()}

    def kept_measurements(self, environment: str, problems: Iterable[str]) -> dict[str, list[Kept[Measurement]]]:
        """As :meth:`measurements_many`, each with whose it is."""
        result: dict[str, list[Kept[Measurement]]] = {problem: [] for problem in problems}
        found = self._database.read(lambda db: list(tables.select(db, "measurement", environment, result)))
        for row, measurement in self._valid(found, lambda row: rows.unpack_measurement(row.values)):
            result[row.problem].append(Kept(measurement, tables.is_own(row)))
        return result

    def record(self, environment: str, problem: str, measurements: Iterable[Measurement]) -> None:
        """Keep measurements, each in place of one with its solver, version and config.

        Numbers of a lost candidate that are not finite are left out. Raises ``ValueError`` naming
        the entry for any other number that is not finite or is negative, and for a measurement with
        neither time nor reason.
        """
        self.record_many(environment, {problem: measurements})

    def record_many(
        self, environment: str, measurements: Mapping[str, Iterable[Measurement]], *, own: bool = False
    ) -> None:
        """:meth:`record` for many problems in one transaction; ``own``: this process measured them just now."""
        now = time.time()
        new = [
            _row(environment, problem, rows.pack_measurement(measurement, now))
            for problem, found in measurements.items()
            for measurement in found
        ]
        self._insert("measurement", new, own)

    def plan(self, environment: str, problem: str, constraints: str) -> Plan | None:
        """The plan kept for a problem under these constraints, whatever its solver versions."""
        return self.plans_many(environment, [problem], constraints).get(problem)

    def plans_many(self, environment: str, problems: Iterable[str], constraints: str) -> dict[str, Plan]:
        """:meth:`plan` of each problem that has one, read at once."""
        kept = self.kept_plans(environment, problems, constraints)
        return {problem: entry.value for problem, entry in kept.items()}

    def kept_plans(self, environment: str, problems: Iterable[str], constraints: str) -> dict[str, Kept[Plan]]:
        """As :meth:`plans_many`, each with whose it is."""
        wanted = list(problems)
        found = self._database.read(lambda db: list(tables.select(db, "plan", environment, wanted)))
        kept = [row for row in found if row.values[0] == constraints]
        return {row.problem: Kept(plan, tables.is_own(row)) for row, plan in self._valid(kept, _unpack_plan)}

    def remember(self, environment: str, problem: str, constraints: str, plan: Plan, *, own: bool = False) -> None:
        """Keep a plan in place of the one for the same problem and constraints.

        ``own``: this process has just checked it against float64 and within its limit; others are checked when they
        are first used. Raises ``ValueError`` naming the entry for a plan of another problem or with numbers that are
        not finite.
        """
        self.remember_many(environment, constraints, {problem: plan}, own=own)

    def remember_many(
        self, environment: str, constraints: str, plans: Mapping[str, Plan], *, own: bool = False
    ) -> None:
        """:meth:`remember` for many problems in one transaction."""
        now = time.time()
        new = [
            _row(environment, problem, rows.pack_plan(problem, constraints, plan, now))
            for problem, plan in plans.items()
        ]
        self._insert("plan", new, own)

    def profile(self, environment: str) -> dict[str, float] | None:
        """The device profile of an environment; ``None`` without one."""
        found = self._database.read(lambda db: list(tables.select(db, "profile", environment)))
        for _, profile in self._valid(found, lambda row: rows.unpack_profile(row.values)):
            return profile
        return None

    def remember_profile(self, environment: str, profile: Mapping[str, float]) -> None:
        """Keep a device profile in place of the last. Raises ``ValueError`` naming a bad entry."""
        values = rows.pack_profile(dict(profile), time.time())
        rows.checked_text("environment", environment)
        self._insert("profile", [Row(environment, "", values)])

    def to_json(self) -> dict[str, Any]:
        """Everything, as the JSON document that ``docs/wisdom.md`` describes."""
        return document.compose(self._everything(), f"tilewise {VERSION}")

    def export(self, path: Path | str) -> int:
        """Write everything to a JSON document, whole or not at all; returns the rows written.

        Raises ``OSError`` when it cannot be written.
        """
        everything = self._everything()
        document.write(Path(path), document.compose(everything, f"tilewise {VERSION}"))
        return sum(map(len, everything.values()))

    def import_(self, path: Path | str) -> int:
        """Merge a document of :meth:`export`, the newer row winning; returns the rows that changed.

        Of rows of the same moment that differ one wins by its checksum, so that the order of imports does not matter.

        All of it is merged or nothing, and none of it is this user's own: plans are checked when they are first used.
        Entries that do not pass validation are ignored with a warning. Raises ``OSError`` when the file cannot be read
        and :class:`~tilewise.plan.PlanFormatError` (a ``ValueError``) when it is no such document.
        """
        new, faults = document.read(Path(path))
        return self._merge(new, faults, Path(path))

    def merge(self, data: object) -> int:
        """As :meth:`import_`, of a document that :meth:`to_json` gave, here or in another process.

        Raises :class:`~tilewise.plan.PlanFormatError` when it is no such document.
        """
        return self._merge(*document.parse(data), self.path)

    def _merge(self, new: dict[str, list[Row]], faults: list[str], origin: Path) -> int:
        changed = self._database.write(
            lambda db: sum(tables.insert(db, table, found, newer_only=True) for table, found in new.items())
        )
        _warn(origin, faults)
        return changed

    @staticmethod
    def merge_files(sources: Iterable[Path | str], target: Path | str) -> int:
        """Write the documents ``sources`` as one, the newer row winning as in :meth:`import_`; returns its rows.

        What comes out does not depend on the order of ``sources``, and a document merged with itself is itself. No
        store is touched; ``target`` may be one of ``sources``. Raises as :meth:`import_`, and ``OSError`` when the
        target cannot be written.
        """
        found = []
        for source in map(Path, sources):
            kept, faults = document.read(source)
            _warn(source, faults)
            found.append(kept)
        whole = document.merged(found)
        document.write(Path(target), document.compose(whole, f"tilewise {VERSION}"))
        return sum(map(len, whole.values()))

    def forget(
        self,
        problem_contains: str | None = None,
        solver: str | None = None,
        environment: str | None = None,
        stale: Mapping[str, int] | None = None,
    ) -> int:
        """Delete what meets every condition, everything without any; returns the rows deleted.

        ``problem_contains`` is part of a problem's key, ``solver`` a name (of a measurement, or
        anywhere in a plan), ``environment`` a whole key, and ``stale`` present solver versions:
        rows of any other version of those solvers go. Device profiles go only when neither problem,
        solver nor version is asked for.
        """

        where: dict[str, Any] = {"environment": environment, "problem_contains": problem_contains}
        by_solver = solver is not None or stale is not None

        def work(db: sqlite3.Connection) -> int:
            gone = tables.delete(db, "measurement", solver=solver, stale=stale, **where)
            if by_solver:
                gone += _forget_plans(db, solver, stale, **where)
            else:
                gone += tables.delete(db, "plan", **where)
            if not by_solver and problem_contains is None:
                gone += tables.delete(db, "profile", environment=environment)
            tables.sweep(db)
            return gone

        return self._database.write(work)

    def summary(self) -> list[Summary]:
        """What the store holds, by environment."""
        found = self._database.read(tables.counts)
        return [
            Summary(environment, problems, measurements, lost, plans, bool(profiles), newest)
            for environment, problems, measurements, lost, plans, profiles, newest in found
            if isinstance(environment, str)
        ]

    def _insert(self, table: str, new: list[Row], own: bool = False) -> None:
        if new:
            self._database.write(lambda db: tables.insert(db, table, new, own=own))

    def _everything(self) -> dict[str, list[Row]]:
        found = self._database.read(lambda db: {table: list(tables.select_all(db, table)) for table in tables.COLUMNS})
        unpack: dict[str, Callable[[Found], object]] = {
            "measurement": lambda row: rows.unpack_measurement(row.values),
            "plan": _unpack_plan,
            "profile": lambda row: rows.unpack_profile(row.values),
        }
        return {
            table: [Row(row.environment, row.problem, row.values) for row, _ in self._valid(kept, unpack[table])]
            for table, kept in found.items()
        }

    def _valid(self, found: Iterable[Found], unpack: Callable[[Found], T]) -> list[tuple[Found, T]]:
        """Rows that pass validation and what they hold; one warning tells of those that do not."""
        valid: list[tuple[Found, T]] = []
        faults: list[str] = []
        for row in found:
            try:
                rows.checked_text("environment", row.environment)
                rows.checked_text("problem", row.problem, empty=row.table == "profile")
                value = unpack(row)
                if row.crc != rows.checksum(row.environment, row.problem, *row.values):
                    raise rows.RowError("its checksum is wrong")
            except rows.RowError as error:
                if hash(row) not in self._reported:
                    if len(self._reported) >= MOST_REPORTED:
                        self._reported.clear()
                    self._reported.add(hash(row))
                    faults.append(f"{row.table}: {error}")
            else:
                valid.append((row, value))
        if faults:
            # One bad row may be the visible part of a damaged file, in which others are lost.
            self._database.check()
        _warn(self.path, faults)
        return valid


def _row(environment: str, problem: str, values: tuple[Any, ...]) -> Row:
    return Row(rows.checked_text("environment", environment), rows.checked_text("problem", problem), values)


def _unpack_plan(row: Found) -> Plan:
    return rows.unpack_plan(row.problem, row.values)


def _forget_plans(
    db: sqlite3.Connection,
    solver: str | None,
    stale: Mapping[str, int] | None,
    environment: str | None,
    problem_contains: str | None,
) -> int:
    doomed = [
        row
        for row in tables.select_all(db, "plan")
        if (environment is None or row.environment == environment)
        and isinstance(row.environment, str)
        and isinstance(row.problem, str)
        and (problem_contains or "") in row.problem
        and _concerns(row, solver, stale)
    ]
    return tables.delete_plans(db, doomed)


def _concerns(row: Found, solver: str | None, stale: Mapping[str, int] | None) -> bool:
    """Whether a plan uses ``solver`` and a stale version; one that cannot be read is stale."""
    try:
        used = list(rows.nodes(_unpack_plan(row)))
    except rows.RowError:
        return solver is None
    return (solver is None or any(node.solver == solver for node in used)) and (
        stale is None or any(stale.get(node.solver, node.version) != node.version for node in used)
    )


def _warn(path: Path, faults: list[str]) -> None:
    if faults:
        count = f"{len(faults)} row{'s' if len(faults) > 1 else ''}"
        warnings.warn(
            f"{path}: {count} not valid and ignored; the first: {faults[0]}",
            WisdomWarning,
            stacklevel=4,
        )
