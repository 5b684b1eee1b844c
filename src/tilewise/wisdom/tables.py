"""Queries: rows of the three tables in and out of an open transaction, nothing judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.wisdom import rows

if TYPE_CHECKING:
    import sqlite3

__all__ = ["Found", "Row", "counts", "delete", "delete_plans", "insert", "select", "sweep"]

COLUMNS = {"measurement": rows.MEASUREMENT, "plan": rows.PLAN, "profile": rows.PROFILE}
KEYS = {
    "measurement": ("environment", "problem", "solver", "version", "config"),
    "plan": ("environment", "problem", "constraints"),
    "profile": ("environment",),
}
BATCH = 500
"""Keys in one query; old versions of SQLite allow 999 parameters."""


class Row(NamedTuple):
    """One row to keep: its keys (a profile's problem is empty) and its table's columns."""

    environment: str
    problem: str
    values: tuple[Any, ...]


class Found(NamedTuple):
    """One row as it lies in the store, of any types at all."""

    table: str
    environment: Any
    problem: Any
    values: tuple[Any, ...]
    crc: Any


def select(
    db: sqlite3.Connection,
    table: str,
    environment: str | None = None,
    problems: Iterable[str] | None = None,
) -> Iterator[Found]:
    """Rows of one environment and of some problems, or all; one query for every 500 problems."""
    if problems is None:
        yield from _select(db, table, environment, ())
        return
    wanted = list(dict.fromkeys(problems))
    for start in range(0, len(wanted), BATCH):
        yield from _select(db, table, environment, wanted[start : start + BATCH])


def _select(db: sqlite3.Connection, table: str, environment: str | None, problems: Sequence[str]) -> Iterator[Found]:
    keyed = table != "profile"
    columns = ", ".join(f"t.{column}" for column in COLUMNS[table])
    problem = "p.text" if keyed else "''"
    query = f"SELECT e.text, {problem}, t.crc, {columns} FROM {table} t"
    query += " JOIN name e ON e.id = t.environment"
    if keyed:
        query += " JOIN name p ON p.id = t.problem"
    conditions = ["e.text = ?"] if environment is not None else []
    if problems:
        conditions.append(f"p.text IN ({', '.join('?' * len(problems))})")
    if conditions:
        query += f" WHERE {' AND '.join(conditions)}"
    order = "".join(f", t.{key}" for key in KEYS[table][2:])
    query += f" ORDER BY e.text, {problem}{order}"
    for e, p, crc, *values in db.execute(query, [*([] if environment is None else [environment]), *problems]):
        yield Found(table, e, p, tuple(values), crc)


def insert(db: sqlite3.Connection, table: str, new: Sequence[Row], *, newer_only: bool = False) -> int:
    """Keep rows in place of those with equal keys, or only of older ones; returns how many."""
    keyed = table != "profile"
    ids = _ids(db, {name for row in new for name in (row.environment, row.problem)[: 1 + keyed]})
    keys, values = KEYS[table], COLUMNS[table]
    columns = (*keys[: 1 + keyed], *values, "crc")
    changed = ", ".join(f"{column} = excluded.{column}" for column in columns if column not in keys)
    query = (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) "
        f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {changed}"
    )
    if newer_only:
        query += f" WHERE excluded.recorded > {table}.recorded"
    parameters = [
        (
            *(ids[name] for name in (row.environment, row.problem)[: 1 + keyed]),
            *row.values,
            rows.checksum(row.environment, row.problem, *row.values),
        )
        for row in new
    ]
    return db.executemany(query, parameters).rowcount if parameters else 0


def _ids(db: sqlite3.Connection, names: Iterable[str]) -> dict[str, int]:
    """Ids of key texts, new ones given to those not seen before."""
    ids = {}
    for name in names:
        db.execute("INSERT OR IGNORE INTO name (text) VALUES (?)", (name,))
        ids[name] = db.execute("SELECT id FROM name WHERE text = ?", (name,)).fetchone()[0]
    return ids


def delete(
    db: sqlite3.Connection,
    table: str,
    *,
    environment: str | None = None,
    problem_contains: str | None = None,
    solver: str | None = None,
    stale: Mapping[str, int] | None = None,
) -> int:
    """Delete rows that meet every condition; ``solver`` and ``stale`` are for measurements."""
    conditions: list[str] = []
    parameters: list[object] = []
    if environment is not None:
        conditions.append("environment IN (SELECT id FROM name WHERE text = ?)")
        parameters.append(environment)
    if problem_contains is not None:
        conditions.append("problem IN (SELECT id FROM name WHERE instr(text, ?) > 0)")
        parameters.append(problem_contains)
    if solver is not None:
        conditions.append("solver = ?")
        parameters.append(solver)
    if stale is not None:
        conditions.append(f"({' OR '.join(['0', *['solver = ? AND version <> ?'] * len(stale)])})")
        parameters += [value for pair in stale.items() for value in pair]
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return db.execute(f"DELETE FROM {table}{where}", parameters).rowcount


def delete_plans(db: sqlite3.Connection, plans: Iterable[Found]) -> int:
    """Delete these plans."""
    query = (
        "DELETE FROM plan WHERE environment = (SELECT id FROM name WHERE text = ?) "
        "AND problem = (SELECT id FROM name WHERE text = ?) AND constraints = ?"
    )
    keys = [(plan.environment, plan.problem, plan.values[0]) for plan in plans]
    return db.executemany(query, keys).rowcount if keys else 0


def sweep(db: sqlite3.Connection) -> None:
    """Delete the key texts that no row uses."""
    db.execute(
        """
        DELETE FROM name WHERE id NOT IN (
            SELECT environment FROM measurement UNION SELECT problem FROM measurement
            UNION SELECT environment FROM plan UNION SELECT problem FROM plan
            UNION SELECT environment FROM profile)
        """
    )


def counts(db: sqlite3.Connection) -> list[tuple[Any, ...]]:
    """By environment: its text, problems, measurements, lost ones, plans, profiles, newest time."""
    # A timestamp that was tampered with need not be one.
    time = f"CASE WHEN typeof(recorded) = 'real' AND recorded BETWEEN 0 AND {rows.LAST_SECOND}"
    return db.execute(
        f"""
        WITH kept (environment, problem, measurement, lost, plan, profile, time) AS (
            SELECT environment, problem, 1, reason <> '', 0, 0, {time} THEN recorded END
                FROM measurement
            UNION ALL SELECT environment, problem, 0, 0, 1, 0, {time} THEN recorded END FROM plan
            UNION ALL SELECT environment, NULL, 0, 0, 0, 1, {time} THEN recorded END FROM profile)
        SELECT name.text, count(DISTINCT problem), sum(measurement), sum(lost), sum(plan),
               sum(profile), coalesce(max(time), 0.0)
        FROM kept JOIN name ON name.id = environment GROUP BY environment ORDER BY name.text
        """
    ).fetchall()
