"""Queries: rows of the three tables in and out of an open transaction, nothing judged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.wisdom import rows
from tilewise.wisdom.secret import seal_of, sealed

if TYPE_CHECKING:
    import sqlite3

__all__ = [
    "Found",
    "Row",
    "counts",
    "delete",
    "delete_plans",
    "insert",
    "is_own",
    "key_id",
    "key_of",
    "rank",
    "select",
    "select_all",
    "sweep",
]

COLUMNS = {"measurement": rows.MEASUREMENT, "plan": rows.PLAN, "profile": rows.PROFILE}
KEYS = {
    "measurement": ("environment", "problem", "solver", "version", "config"),
    "plan": ("environment", "problem", "constraints"),
    "profile": ("environment",),
}
SEALED = ("measurement", "plan")
"""Tables whose rows are believed further when they are this user's own; a profile only orders what is tried."""
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
    seal: Any = None


def key_id(text: str) -> int:
    """The id of a key text: 63 bits of its hash. Should two texts share one, checksums tell."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def select(db: sqlite3.Connection, table: str, environment: str, problems: Iterable[str] = ()) -> Iterator[Found]:
    """Rows of one environment and of these problems; one query for every 500 problems."""
    columns = ", ".join(COLUMNS[table])
    query = f"FROM {table} WHERE environment = {key_id(environment)}"
    if table == "profile":
        for crc, *values in db.execute(f"SELECT crc, {columns} {query}"):
            yield Found(table, environment, "", tuple(values), crc)
        return
    texts = {key_id(problem): problem for problem in problems}
    ids, order = list(texts), ", ".join(KEYS[table][1:])
    for start in range(0, len(ids), BATCH):
        batch = ids[start : start + BATCH]
        found = f"SELECT problem, crc, seal, {columns} {query} AND problem IN ({', '.join('?' * len(batch))})"
        found += f" ORDER BY {order}"
        for problem, crc, seal, *values in db.execute(found, batch):
            yield Found(table, environment, texts.get(problem), tuple(values), crc, seal)


def select_all(db: sqlite3.Connection, table: str) -> Iterator[Found]:
    """Every row; a key whose text is lost, which only damage does, is ``None``."""
    keyed = table != "profile"
    columns = ", ".join(f"t.{column}" for column in COLUMNS[table])
    query = f"SELECT e.text, {'p.text' if keyed else repr('')}, t.crc, {columns} FROM {table} t"
    query += " LEFT JOIN name e ON e.id = t.environment"
    if keyed:
        query += " LEFT JOIN name p ON p.id = t.problem"
    for environment, problem, crc, *values in db.execute(query):
        yield Found(table, environment, problem, tuple(values), crc)


def insert(
    db: sqlite3.Connection, table: str, new: Sequence[Row], *, newer_only: bool = False, own: bool = False
) -> int:
    """Keep rows in place of those with equal keys, or only of those :func:`rank` puts lower; returns how many.

    Those of this user's ``own`` measuring and checking are sealed.
    """
    keyed = table != "profile"
    names = dict.fromkeys(name for row in new for name in (row.environment, row.problem)[: 1 + keyed])
    ids = {name: key_id(name) for name in names}
    keys, values = KEYS[table], COLUMNS[table]
    seals = table in SEALED
    columns = (*keys[: 1 + keyed], *values, "crc", *(["seal"] if seals else []))
    changed = ", ".join(f"{column} = excluded.{column}" for column in columns if column not in keys)
    query = (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) "
        f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {changed}"
    )
    if newer_only:
        query += f" WHERE (excluded.recorded, excluded.crc) > ({table}.recorded, {table}.crc)"  # as rank has it
    parameters = [
        (
            *(ids[name] for name in (row.environment, row.problem)[: 1 + keyed]),
            *row.values,
            rows.checksum(row.environment, row.problem, *row.values),
            *([seal_of(sealed_text(table, row)) if own else None] if seals else []),
        )
        for row in new
    ]
    if not parameters:
        return 0
    db.executemany("REPLACE INTO name (text, id) VALUES (?, ?)", ids.items())
    return db.executemany(query, parameters).rowcount


def sealed_text(table: str, row: Row | Found) -> str:
    """What a seal is of: all that a row says, and where it stands."""
    return json.dumps([table, row.environment, row.problem, *row.values])


def is_own(row: Found) -> bool:
    """Whether a process of this user made the row, and nobody changed it since."""
    return row.seal is not None and sealed(sealed_text(row.table, row), row.seal)


def rank(row: Row) -> tuple[float, int]:
    """Of rows with equal keys the greatest is kept, whoever merges them in what order: the newest.

    Rows of one moment that differ, which clocks hardly give, are told apart by their checksums.
    """
    recorded: float = row.values[-1]
    return recorded, rows.checksum(row.environment, row.problem, *row.values)


def key_of(table: str, row: Row) -> tuple[Any, ...]:
    """The values of :data:`KEYS`: one row of a table is kept for each."""
    named = {
        "environment": row.environment,
        "problem": row.problem,
        **dict(zip(COLUMNS[table], row.values, strict=True)),
    }
    return tuple(named[column] for column in KEYS[table])


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
        conditions.append("environment = ?")
        parameters.append(key_id(environment))
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
    query = "DELETE FROM plan WHERE environment = ? AND problem = ? AND constraints = ?"
    keys = [(key_id(plan.environment), key_id(plan.problem), plan.values[0]) for plan in plans]
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
