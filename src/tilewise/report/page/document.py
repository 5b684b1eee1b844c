"""What the page shows, read from a document: everything used is checked, what is absent or null stays out.

The document may come from anywhere. A value of the wrong type, a number that is none or beyond 2^63, a negative size or
time raises :class:`DocumentError`, which names the place; so whatever is read can be drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from tilewise.plan import Config, Error, Measurement, Plan, format_bytes
from tilewise.report.page.contents import (
    Budget,
    Layer,
    Moment,
    Part,
    Report,
    Segment,
    Side,
    Step,
    Totals,
    Training,
)

__all__ = ["DocumentError", "read"]

SCHEMAS = {"tilewise/plan": 1, "tilewise/time": 1}
"""Schemas that make a page, and the version that is read."""
GREATEST = 2**63


class DocumentError(ValueError):
    """A document that no page can be made of; the message names the place, the value and what would do."""


class Fields:
    """An object of the document and where it stands; getters give ``None`` for what is absent or null."""

    def __init__(self, data: object, place: str) -> None:
        if not isinstance(data, dict):
            raise DocumentError(f"{place or 'the document'}: an object would do, not {_shown(data)}")
        self._data, self.place = data, place

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def where(self, name: str) -> str:
        """The place of a field."""
        return f"{self.place}.{name}" if self.place else name

    def _refuse(self, name: str, wanted: str) -> DocumentError:
        return DocumentError(f"{self.where(name)}={_shown(self._data[name])}: {wanted} would do")

    def text(self, name: str) -> str:
        """Text; empty where it is absent."""
        value = self._data.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self._refuse(name, "text")
        return value

    def value(self, name: str) -> object:
        """Whatever is there."""
        return self._data.get(name)

    def flag(self, name: str) -> bool | None:
        """A truth value."""
        value = self._data.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._refuse(name, "true or false")
        return value

    def number(self, name: str) -> float | None:
        """A finite number that is not negative."""
        value = self._data.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < GREATEST:
            raise self._refuse(name, "a number from 0 on")
        return value

    def integer(self, name: str) -> int | None:
        """A whole number that is not negative."""
        value = self._data.get(name)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < GREATEST:
            raise self._refuse(name, "a whole number from 0 on")
        return value

    def part(self, name: str) -> Fields | None:
        """An object in it."""
        value = self._data.get(name)
        return None if value is None else Fields(value, self.where(name))

    def entries(self, name: str) -> list[tuple[object, str]] | None:
        """A list's entries, each with its place."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self._refuse(name, "a list")
        return [(entry, f"{self.where(name)}[{i}]") for i, entry in enumerate(value)]

    def objects(self, name: str) -> list[Fields]:
        """A list's entries, which are objects; none where it is absent."""
        return [Fields(entry, place) for entry, place in self.entries(name) or ()]

    def texts(self, name: str) -> tuple[str, ...]:
        """A list's entries, which are text; none where it is absent."""
        found = self.entries(name) or ()
        for entry, place in found:
            if not isinstance(entry, str):
                raise DocumentError(f"{place}={_shown(entry)}: text would do")
        return tuple(str(entry) for entry, _ in found)

    def plan(self, name: str) -> Plan | None:
        """A plan, as :meth:`Plan.to_json` writes it."""
        value = self._data.get(name)
        return None if value is None else _plan(value, self.where(name))


def read(document: object) -> Report:
    """What a ``tilewise/plan`` or ``tilewise/time`` document says. Raises :class:`DocumentError`."""
    top = Fields(document, "")
    schema = top.text("schema")
    if schema not in SCHEMAS:
        raise DocumentError(f"schema={_shown(schema)}: {' or '.join(SCHEMAS)} would do")
    if top.integer("version") != SCHEMAS[schema]:
        raise DocumentError(f"version={top.integer('version')}: this tilewise reads version {SCHEMAS[schema]}")
    options = top.part("options") or Fields({}, "options")
    numbers = itertools.count()
    return Report(
        target=top.text("target"),
        device=top.text("device"),
        environment=top.text("environment"),
        version=top.text("tilewise"),
        options=_options(options),
        workspace=options.integer("workspace"),
        rigor=options.text("rigor"),
        layers=tuple(_layer(fields, numbers) for fields in top.objects("layers")),
        totals=_totals(top.part("summary")),
        training=_training(top.part("training_step")),
        budget=_budget(top.part("budget")),
        step=_step(top.part("step")),
    )


def _options(fields: Fields) -> tuple[tuple[str, str], ...]:
    batch, limit, same = fields.integer("batch"), fields.integer("workspace"), fields.flag("deterministic")
    pairs = {
        "mini-batch": "" if batch is None else str(batch),
        "operands": fields.text("dtype"),
        "products": fields.text("precision"),
        "layout": fields.text("layout"),
        "workspace per kernel": "no limit" if limit is None else f"at most {format_bytes(limit)}",
        "batch sizes": fields.text("batch_sizes"),
        "rigor": fields.text("rigor"),
        "deterministic": "" if same is None else "only" if same else "not asked for",
        "solvers left out": ", ".join(fields.texts("exclude")),
    }
    if "workspace" not in fields:
        del pairs["workspace per kernel"]
    return tuple((name, text) for name, text in pairs.items() if text)


def _layer(fields: Fields, numbers: Iterator[int]) -> Layer:
    names = fields.texts("names") or ("unnamed",)
    title = names[0] + (f" x{len(names)}" if len(names) > 1 else "")
    return Layer(
        title,
        names,
        bool(fields.flag("transposed")),
        fields.text("left"),
        tuple(_part(one, next(numbers), title, names) for one in fields.objects("passes")),
    )


def _part(fields: Fields, number: int, title: str, names: tuple[str, ...]) -> Part:
    problem = fields.part("problem") or Fields({}, fields.where("problem"))
    front, candidates = fields.entries("front"), fields.entries("candidates")
    return Part(
        number=number,
        title=title,
        names=names,
        pass_=problem.text("pass"),
        text=problem.text("layer"),
        key=problem.text("key"),
        flops=problem.integer("flops"),
        bytes=problem.integer("bytes"),
        replaced=bool(fields.flag("replaced")),
        plan=fields.plan("plan"),
        reason=fields.text("reason"),
        framework_ms=fields.number("framework_ms"),
        planned_ms=fields.number("planned_ms"),
        ratio=fields.number("ratio"),
        front=None if front is None else tuple(_plan(entry, place) for entry, place in front),
        candidates=None if candidates is None else tuple(_candidate(Fields(*entry)) for entry in candidates),
    )


def _plan(value: object, place: str) -> Plan:
    try:
        plan = Plan.from_json(value)
    except ValueError as error:
        raise DocumentError(f"{place}: {str(error)[:300]}") from error
    _check_sizes(plan, place)
    return plan


def _check_sizes(plan: Plan, place: str) -> None:
    """Sizes and counts that are to be drawn; a plan as such may hold any."""
    if any(not 0 <= size < GREATEST for size in (plan.workspace, plan.constant, *plan.counts)):
        raise DocumentError(f"{place}: workspace, constant and counts of a plan must be below 2^63")
    _config(plan.config.to_json(), place)
    for child in plan.children:
        _check_sizes(child, place)


def _config(data: object, place: str) -> Config:
    try:
        config = Config.from_json(data)
    except ValueError as error:
        raise DocumentError(f"{place}: {str(error)[:300]}") from error
    for name, value in config.items():
        if any(isinstance(v, int) and abs(v) >= GREATEST for v in (value if isinstance(value, tuple) else (value,))):
            raise DocumentError(f"{place}: config[{name[:80]!r}] must be below 2^63")
    return config


def _candidate(fields: Fields) -> Measurement:
    error = fields.part("error")
    distances = [] if error is None else [error.number(name) for name in ("l2", "spread")]
    return Measurement(
        fields.text("solver"),
        fields.integer("version") or 0,
        _config(fields.value("config") or {}, fields.where("config")),
        time_ms=fields.number("time_ms"),
        workspace=fields.integer("workspace"),
        error=Error(*(math.nan if x is None else x for x in distances)) if distances else None,
        reason=fields.text("reason"),
        baseline_ms=fields.number("framework_ms"),
    )


def _totals(fields: Fields | None) -> Totals | None:
    if fields is None:
        return None
    counts = (fields.integer(name) for name in ("passes", "replaced", "divided", "unplanned", "compared"))
    values = (fields.number(name) for name in ("framework_ms", "planned_ms", "geometric_mean", "worst"))
    return Totals(*counts, *values)


def _training(fields: Fields | None) -> Training | None:
    if fields is None:
        return None
    sides = [_side(fields.part(name)) for name in ("framework", "planned")]
    return Training(fields.integer("iterations"), fields.number("ratio"), *sides)


def _side(fields: Fields | None) -> Side:
    if fields is None:
        return Side(None, None, None, None)
    forward, backward, step = (fields.number(name) for name in ("forward_ms", "backward_ms", "step_ms"))
    return Side(forward, backward, step, fields.integer("peak"))


def _budget(fields: Fields | None) -> Budget | None:
    if fields is None:
        return None
    program = fields.part("program") or Fields({}, fields.where("program"))
    return Budget(
        policy=fields.text("policy"),
        total=fields.integer("total"),
        used=fields.integer("used"),
        least=fields.integer("least"),
        segments=tuple(
            Segment(one.text("layer"), one.text("pass"), one.integer("workspace") or 0, one.number("time_ms"))
            for one in fields.objects("segments")
        ),
        variables=program.integer("variables"),
        rows=program.integer("rows"),
        solve_ms=program.number("solve_ms"),
        optimal=program.flag("optimal"),
        method=program.text("method"),
    )


def _step(fields: Fields | None) -> Step | None:
    if fields is None:
        return None
    moments = (
        Moment(
            one.text("layer"), one.text("pass"), *(one.integer(name) or 0 for name in ("alive", "result", "workspace"))
        )
        for one in fields.objects("moments")
    )
    limit, peak, least = (fields.integer(name) for name in ("limit", "peak", "least"))
    return Step(limit, peak, least, tuple(moments))


def _shown(value: object) -> str:
    """A value in a message, not all of a long one."""
    if isinstance(value, (dict, list)):
        return f"a{'n object' if isinstance(value, dict) else ' list'}"
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
