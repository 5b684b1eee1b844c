"""Measurements, plans and device profiles by environment and problem."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from tilewise.machine.cache import named_path
from tilewise.plan import Measurement, Plan
from tilewise.version import VERSION
from tilewise.wisdom import document, rows, tables
from tilewise.wisdom.database import Database
from tilewise.wisdom.forgetting import delete_matching
from tilewise.wisdom.paths import default_path
from tilewise.wisdom.reader import Reader, warn_of
from tilewise.wisdom.tables import Row

__all__ = ["Kept", "Summary", "Wisdom"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Summary:
    """What a store holds for one environment.

    ``problems``, ``measurements`` (the ``lost`` ones included) and ``plans`` are numbers of rows; ``profiled`` says
    whether there is a device profile. ``newest`` is the time of the newest row in seconds since 1970. ``busy`` is how
    many measurements were made while other processes kept the host busy.

    >>> import tempfile
    >>> from tilewise.plan import Config, Measurement
    >>> wisdom = Wisdom(tempfile.mkdtemp() + "/wisdom.sqlite3")
    >>> wisdom.record("this machine", "a problem", [Measurement("fft", 1, Config(), time_ms=2.5)])
    >>> [(found.environment, found.measurements) for found in wisdom.summary()]
    [('this machine', 1)]
    """

    environment: str
    problems: int
    measurements: int
    lost: int
    plans: int
    profiled: bool
    newest: float
    busy: int = 0


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """The value of a row, and whether it is this user's ``own``.

    A row is own when a process of this user measured or checked it on this machine and sealed it.

    >>> Kept(value=2.5, own=True).own
    True
    """

    value: T
    own: bool


class Wisdom:
    """What was measured and planned, in a SQLite file that many processes may use at once.

    ``path`` is the file; ``~`` in it is the home directory. ``None`` is ``wisdom.sqlite3`` in the user's cache
    directory, which ``TILEWISE_CACHE_DIR`` moves. Nothing is opened or made before it is needed. An object may be used
    from many threads, over forks, pickled and copied: no connection outlives one call, and one call runs at a time in a
    process.

    A file that cannot be used is a :class:`WisdomWarning`, never an error. One that is damaged, foreign or of a newer
    schema is renamed and a fresh one begun; where none can be written, what is measured is kept in memory. Rows that
    are not valid are ignored with a warning. ``docs/wisdom.md`` is the manual.

    Environments and problems are given by their keys: :attr:`Environment.key <tilewise.machine.device.Environment.key>`
    and a problem's ``key``.

    >>> import tempfile
    >>> from tilewise.plan import Config, Measurement
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     wisdom = tilewise.Wisdom(f"{folder}/wisdom.sqlite3")
    ...     wisdom.record("this machine", "a problem", [Measurement("fft", 1, Config(basis=(8, 8)), time_ms=2.5)])
    ...     wisdom.measurements("this machine", "a problem")[0].time_ms
    2.5
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self._database = Database(default_path() if path is None else named_path(path))
        self._reader = Reader(self._database)

    def __repr__(self) -> str:
        return f"Wisdom({str(self.path)!r})"

    def __reduce__(self) -> tuple[type[Wisdom], tuple[Path]]:
        return Wisdom, (self.path,)

    def __deepcopy__(self, memo: object) -> Wisdom:
        return self

    @property
    def path(self) -> Path:
        """The file of the store, whether or not it exists."""
        return self._database.path

    @property
    def in_memory(self) -> bool:
        """Whether the file turned out unusable, so that what is kept is lost with this object."""
        return self._database.in_memory

    def close(self) -> None:
        """Drop what was kept in memory because the file was unusable. The next use tries the file again."""
        self._database.close()

    def measurements(self, environment: str, problem: str) -> list[Measurement]:
        """The measurements of one problem, of all solvers and all their versions."""
        return self.measurements_many(environment, [problem])[problem]

    def measurements_many(self, environment: str, problems: Iterable[str]) -> dict[str, list[Measurement]]:
        """The :meth:`measurements` of each problem, read at once; an empty list where there are none."""
        kept = self.kept_measurements(environment, problems)
        return {problem: [entry.value for entry in entries] for problem, entries in kept.items()}

    def kept_measurements(self, environment: str, problems: Iterable[str]) -> dict[str, list[Kept[Measurement]]]:
        """As :meth:`measurements_many`, each with whether it is this user's own."""
        result: dict[str, list[Kept[Measurement]]] = {problem: [] for problem in problems}
        for row, measurement in self._reader.measurements(environment, result):
            result[row.problem].append(Kept(measurement, tables.is_own(row)))
        return result

    def record(self, environment: str, problem: str, measurements: Iterable[Measurement]) -> None:
        """Keep measurements of a problem, each in place of an older one of the same solver, version and config.

        Numbers of a lost candidate that are not finite are left out. Raises ``ValueError`` naming the entry for any
        other number that is not finite or is negative, and for a measurement with neither time nor reason.
        """
        self.record_many(environment, {problem: measurements})

    def record_many(
        self, environment: str, measurements: Mapping[str, Iterable[Measurement]], *, own: bool = False
    ) -> None:
        """As :meth:`record`, for many problems in one transaction.

        ``own`` says that this process has measured them just now.
        """
        now = time.time()
        new = [
            _row(environment, problem, rows.pack_measurement(measurement, now))
            for problem, of_problem in measurements.items()
            for measurement in of_problem
        ]
        self._insert("measurement", new, own)

    def plan(self, environment: str, problem: str, constraints: str) -> Plan | None:
        """The plan kept for a problem under these constraints, or ``None``.

        ``constraints`` is text such as ``rigor=measure workspace=67108864``. The plan may be of older versions of its
        solvers.
        """
        return self.plans_many(environment, [problem], constraints).get(problem)

    def plans_many(self, environment: str, problems: Iterable[str], constraints: str) -> dict[str, Plan]:
        """The :meth:`plan` of each problem that has one, read at once."""
        kept = self.kept_plans(environment, problems, constraints)
        return {problem: entry.value for problem, entry in kept.items()}

    def kept_plans(self, environment: str, problems: Iterable[str], constraints: str) -> dict[str, Kept[Plan]]:
        """As :meth:`plans_many`, each with whether it is this user's own."""
        found = self._reader.plans(environment, list(problems), constraints)
        return {row.problem: Kept(plan, tables.is_own(row)) for row, plan in found}

    def remember(self, environment: str, problem: str, constraints: str, plan: Plan, *, own: bool = False) -> None:
        """Keep a plan in place of the one for the same problem and constraints.

        ``own`` says that this process has just checked it against float64 and its limit. Other plans are checked when
        they are first used. Raises ``ValueError`` naming the entry for a plan of another problem or with numbers that
        are not finite.
        """
        self.remember_many(environment, constraints, {problem: plan}, own=own)

    def remember_many(
        self, environment: str, constraints: str, plans: Mapping[str, Plan], *, own: bool = False
    ) -> None:
        """As :meth:`remember`, for many problems in one transaction."""
        now = time.time()
        new = [
            _row(environment, problem, rows.pack_plan(problem, constraints, plan, now))
            for problem, plan in plans.items()
        ]
        self._insert("plan", new, own)

    def profile(self, environment: str) -> dict[str, float] | None:
        """The device profile of an environment, rates by name; ``None`` where there is none."""
        return next((profile for _, profile in self._reader.profiles(environment)), None)

    def remember_profile(self, environment: str, profile: Mapping[str, float]) -> None:
        """Keep a device profile in place of the last one. Raises ``ValueError`` naming a bad entry."""
        values = rows.pack_profile(dict(profile), time.time())
        rows.checked_text("environment", environment)
        self._insert("profile", [Row(environment, "", values)])

    def to_json(self) -> dict[str, Any]:
        """All rows as the JSON document that ``docs/wisdom.md`` describes."""
        return document.compose(self._reader.everything(), f"tilewise {VERSION}")

    def export(self, path: Path | str) -> int:
        """Write all rows to a JSON document, whole or not at all; returns the number of rows.

        Raises ``OSError`` where it cannot be written.
        """
        everything = self._reader.everything()
        document.write(Path(path), document.compose(everything, f"tilewise {VERSION}"))
        return sum(map(len, everything.values()))

    def import_(self, path: Path | str) -> int:
        """Merge a document of :meth:`export`, the newer row winning; returns the number of rows that changed.

        Different rows of the same moment are ordered by their checksums, so that the order of imports does not matter.
        All of the document is merged or nothing, and no row of it is this user's own: plans are checked when they are
        first used. Entries that are not valid are ignored with a warning. Raises ``OSError`` where the file cannot be
        read, and :class:`~tilewise.plan.PlanFormatError` (a ``ValueError``) where it is no such document.
        """
        new, faults = document.read(Path(path))
        return self._merge(new, faults, Path(path))

    def merge(self, data: object) -> int:
        """As :meth:`import_`, for a document that :meth:`to_json` gave here or in another process.

        Raises :class:`~tilewise.plan.PlanFormatError` where it is no such document.
        """
        return self._merge(*document.parse(data), self.path)

    def _merge(self, new: dict[str, list[Row]], faults: list[str], origin: Path) -> int:
        """Keep the newer of each two rows and warn of faults; returns the number of rows that changed."""
        changed = self._database.write(
            lambda db: sum(tables.insert(db, table, table_rows, newer_only=True) for table, table_rows in new.items())
        )
        warn_of(origin, faults)
        return changed

    @staticmethod
    def merge_files(sources: Iterable[Path | str], target: Path | str) -> int:
        """Write the documents ``sources`` as one to ``target``, the newer row winning; returns its number of rows.

        The result does not depend on the order of ``sources``, and a document merged with itself is itself. No store is
        touched; ``target`` may be one of ``sources``. Raises as :meth:`import_`, and ``OSError`` where the target
        cannot be written.
        """
        documents = []
        for source in map(Path, sources):
            tables_of_source, faults = document.read(source)
            warn_of(source, faults)
            documents.append(tables_of_source)
        whole = document.merged(documents)
        document.write(Path(target), document.compose(whole, f"tilewise {VERSION}"))
        return sum(map(len, whole.values()))

    def forget(
        self,
        problem_contains: str | None = None,
        solver: str | None = None,
        environment: str | None = None,
        stale: Mapping[str, int] | None = None,
    ) -> int:
        """Delete rows that meet every condition, all rows without any; returns their number.

        ``problem_contains`` is part of a problem's key, ``solver`` the name of a solver (of a measurement, or anywhere
        in a plan) and ``environment`` a whole key. ``stale`` holds present versions by solver: rows of any other
        version of these solvers are deleted. Device profiles are deleted only where neither problem, solver nor version
        is asked for.
        """
        return self._database.write(
            lambda db: delete_matching(
                db, problem_contains=problem_contains, solver=solver, environment=environment, stale=stale
            )
        )

    def summary(self) -> list[Summary]:
        """What the store holds, one entry for each environment."""
        counted = self._database.read(tables.counts)
        return [
            Summary(environment, problems, measurements, lost, plans, bool(profiles), newest, busy)
            for environment, problems, measurements, lost, plans, profiles, newest, busy in counted
            if isinstance(environment, str)
        ]

    def _insert(self, table: str, new: list[Row], own: bool = False) -> None:
        """Write rows to a table."""
        if new:
            self._database.write(lambda db: tables.insert(db, table, new, own=own))


def _row(environment: str, problem: str, values: tuple[Any, ...]) -> Row:
    """A row to keep. Raises :class:`RowError` for keys that are not text."""
    return Row(rows.checked_text("environment", environment), rows.checked_text("problem", problem), values)
