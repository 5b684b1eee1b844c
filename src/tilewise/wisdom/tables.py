"""Queries: rows of the three tables into and out of an open transaction, without any check of their content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.plan import BUSY, CHECK_VERSION
from tilewise.wisdom import rows
from tilewise.wisdom.secret import seal_of, sealed

if TYPE_CHECKING:
    import sqlite3

__all__ = [
    "Row",
    "StoredRow",
    "checksum",
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
"""Columns of each table beside its keys."""
KEYS = {
    "measurement": ("environment", "problem", "solver", "version", "config"),
    "plan": ("environment", "problem", "constraints"),
    "profile": ("environment",),
}
"""Columns that tell the rows of a table apart."""
SEALED = ("measurement", "plan")
"""Tables whose rows are trusted more when this user made them. A profile only orders what is tried."""
BATCH = 500
"""Most keys in one query; old versions of SQLite allow 999 parameters."""


class Row(NamedTuple):
    """One row to keep: its keys (a profile's problem is empty) and the values of its table's columns."""

    environment: str
    problem: str
    values: tuple[Any, ...]


class StoredRow(NamedTuple):
    """One row as it lies in the store. Its values may be of any type, as anybody may have written them."""

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


def select(db: sqlite3.Connection, table: str, environment: str, problems: Iterable[str] = ()) -> Iterator[StoredRow]:
    """Rows of one environment and these problems, with one query for every :data:`BATCH` problems."""
    columns = ", ".join(COLUMNS[table])
    query = f"FROM {table} WHERE environment = {key_id(environment)}"
    if table == "profile":
        for crc, *values in db.execute(f"SELECT crc, {columns} {query}"):
            yield StoredRow(table, environment, "", tuple(values), crc)
        return
    texts = {key_id(problem): problem for problem in problems}
    ids, order = list(texts), ", ".join(KEYS[table][1:])
    for start in range(0, len(ids), BATCH):
        batch = ids[start : start + BATCH]
        batch_query = f"SELECT problem, crc, seal, {columns} {query} AND problem IN ({', '.join('?' * len(batch))})"
        batch_query += f" ORDER BY {order}"
        for problem, crc, seal, *values in db.execute(batch_query, batch):
            yield StoredRow(table, environment, texts.get(problem), tuple(values), crc, seal)


def select_all(db: sqlite3.Connection, table: str) -> Iterator[StoredRow]:
    """Every row. A key whose text is lost, which only damage does, is ``None``."""
    keyed = table != "profile"
    columns = ", ".join(f"t.{column}" for column in COLUMNS[table])
    query = f"SELECT e.text, {'p.text' if keyed else repr('')}, t.crc, {columns} FROM {table} t"
    query += " LEFT JOIN name e ON e.id = t.environment"
    if keyed:
        query += " LEFT JOIN name p ON p.id = t.problem"
    for environment, problem, crc, *values in db.execute(query):
        yield StoredRow(table, environment, problem, tuple(values), crc)


def insert(
    db: sqlite3.Connection, table: str, new: Sequence[Row], *, newer_only: bool = False, own: bool = False
) -> int:
    """Keep rows in place of those with equal keys; returns how many were written.

    With ``newer_only`` only in place of rows that :func:`rank` puts lower. With ``own``, for rows that this process
    measured or checked, they are sealed.
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
            checksum(table, row),
            *([seal_of(sealed_text(table, row)) if own else None] if seals else []),
        )
        for row in new
    ]
    if not parameters:
        return 0
    db.executemany("REPLACE INTO name (text, id) VALUES (?, ?)", ids.items())
    return db.executemany(query, parameters).rowcount


def sealed_text(table: str, row: Row | StoredRow) -> str:
    """The text that a seal covers: all of a row, its table, and the version of the checks it passed."""
    return json.dumps([CHECK_VERSION, table, row.environment, row.problem, *rows.as_told(table, row.values)])


def checksum(table: str, row: Row | StoredRow) -> int:
    """The checksum of a row's keys and values."""
    return rows.checksum(row.environment, row.problem, *rows.as_told(table, row.values))


def is_own(row: StoredRow) -> bool:
    """Whether a process of this user made the row under the present checks, and nobody changed it since."""
    return row.seal is not None and sealed(sealed_text(row.table, row), row.seal)


def rank(table: str, row: Row) -> tuple[float, int]:
    """The order of rows with equal keys: the greatest is kept, whatever the order of merging. The newest is the
    greatest.

    Different rows of the same moment, which clocks hardly give, are ordered by their checksums.
    """
    recorded: float = row.values[rows.RECORDED[table]]
    return recorded, checksum(table, row)


def key_of(table: str, row: Row) -> tuple[Any, ...]:
    """The values of the columns :data:`KEYS`; a table has one row for each."""
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
    """Delete rows that meet every condition and return how many. ``solver`` and ``stale`` are for measurements."""
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


def delete_plans(db: sqlite3.Connection, plans: Iterable[StoredRow]) -> int:
    """Delete these plans and return how many there were."""
    query = "DELETE FROM plan WHERE environment = ? AND problem = ? AND constraints = ?"
    keys = [(key_id(plan.environment), key_id(plan.problem), plan.values[0]) for plan in plans]
    return db.executemany(query, keys).rowcount if keys else 0


def sweep(db: sqlite3.Connection) -> None:
    """Delete texts of keys that no row uses."""
    db.execute(
        """
        DELETE FROM name WHERE id NOT IN (
            SELECT environment FROM measurement UNION SELECT problem FROM measurement
            UNION SELECT environment FROM plan UNION SELECT problem FROM plan
            UNION SELECT environment FROM profile)
        """
    )


def counts(db: sqlite3.Connection) -> list[tuple[Any, ...]]:
    """By environment: its text, the numbers of problems, measurements, lost ones, plans and profiles, the newest time,
    and the number of measurements from a busy host.
    """
    # A timestamp that was tampered with need not be one.
    time = f"CASE WHEN typeof(recorded) = 'real' AND recorded BETWEEN 0 AND {rows.LAST_SECOND}"
    # By the environment's device, which its text begins with.
    most = f"CASE WHEN name.text LIKE 'device=cuda%' THEN {BUSY['cuda']} ELSE {BUSY['cpu']} END"
    return db.execute(
        f"""
        WITH kept (environment, problem, measurement, lost, plan, profile, time, load) AS (
            SELECT environment, problem, 1, reason <> '', 0, 0, {time} THEN recorded END,
                CASE WHEN typeof(load) = 'real' THEN load END FROM measurement
            UNION ALL SELECT environment, problem, 0, 0, 1, 0, {time} THEN recorded END, NULL FROM plan
            UNION ALL SELECT environment, NULL, 0, 0, 0, 1, {time} THEN recorded END, NULL FROM profile)
        SELECT name.text, count(DISTINCT problem), sum(measurement), sum(lost), sum(plan),
               sum(profile), coalesce(max(time), 0.0), coalesce(sum(load > {most}), 0)
        FROM kept JOIN name ON name.id = environment GROUP BY environment ORDER BY name.text
        """
    ).fetchall()
