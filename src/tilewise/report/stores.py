"""Tables of what is kept on disk: wisdom and compiled kernels. They need no torch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.markup import escape

from tilewise.plan import format_bytes
from tilewise.report.sheet import Sheet

if TYPE_CHECKING:
    from tilewise.kernels.packs.summary import Held
    from tilewise.wisdom import Summary

__all__ = ["kernels_table", "wisdom_table"]


def wisdom_table(path: str, summaries: Sequence[Summary]) -> Sheet:
    """What a store holds, by environment."""
    table = Sheet(
        (("problems", "right"), ("measurements", "right"), ("lost", "right"), ("busy", "right"), ("plans", "right"),
         ("newest", ""), ("environment", "note")),
        title=f"{escape(path)}: {'nothing yet' if not summaries else 'measured and planned'}",
    )  # fmt: skip
    for summary in summaries:
        newest = datetime.fromtimestamp(summary.newest, UTC).strftime("%Y-%m-%d %H:%M UTC")
        counts = (summary.problems, summary.measurements, summary.lost, summary.busy, summary.plans)
        table.add_row(*map(str, counts), newest, escape(summary.environment))
    return table


def kernels_table(path: str, held: Sequence[Held]) -> Sheet:
    """The compiled kernels in a pack, or in the caches of this user, by what they are for."""
    columns = [("kind", ""), ("for", ""), ("files", "right"), ("size", "right"), ("of no use here, because", "note")]
    told = [*columns] if any(each.obstacle for each in held) else columns[:-1]
    table = Sheet(told, title=f"{escape(path)}: {'compiled kernels' if held else 'no kernels yet'}")
    for each in held:
        row = (each.kind, each.target, str(each.files), format_bytes(each.bytes), escape(each.obstacle))
        table.add_row(*row[: len(told)])
    return table
