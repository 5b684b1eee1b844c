"""Rows of comparisons with peers: a process for each network, and what earlier runs measured is kept."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.machine import commit
from harness.peer_race import MODES, OURS, SIDES, Race
from harness.registry import FOLDER
from harness.result import Bar, Result, Row, Side, geometric_mean
from harness.settings import BadInput, NothingToMeasure, Settings

__all__ = ["BEST", "COMPILED", "TRAINING", "Case", "cases_of", "measured"]

BEST, COMPILED, TRAINING = "best of ours over the best peer", "torch.compile with and without us", "training step"
"""The groups of rows that have bars; rows of one peer are grouped by its name."""


@dataclass(frozen=True)
class Case:
    """One network with its batch and mode, and the least ratio that it must reach over the best peer."""

    network: str
    batch: int
    mode: str
    dtype: str
    least: float | None = None

    @property
    def name(self) -> str:
        """As in tables: ``resnet50, batch 8``."""
        short = self.network.partition(":")[2] or self.network
        words = [short, f"batch {self.batch}", *(["bf16"] if self.dtype == "bf16" else [])]
        return ", ".join(words)


def cases_of(settings: Settings, known: Mapping[str, float | None]) -> list[Case]:
    """What the option ``cases`` names, ``network@batch@mode@dtype`` each, or all ``known``.

    Raises :class:`BadInput`.
    """
    found = []
    for text in settings.words("cases") or list(known):
        words = text.rsplit("@", 3)
        if len(words) != 4 or not words[1].isdecimal() or words[2] not in MODES or words[3] not in ("fp32", "bf16"):
            raise BadInput(f"cases={text!r}: network@batch@mode@dtype with mode {' or '.join(MODES)} would do")
        found.append(Case(words[0], int(words[1]), words[2], words[3], known.get(text)))
    return found


def measured(settings: Settings, cases: list[Case], sides: Mapping[str, tuple[str, ...]]) -> Result:
    """Rows of all cases, those of an earlier run included, with ``sides`` by mode. Saves after each network."""
    deadline = settings.deadline()
    races = _earlier(settings)
    notes: list[str] = []
    for case in cases:
        key = f"{case.name}, {case.mode}"
        if key in races:
            continue
        if deadline.passed:
            notes.append(f"out of time before {key}")
            continue
        named = settings.chosen("sides", {name: name for name in SIDES})
        chosen = tuple(name for name in sides[case.mode] if name in named)
        race = Race(
            case.network, case.batch, case.mode, case.dtype, str(settings.device), settings.text("layout"), chosen,
            settings.text("rigor"), settings.integer("rounds"), settings.integer("round_ms"),
        )  # fmt: skip
        try:
            races[key] = {**_in_a_process(settings, race), "tilewise": commit()}
        except NothingToMeasure as error:
            notes.append(f"{key}: {error}")
            settings.say(f"  {key}: {error}")
            continue
        settings.keep(_result(settings, cases, races, [*notes, f"ended after {key}"]))
        for row in _rows(case, races[key]):
            settings.say(f"  {row.name}, {row.baseline.what} and {row.ours.what}: {row.ratio:.2f}x")
    return _result(settings, cases, races, notes)


def _in_a_process(settings: Settings, race: Race) -> dict[str, Any]:
    """What the race measured. Raises :class:`NothingToMeasure` with the end of what a failing process said."""
    with tempfile.TemporaryDirectory() as folder, settings.cache_directory():
        path = Path(folder) / "race.json"
        command = [sys.executable, "-m", "harness.peer_race", str(path)]
        seconds = settings.integer("network_s")
        try:
            done = subprocess.run(
                command, input=race.to_json(), cwd=FOLDER, text=True, timeout=seconds, check=False,
                stderr=None if not settings.quick else subprocess.PIPE,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise NothingToMeasure(f"took more than network_s={seconds} s") from error
        if done.returncode or not path.exists():
            said = (done.stderr or "").strip().splitlines()[-1:]
            raise NothingToMeasure(f"its process ended with {done.returncode} {' '.join(said)}")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def _earlier(settings: Settings) -> dict[str, dict[str, Any]]:
    """Races of an earlier run in the same settings."""
    found = settings.earlier_with("rigor", "layout", "sides", "rounds", "round_ms")
    return {} if found is None else dict(found["summary"]["facts"].get("races", {}))


def _result(settings: Settings, cases: list[Case], races: Mapping[str, Mapping[str, Any]], notes: list[str]) -> Result:
    rows = [row for case in cases for row in _rows(case, races.get(f"{case.name}, {case.mode}"))]
    for key, race in races.items():
        notes = [*notes, *(f"{key}: without {name} ({reason})" for name, reason in race["missing"].items())]
    return Result(rows, _bars(settings, cases, rows), {"races": dict(races)}, notes)


def _rows(case: Case, race: Mapping[str, Any] | None) -> list[Row]:
    """The best of both, and our best over each peer that ran; none where a side of the comparison is missing."""
    if race is None:
        return []
    sides = {name: Side(name, found["ms"]) for name, found in race["sides"].items()}
    ours = [side for name, side in sides.items() if name.startswith(OURS)]
    others = [side for name, side in sides.items() if not name.startswith(OURS)]
    if not ours or not others:
        return []
    best, peer = min(ours, key=lambda side: side.value), min(others, key=lambda side: side.value)
    details = {"case": case.network, "batch": case.batch, "mode": case.mode, "dtype": case.dtype,
               "sides": race["sides"], "tilewise": race["tilewise"]}  # fmt: skip
    planned = bool(race["sides"][best.what].get("by_plan", 1))  # earlier runs did not count
    if case.mode == "train":
        return [Row(case.name, TRAINING, peer, best, replaced=planned, details=details)]
    rows = [Row(case.name, BEST, peer, best, replaced=planned, details=details)]
    rows += [Row(case.name, f"over {side.what}", side, best, replaced=planned) for side in others]
    for name in [name for name in sides if name.startswith("compile")]:
        with_us = OURS + " compiled" + name.removeprefix("compile")
        if with_us in sides:
            rows.append(Row(case.name, COMPILED, sides[name], sides[with_us]))
    return rows


def _bars(settings: Settings, cases: list[Case], rows: list[Row]) -> list[Bar]:
    """Each case's own, the mean of those that have one and of the others, and that compiling never loses."""
    applies = not settings.quick
    best = {row.name: row for row in rows if row.group in (BEST, TRAINING)}
    bars = [
        Bar(f"{case.name}, {MODES[case.mode]}, over the best peer", best[case.name].ratio, least=case.least,
            applies=applies and case.least is not None)
        for case in cases
        if case.name in best and case.mode == best[case.name].details["mode"]
    ]  # fmt: skip
    inference = [case for case in cases if case.mode == "infer" and case.name in best]
    own = [best[case.name].ratio for case in inference if case.least is not None]
    other = [best[case.name].ratio for case in inference if case.least is None]
    bars.append(Bar("geometric mean over the best peer, networks with a bar", geometric_mean(own), least=1.15,
                    applies=applies and bool(own)))  # fmt: skip
    bars.append(Bar("geometric mean over the best peer, the other networks", geometric_mean(other), least=1.0,
                    applies=applies and bool(other)))  # fmt: skip
    errors = [
        side["error"]
        for row in rows
        if row.group == BEST and row.details["dtype"] == "fp32"
        for name, side in row.details["sides"].items()
        if name.startswith(OURS)
    ]
    if errors:
        bars.append(Bar("largest error of ours, relative norm against float64", max(errors), most=2e-5))
    pairs = [row.ratio for row in rows if row.group == COMPILED]
    if pairs:
        bars.append(Bar("least gain of torch.compile from us", min(pairs), least=0.99, applies=applies))
    return bars
