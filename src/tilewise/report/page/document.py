"""Reading a document for the page: everything used is checked, and what is absent or null is left out.

The document may come from anywhere. A value of the wrong type, a number that is not finite or not below 2^63, a
negative size or time raises :class:`DocumentError`, which names the place. So whatever is read can be drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from tilewise.plan import Config, Error, Measurement, Plan, format_bytes
from tilewise.problems.limits import INT64_MAX
from tilewise.report.page.contents import (
    Budget,
    Compared,
    Layer,
    Moment,
    Part,
    Rates,
    Report,
    Segment,
    Side,
    Step,
    Totals,
    Training,
)

__all__ = ["DocumentError", "Fields", "read"]

SCHEMAS = {"tilewise/plan": 2, "tilewise/time": 1}
"""Schemas of documents that can be shown, with the version that is read."""


class DocumentError(ValueError):
    """The document cannot be shown. The message names the place, the value and what would do."""


class Fields:
    """An object of the document and its place in it.

    Getters return ``None`` for what is absent or null, and raise :class:`DocumentError` for a value of the wrong type.
    """

    def __init__(self, data: object, place: str) -> None:
        if not isinstance(data, dict):
            raise DocumentError(f"{place or 'the document'}: an object would do, not {_shown(data)}")
        self._data, self.place = data, place

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def where(self, name: str) -> str:
        """The place of a field, for messages."""
        return f"{self.place}.{name}" if self.place else name

    def _refuse(self, name: str, wanted: str) -> DocumentError:
        """The error for the value of a field; ``wanted`` says what would do."""
        return DocumentError(f"{self.where(name)}={_shown(self._data[name])}: {wanted} would do")

    def text(self, name: str) -> str:
        """The text of a field; empty where it is absent."""
        value = self._data.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self._refuse(name, "text")
        return value

    def value(self, name: str) -> object:
        """The value of a field, whatever it is."""
        return self._data.get(name)

    def flag(self, name: str) -> bool | None:
        """A field that is true or false."""
        value = self._data.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._refuse(name, "true or false")
        return value

    def number(self, name: str) -> float | None:
        """A field that is a finite number and not negative."""
        value = self._data.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= INT64_MAX:
            raise self._refuse(name, "a number from 0 on")
        return value

    def integer(self, name: str) -> int | None:
        """A field that is a whole number and not negative."""
        value = self._data.get(name)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value <= INT64_MAX:
            raise self._refuse(name, "a whole number from 0 on")
        return value

    def part(self, name: str) -> Fields | None:
        """A field that is an object."""
        value = self._data.get(name)
        return None if value is None else Fields(value, self.where(name))

    def entries(self, name: str) -> list[tuple[object, str]] | None:
        """The entries of a field that is a list, each with its place."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self._refuse(name, "a list")
        return [(entry, f"{self.where(name)}[{i}]") for i, entry in enumerate(value)]

    def objects(self, name: str) -> list[Fields]:
        """The entries of a list of objects; empty where it is absent."""
        return [Fields(entry, place) for entry, place in self.entries(name) or ()]

    def texts(self, name: str) -> tuple[str, ...]:
        """The entries of a list of text; empty where it is absent."""
        entries = self.entries(name) or ()
        for entry, place in entries:
            if not isinstance(entry, str):
                raise DocumentError(f"{place}={_shown(entry)}: text would do")
        return tuple(str(entry) for entry, _ in entries)

    def plan(self, name: str) -> Plan | None:
        """A field that is a plan, as :meth:`Plan.to_json` writes it."""
        value = self._data.get(name)
        return None if value is None else _plan(value, self.where(name))


def read(document: object) -> Report:
    """The contents of a ``tilewise/plan`` or ``tilewise/time`` document. Raises :class:`DocumentError`."""
    top = Fields(document, "")
    schema = top.text("schema")
    if schema not in SCHEMAS:
        known = f"{', '.join(SCHEMAS)} or tilewise/advise"
        raise DocumentError(f"schema={_shown(schema)}: {known} would do, as 'tilewise plan NET --json' prints one")
    version = top.integer("version")
    if version is None or not 1 <= version <= SCHEMAS[schema]:
        raise DocumentError(f"version={version}: this tilewise reads versions up to {SCHEMAS[schema]}")
    options = top.part("options") or Fields({}, "options")
    numbers = itertools.count()
    training = top.part("training_step")
    taken_back = frozenset(training.texts("taken_back") if training is not None else ())
    return Report(
        target=top.text("target"),
        device=top.text("device"),
        environment=top.text("environment"),
        version=top.text("tilewise"),
        options=_options(options),
        workspace=options.integer("workspace"),
        rigor=options.text("rigor"),
        layers=tuple(_layer(fields, numbers, taken_back) for fields in top.objects("layers")),
        totals=_totals(top.part("summary")),
        training=_training(training),
        budget=_budget(top.part("budget")),
        step=_step(top.part("step_memory" if "step_memory" in top else "step")),  # version 1 has the latter
        in_turns=schema == "tilewise/time",
        rates=_rates(top.part("rates")),
    )


def _rates(fields: Fields | None) -> Rates | None:
    """What the device was measured to reach, if the document says it."""
    if fields is None:
        return None
    moved, computed = fields.number("bytes_per_second"), fields.number("flops_per_second")
    return Rates(moved, computed) if moved and computed else None


def _options(fields: Fields) -> tuple[tuple[str, str], ...]:
    """Names and texts of the options that the document has."""
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
        "batches shared with": ", ".join(fields.texts("share_with")),
    }
    if "workspace" not in fields:
        del pairs["workspace per kernel"]
    return tuple((name, text) for name, text in pairs.items() if text)


def _layer(fields: Fields, numbers: Iterator[int], taken_back: frozenset[str]) -> Layer:
    """One layer; ``numbers`` counts passes over all layers, ``taken_back`` are keys of problems left to torch."""
    names = fields.texts("names") or ("unnamed",)
    title = names[0] + (f" x{len(names)}" if len(names) > 1 else "")
    return Layer(
        title,
        names,
        bool(fields.flag("transposed")),
        fields.text("left"),
        tuple(_part(pass_fields, next(numbers), title, names, taken_back) for pass_fields in fields.objects("passes")),
    )


def _part(fields: Fields, number: int, title: str, names: tuple[str, ...], taken_back: frozenset[str]) -> Part:
    """One pass of a layer."""
    problem = fields.part("problem") or Fields({}, fields.where("problem"))
    front, candidates = fields.entries("front"), fields.entries("candidates")
    framework_ms, planned_ms = fields.number("framework_ms"), fields.number("planned_ms")
    # The times say what the ratio is: a document in which they differ shall not show both.
    ratio = framework_ms / planned_ms if framework_ms is not None and planned_ms else fields.number("ratio")
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
        framework_ms=framework_ms,
        planned_ms=planned_ms,
        ratio=ratio,
        front=None if front is None else tuple(_plan(entry, place) for entry, place in front),
        candidates=None if candidates is None else tuple(_candidate(Fields(*entry)) for entry in candidates),
        device=problem.text("device") or "cpu",
        framework_host_ms=fields.number("framework_host_ms"),
        planned_host_ms=fields.number("planned_host_ms"),
        busy=bool(fields.flag("busy")),
        taken_back=problem.text("key") in taken_back,
    )


def _plan(value: object, place: str) -> Plan:
    """A plan. Raises :class:`DocumentError` where it is none."""
    try:
        plan = Plan.from_json(value)
    except ValueError as error:
        raise DocumentError(f"{place}: {str(error)[:300]}") from error
    _check_sizes(plan, place)
    return plan


def _check_sizes(plan: Plan, place: str) -> None:
    """Raise :class:`DocumentError` for sizes or counts too large to draw; a plan as such may hold any."""
    if any(not 0 <= size <= INT64_MAX for size in (plan.workspace, plan.constant, *plan.counts)):
        raise DocumentError(f"{place}: workspace, constant and counts of a plan must be below 2^63")
    _config(plan.config.to_json(), place)
    for child in plan.children:
        _check_sizes(child, place)


def _config(data: object, place: str) -> Config:
    """A config. Raises :class:`DocumentError` where it is none."""
    try:
        config = Config.from_json(data)
    except ValueError as error:
        raise DocumentError(f"{place}: {str(error)[:300]}") from error
    for name, value in config.items():
        if any(isinstance(v, int) and abs(v) > INT64_MAX for v in (value if isinstance(value, tuple) else (value,))):
            raise DocumentError(f"{place}: config[{name[:80]!r}] must be below 2^63")
    return config


def _candidate(fields: Fields) -> Measurement:
    """The measurement of a solver and config that was tried, from its ``fields``."""
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
        host_ms=fields.number("host_ms"),
        baseline_host_ms=fields.number("framework_host_ms"),
        dispersion=fields.number("dispersion"),
        runs=fields.integer("runs"),
        load=fields.number("load"),
    )


def _totals(fields: Fields | None) -> Totals | None:
    """The summary, if the document has one."""
    if fields is None:
        return None
    counts = (fields.integer(name) for name in ("passes", "replaced", "divided", "unplanned", "compared"))
    names = ("framework_ms", "planned_ms", "geometric_mean", "worst", "framework_host_ms", "planned_host_ms")
    return Totals(*counts, *(fields.number(name) for name in names))


def _training(fields: Fields | None) -> Training | None:
    """The training steps, if the document has them."""
    if fields is None:
        return None
    framework, planned = (_side(fields.part(name)) for name in ("framework", "planned"))
    return Training(fields.integer("iterations"), framework, planned, _compared(fields.part("compared")))


def _compared(fields: Fields | None) -> Compared | None:
    """How whole steps compared, if the document says so."""
    if fields is None:
        return None
    return Compared(
        speedup=fields.number("speedup"),
        least=fields.number("least"),
        most=fields.number("most"),
        pairs=fields.integer("pairs"),
        host=(fields.number("torch_host_ms"), fields.number("planned_host_ms")),
        device=(fields.number("torch_device_ms"), fields.number("planned_device_ms")),
        kept=fields.flag("kept") is not False,
        reason=fields.text("reason"),
    )


def _side(fields: Fields | None) -> Side:
    """The training step of one side."""
    if fields is None:
        return Side(None, None, None, None)
    forward, backward, step = (fields.number(name) for name in ("forward_ms", "backward_ms", "step_ms"))
    return Side(forward, backward, step, fields.integer("peak"))


def _budget(fields: Fields | None) -> Budget | None:
    """The budget, if the document has one."""
    if fields is None:
        return None
    program = fields.part("program") or Fields({}, fields.where("program"))
    return Budget(
        policy=fields.text("policy"),
        total=fields.integer("total"),
        used=fields.integer("used"),
        least=fields.integer("least"),
        segments=tuple(
            Segment(
                segment.text("layer"),
                segment.text("pass"),
                segment.integer("workspace") or 0,
                segment.number("time_ms"),
            )
            for segment in fields.objects("segments")
        ),
        variables=program.integer("variables"),
        rows=program.integer("rows"),
        solve_ms=program.number("solve_ms"),
        optimal=program.flag("optimal"),
        method=program.text("method"),
    )


def _step(fields: Fields | None) -> Step | None:
    """The memory of a step, if the document has it."""
    if fields is None:
        return None
    moments = (
        Moment(
            moment.text("layer"),
            moment.text("pass"),
            *(moment.integer(name) or 0 for name in ("alive", "result", "workspace")),
        )
        for moment in fields.objects("moments")
    )
    limit, peak, least = (fields.integer(name) for name in ("limit", "peak", "least"))
    return Step(limit, peak, least, tuple(moments))


def _shown(value: object) -> str:
    """A value as text for a message, shortened."""
    if isinstance(value, (dict, list)):
        return f"a{'n object' if isinstance(value, dict) else ' list'}"
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
