"""Rows of a store and the values that they hold: one validator for everything that is read, whoever wrote it.

A row comes from a database or a document that anybody may have edited and any disk may have damaged. What does not pass
here never reaches the planner. What passes can be wrong but not dangerous: plans go through the planner's gate
(``planner/gate.py``), unless their seal says that they have.
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from tilewise.plan import Config, Error, Measurement, Plan, PlanFormatError
from tilewise.problems.limits import INT64_MAX

__all__ = [
    "MEASUREMENT",
    "PLAN",
    "PROFILE",
    "RECORDED",
    "RowError",
    "as_told",
    "checked_number",
    "checked_text",
    "checked_time",
    "checksum",
    "nodes",
    "pack_measurement",
    "pack_plan",
    "pack_profile",
    "parse_json",
    "unpack_measurement",
    "unpack_plan",
    "unpack_profile",
]

MEASUREMENT = (
    "solver",
    "version",
    "config",
    "time_ms",
    "workspace",
    "l2",
    "spread",
    "reason",
    "baseline_ms",
    "recorded",
    "host_ms",
    "baseline_host_ms",
    "dispersion",
    "runs",
    "load",
)
"""Columns of a measurement beside its environment and problem. Times in ms, ``workspace`` in bytes,
``l2`` and ``spread`` of :class:`~tilewise.plan.Error`, ``recorded`` in seconds since 1970. Those after it came
later, and are all ``None`` in rows of earlier versions."""
ADDED = 5
"""How many columns of a measurement came later."""
PLAN = ("constraints", "plan", "recorded")
PROFILE = ("profile", "recorded")
RECORDED = {"measurement": MEASUREMENT.index("recorded"), "plan": PLAN.index("recorded"), "profile": 1}
"""Where in a table's columns the time of recording stands."""
LAST_SECOND = 253402300799
"""The end of the year 9999 in seconds since 1970: later times have no date."""
LONGEST = {"config": 1 << 20, "plan": 1 << 22, "profile": 1 << 16, "reason": 1 << 14}
"""Most characters of a text, by its name; longer text is refused before it is parsed."""
NAME = 4096
"""Most characters of any other text."""

Values = tuple[Any, ...]


class RowError(PlanFormatError):
    """A row cannot be used. The message names the entry at fault."""


def checksum(*values: object) -> int:
    """CRC-32 of a row's keys and values, so that a damaged row is not taken for a measurement."""
    return zlib.crc32(json.dumps(values).encode("ascii"))


def as_told(table: str, values: Sequence[object]) -> Sequence[object]:
    """The ``values`` that a row's checksum and seal cover: all but columns that came later and say nothing.

    So those of a row that an earlier version wrote stay what they were.
    """
    if table == "measurement" and not any(value is not None for value in values[-ADDED:]):
        return values[:-ADDED]
    return values


def parse_json(text: str) -> Any:
    """Strict JSON: no NaN, no nesting that exhausts the stack. Raises :class:`RowError`."""

    def refuse(name: str) -> None:
        raise RowError(f"{name} is not a JSON number")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise RowError("JSON is nested too deeply") from error
    except RowError:
        raise
    except ValueError as error:
        raise RowError(f"not JSON: {error}") from error


def checked_text(name: str, value: object, *, empty: bool = False) -> str:
    """``value``, if it is UTF-8 text of bounded length, and not empty unless ``empty``.

    Raises :class:`RowError` naming the entry.
    """
    if not isinstance(value, str) or not (value or empty):
        raise RowError(f"{name}={value!r:.80}: expected text")
    if len(value) > LONGEST.get(name, NAME):
        raise RowError(
            f"{name}={value[:80]!r}...: has {len(value)} characters, at most {LONGEST.get(name, NAME)} would do"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{name}={value!r:.80}: {error.reason}") from error
    return value


def checked_number(name: str, value: object) -> float:
    """``value`` as a float when it is finite and not negative. Raises :class:`RowError`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RowError(f"{name}={value!r:.80}: expected a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise RowError(f"{name}: too large") from error
    if not math.isfinite(number) or number < 0:
        raise RowError(f"{name}={value!r:.80}: expected a finite number, not negative")
    # SQLite keeps no negative zero, so a checksum must not see one.
    return number + 0.0


def checked_time(name: str, value: object) -> float:
    """``value`` as seconds since 1970 that have a date. Raises :class:`RowError`."""
    seconds = checked_number(name, value)
    if seconds > LAST_SECOND:
        raise RowError(f"{name}={value!r:.80}: no date is that late")
    return seconds


def _optional(name: str, value: object) -> float | None:
    """``value`` checked as a number, or ``None``."""
    return None if value is None else checked_number(name, value)


def _integer(name: str, value: object) -> int:
    """``value``, if it is an integer that SQLite can hold and not negative. Raises :class:`RowError`."""
    if type(value) is not int or not 0 <= value <= INT64_MAX:
        raise RowError(f"{name}={value!r:.80}: expected an integer, not negative and below 2^63")
    return value


def _finite(config: Config) -> bool:
    """Whether all numbers in a config are finite."""
    return all(math.isfinite(value) for value in config.values() if isinstance(value, float))


@functools.lru_cache(maxsize=4096)
def _config(text: str) -> Config:
    """The config that ``text`` writes. Raises :class:`RowError` unless it is as tilewise writes it."""
    try:
        config = Config.from_json(parse_json(text))
    except RowError:
        raise
    except (ValueError, TypeError) as error:
        raise RowError(f"config: {error}") from error
    if not _finite(config) or config.key != text:
        raise RowError(f"config={text[:80]!r}: not as tilewise writes it")
    return config


def unpack_measurement(values: Sequence[object]) -> Measurement:
    """The measurement in columns :data:`MEASUREMENT`. Raises :class:`RowError` naming the fault."""
    solver, version, config, time_ms, workspace, l2, spread, reason, baseline_ms, recorded, *added = values
    host_ms, baseline_host_ms, dispersion, runs, load = added
    checked_time("recorded", recorded)
    if (l2 is None) != (spread is None):
        raise RowError("l2 and spread: expected both or neither")
    measurement = Measurement(
        solver=checked_text("solver", solver),
        version=_integer("version", version),
        config=_config(checked_text("config", config)),
        time_ms=_optional("time_ms", time_ms),
        workspace=None if workspace is None else _integer("workspace", workspace),
        error=None if l2 is None else Error(checked_number("l2", l2), checked_number("spread", spread)),
        reason=checked_text("reason", reason, empty=True),
        baseline_ms=_optional("baseline_ms", baseline_ms),
        host_ms=_optional("host_ms", host_ms),
        baseline_host_ms=_optional("baseline_host_ms", baseline_host_ms),
        dispersion=_optional("dispersion", dispersion),
        runs=None if runs is None else _integer("runs", runs),
        load=_optional("load", load),
    )
    if measurement.load is not None and measurement.load > 1:
        raise RowError(f"load={load!r:.80}: expected a share of the host's cores, from 0 to 1")
    if measurement.time_ms is None and not measurement.reason:
        raise RowError("time_ms=None with reason='': a measurement has a time or the reason it is lost")
    return measurement


def pack_measurement(measurement: Measurement, recorded: float) -> Values:
    """Values of the columns :data:`MEASUREMENT`, which :func:`unpack_measurement` reads back.

    Numbers of a lost candidate that are not finite are left out, as its reason is what is kept. Raises
    :class:`RowError` for any other number that is not finite or is negative, and for a measurement with neither time
    nor reason.
    """
    m, error = measurement, measurement.error
    times = {name: getattr(m, name) for name in ("time_ms", "baseline_ms", "host_ms", "baseline_host_ms")}
    if m.reason:
        times = {name: _if_finite(value) for name, value in times.items()}
        if error is not None and not (math.isfinite(error.l2) and math.isfinite(error.spread)):
            error = None
    values = (
        m.solver,
        m.version,
        m.config.key,
        _optional("time_ms", times["time_ms"]),
        m.workspace,
        None if error is None else checked_number("error.l2", error.l2),
        None if error is None else checked_number("error.spread", error.spread),
        # Library messages may hold bytes of any encoding, and be of any length.
        m.reason.encode("utf-8", "backslashreplace").decode()[: LONGEST["reason"]],
        _optional("baseline_ms", times["baseline_ms"]),
        recorded,
        _optional("host_ms", times["host_ms"]),
        _optional("baseline_host_ms", times["baseline_host_ms"]),
        _optional("dispersion", m.dispersion),
        m.runs,
        _optional("load", m.load),
    )
    unpack_measurement(values)
    return values


def _if_finite(value: float | None) -> float | None:
    """``value``, or ``None`` where it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def nodes(plan: Plan) -> Iterator[Plan]:
    """Every plan of the tree, the root first."""
    yield plan
    for child in plan.children:
        yield from nodes(child)


def unpack_plan(problem: str, values: Sequence[object]) -> Plan:
    """The plan for ``problem`` in columns :data:`PLAN`. Raises :class:`RowError` naming the fault."""
    constraints, text, recorded = values
    checked_text("constraints", constraints, empty=True)
    checked_time("recorded", recorded)
    return read_plan(problem, parse_json(checked_text("plan", text)))


def read_plan(problem: str, data: object) -> Plan:
    """The plan for ``problem`` in a JSON document. Raises :class:`RowError` naming the fault."""
    try:
        plan = Plan.from_json(data)
    except (ValueError, TypeError, OverflowError) as error:
        raise RowError(f"plan: {error}") from error
    if plan.problem != problem:
        raise RowError(f"plan.problem={plan.problem[:80]!r}: the plan is kept for {problem[:80]!r}")
    for node in nodes(plan):
        checked_text("plan.solver", node.solver)
        _integer("plan.version", node.version)
        _integer("plan.workspace", node.workspace)
        _integer("plan.constant", node.constant)
        if node.error is not None:
            checked_number("plan.error", node.error.l2)
            checked_number("plan.error", node.error.spread)
        if not _finite(node.config):
            raise RowError("plan.config: expected finite numbers")
    return plan


def pack_plan(problem: str, constraints: str, plan: Plan, recorded: float) -> Values:
    """Values of the columns :data:`PLAN`. Raises :class:`RowError` for what could not be read back."""
    try:
        text = json.dumps(plan.to_json(), separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise RowError(f"plan: {error}") from error
    values = (constraints, text, recorded)
    unpack_plan(problem, values)
    return values


def unpack_profile(values: Sequence[object]) -> dict[str, float]:
    """The profile in columns :data:`PROFILE`. Raises :class:`RowError` naming the fault."""
    text, recorded = values
    checked_time("recorded", recorded)
    return read_profile(parse_json(checked_text("profile", text)))


def read_profile(data: object) -> dict[str, float]:
    """The profile in a JSON document. Raises :class:`RowError` naming the entry at fault."""
    if not isinstance(data, dict):
        raise RowError(f"profile must be an object, not {type(data).__name__}")
    return {
        checked_text("profile", name): checked_number(f"profile[{name!r:.80}]", value) for name, value in data.items()
    }


def pack_profile(profile: dict[str, float], recorded: float) -> Values:
    """Values of the columns :data:`PROFILE`. Raises :class:`RowError` for what could not be read back."""
    return (json.dumps(read_profile(dict(profile)), separators=(",", ":")), recorded)
