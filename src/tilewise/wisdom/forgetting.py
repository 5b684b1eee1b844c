"""Deleting rows of a store by what they are about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tilewise.wisdom import rows, tables
from tilewise.wisdom.reader import unpack_plan
from tilewise.wisdom.tables import StoredRow

if TYPE_CHECKING:
    import sqlite3

__all__ = ["delete_matching"]


def delete_matching(
    db: sqlite3.Connection,
    *,
    problem_contains: str | None,
    solver: str | None,
    environment: str | None,
    stale: Mapping[str, int] | None,
) -> int:
    """Delete rows of all tables that meet every condition, as :meth:`~tilewise.wisdom.Wisdom.forget` has them.

    Returns their number.
    """
    gone = tables.delete(
        db, "measurement", environment=environment, problem_contains=problem_contains, solver=solver, stale=stale
    )
    if solver is not None or stale is not None:
        gone += _delete_plans(db, solver, stale, environment, problem_contains)
    else:
        gone += tables.delete(db, "plan", environment=environment, problem_contains=problem_contains)
        if problem_contains is None:
            gone += tables.delete(db, "profile", environment=environment)
    tables.sweep(db)
    return gone


def _delete_plans(
    db: sqlite3.Connection,
    solver: str | None,
    stale: Mapping[str, int] | None,
    environment: str | None,
    problem_contains: str | None,
) -> int:
    """Delete plans that meet every condition; returns their number."""
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


def _concerns(row: StoredRow, solver: str | None, stale: Mapping[str, int] | None) -> bool:
    """Whether a plan uses ``solver`` and a stale version. One that cannot be read counts as stale."""
    try:
        used = list(rows.nodes(unpack_plan(row)))
    except rows.RowError:
        return solver is None
    return (solver is None or any(node.solver == solver for node in used)) and (
        stale is None or any(stale.get(node.solver, node.version) != node.version for node in used)
    )
