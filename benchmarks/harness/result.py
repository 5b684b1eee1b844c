"""What a benchmark finds: rows with both sides of each ratio, and the bars they are held against."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SCHEMA = 1
"""Raise when a field of the saved JSON changes its meaning or goes."""


@dataclass(frozen=True)
class Side:
    """One side of a ratio: what was run and how long it took, in the row's unit."""

    what: str
    value: float


@dataclass(frozen=True)
class Row:
    """One comparison, both sides measured in the same run. ``ratio`` above 1 means ``ours`` is faster.

    ``replaced`` is False where the planner left the layer to the framework; its ratio then counts as 1.
    """

    name: str
    group: str
    baseline: Side
    ours: Side
    unit: str = "ms"
    replaced: bool = True
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """How many times faster ``ours`` is."""
        return self.baseline.value / self.ours.value if self.replaced else 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "group": self.group,
            "unit": self.unit,
            "baseline": {"what": self.baseline.what, "value": self.baseline.value},
            "ours": {"what": self.ours.what, "value": self.ours.value},
            "ratio": self.ratio,
            "replaced": self.replaced,
            "details": self.details,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Row:
        """What :meth:`to_json` gave."""
        sides = (Side(value[side]["what"], value[side]["value"]) for side in ("baseline", "ours"))
        return cls(value["name"], value["group"], *sides, value["unit"], value["replaced"], value["details"])


@dataclass(frozen=True)
class Bar:
    """A number to reach: ``value`` at least ``least`` or at most ``most``.

    ``applies`` is False where the bar was not set for this device or these settings: it is then reported, not judged.
    """

    text: str
    value: float
    least: float | None = None
    most: float | None = None
    applies: bool = True

    @property
    def met(self) -> bool | None:
        """Whether the bar is reached; ``None`` where it is not judged."""
        if not self.applies or math.isnan(self.value):
            return None
        high_enough = self.least is None or self.value >= self.least
        return high_enough and (self.most is None or self.value <= self.most)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        value = None if math.isnan(self.value) else self.value
        return {"text": self.text, "value": value, "least": self.least, "most": self.most, "met": self.met}


@dataclass(frozen=True)
class Result:
    """What ``run`` of a benchmark returns. ``facts`` are single numbers that are no ratio; ``notes`` are sentences."""

    rows: Sequence[Row]
    bars: Sequence[Bar] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def summary(self) -> dict[str, Any]:
        """Geometric mean, least and greatest ratio of each group of rows, and the bars."""
        groups = dict.fromkeys(row.group for row in self.rows)
        return {
            "groups": {name: spread([r for r in self.rows if r.group == name]) for name in groups},
            "bars": [bar.to_json() for bar in self.bars],
            "facts": self.facts,
            "notes": list(self.notes),
        }


def geometric_mean(values: Sequence[float]) -> float:
    """NaN for none."""
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else math.nan


def spread(rows: Sequence[Row]) -> dict[str, Any]:
    """Geometric mean, least, greatest, number of rows and the share that was replaced."""
    ratios = [row.ratio for row in rows]
    return {
        "geometric_mean": geometric_mean(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "rows": len(rows),
        "replaced": sum(row.replaced for row in rows),
    }


def least_replaced(rows: Sequence[Row]) -> float:
    """The least ratio among replaced rows; NaN when none was."""
    return min((row.ratio for row in rows if row.replaced), default=math.nan)
