"""Reading the rows of a store. Anybody may have written them: those that are not valid are left out, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from tilewise.plan import Measurement, Plan
from tilewise.wisdom import rows, tables
from tilewise.wisdom.database import Database, WisdomWarning
from tilewise.wisdom.tables import Row, StoredRow

__all__ = ["Reader", "unpack_plan", "warn_of"]

T = TypeVar("T")

MOST_REPORTED = 4096
"""Most invalid rows that are remembered as reported."""


class Reader:
    """Reads valid rows of ``database`` and their values. Of each row that is not valid it warns once.

    Its methods are called by those that a user calls, whose line the warning names.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._reported: set[int] = set()

    def measurements(self, environment: str, problems: Iterable[str]) -> list[tuple[StoredRow, Measurement]]:
        """The measurements of problems in one environment."""
        stored = self._database.read(lambda db: list(tables.select(db, "measurement", environment, problems)))
        return self._valid(stored, _unpack_measurement)

    def plans(self, environment: str, problems: Iterable[str], constraints: str) -> list[tuple[StoredRow, Plan]]:
        """The plans of problems in one environment that were made under these constraints."""
        stored = self._database.read(lambda db: list(tables.select(db, "plan", environment, problems)))
        return self._valid([row for row in stored if row.values[0] == constraints], unpack_plan)

    def profiles(self, environment: str) -> list[tuple[StoredRow, dict[str, float]]]:
        """The device profile of an environment, if there is one."""
        stored = self._database.read(lambda db: list(tables.select(db, "profile", environment)))
        return self._valid(stored, _unpack_profile)

    def everything(self) -> dict[str, list[Row]]:
        """All rows, by table."""
        stored = self._database.read(lambda db: {table: list(tables.select_all(db, table)) for table in tables.COLUMNS})
        unpack: dict[str, Callable[[StoredRow], object]] = {
            "measurement": _unpack_measurement,
            "plan": unpack_plan,
            "profile": _unpack_profile,
        }
        return {
            table: [Row(row.environment, row.problem, row.values) for row, _ in self._valid(table_rows, unpack[table])]
            for table, table_rows in stored.items()
        }

    def _valid(self, stored: Iterable[StoredRow], unpack: Callable[[StoredRow], T]) -> list[tuple[StoredRow, T]]:
        """Valid rows and their values. One warning names those that are not valid."""
        valid: list[tuple[StoredRow, T]] = []
        faults: list[str] = []
        for row in stored:
            try:
                rows.checked_text("environment", row.environment)
                rows.checked_text("problem", row.problem, empty=row.table == "profile")
                value = unpack(row)
                if row.crc != tables.checksum(row.table, row):
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
        warn_of(self._database.path, faults, stacklevel=5)
        return valid


def _unpack_measurement(row: StoredRow) -> Measurement:
    return rows.unpack_measurement(row.values)


def unpack_plan(row: StoredRow) -> Plan:
    """The plan in a row. Raises :class:`~tilewise.wisdom.rows.RowError` where it is not valid."""
    return rows.unpack_plan(row.problem, row.values)


def _unpack_profile(row: StoredRow) -> dict[str, float]:
    return rows.unpack_profile(row.values)


def warn_of(path: Path, faults: list[str], stacklevel: int = 4) -> None:
    """Warn of invalid entries of the file at ``path``, at the caller ``stacklevel`` calls up."""
    if faults:
        count = f"{len(faults)} row{'s' if len(faults) > 1 else ''}"
        text = f"{path}: {count} not valid and ignored; the first: {faults[0]}"
        warnings.warn(text, WisdomWarning, stacklevel=stacklevel)
