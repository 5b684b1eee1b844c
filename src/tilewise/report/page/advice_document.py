"""Reading a ``tilewise/advise`` document for the page: everything used is checked, what is absent is left out."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.report.page.document import DocumentError, Fields

__all__ = ["VERSION", "AdviceReport", "Curve", "NamedPoint", "Place", "read_advice"]

VERSION = 1
"""Version of the schema that is read."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One operation of a point: its name, its rate and that of torch's own choice in TFLOP/s, and its plan."""

    name: str
    rate: float | None
    torch_rate: float | None
    plan: str


@dataclass(frozen=True, slots=True)
class Place:
    """A measured point: its sizes in the order of the axes, and what it reaches."""

    sizes: tuple[int, ...]
    samples_per_second: float | None
    rate: float | None
    torch_rate: float | None
    ms: float | None
    busy: bool
    parts: tuple[Curve, ...]


@dataclass(frozen=True, slots=True)
class NamedPoint:
    """A point and what it is the best for."""

    roles: tuple[str, ...]
    point: Place


@dataclass(frozen=True, slots=True)
class AdviceReport:
    """What a page of advice shows. ``batch`` is the place of the mini-batch among ``axes``, which are names."""

    target: str
    device: str
    environment: str
    version: str
    axes: tuple[str, ...]
    batch: int
    seconds: float | None
    done: bool
    asked: Place
    named: tuple[NamedPoint, ...]
    points: tuple[Place, ...]
    why: tuple[str, ...]


def read_advice(document: object) -> AdviceReport:
    """The contents of a ``tilewise/advise`` document. Raises :class:`DocumentError`."""
    top = Fields(document, "")
    version = top.integer("version")
    if version is None or not 1 <= version <= VERSION:
        raise DocumentError(f"version={version}: this tilewise reads versions up to {VERSION}")
    axes = tuple(axis.text("name") for axis in top.objects("axes"))
    batch = top.text("batch_axis")
    if batch not in axes or len(set(axes)) != len(axes):
        raise DocumentError(f"batch_axis={batch[:80]!r}: the name of one of the axes, which all differ, would do")
    return AdviceReport(
        target=top.text("target"),
        device=top.text("device"),
        environment=top.text("environment"),
        version=top.text("tilewise"),
        axes=axes,
        batch=axes.index(batch),
        seconds=top.number("seconds"),
        done=bool(top.flag("done")),
        asked=_place(_needed(top, "asked"), axes),
        named=tuple(
            NamedPoint(fields.texts("roles"), _place(_needed(fields, "point"), axes)) for fields in top.objects("named")
        ),
        points=tuple(_place(fields, axes) for fields in top.objects("points")),
        why=top.texts("why"),
    )


def _needed(fields: Fields, name: str) -> Fields:
    """A field that must be there."""
    found = fields.part(name)
    if found is None:
        raise DocumentError(f"{fields.where(name)}: missing; an object would do")
    return found


def _place(fields: Fields, axes: tuple[str, ...]) -> Place:
    """One point."""
    sizes = _needed(fields, "sizes")
    values = [sizes.integer(axis) for axis in axes]
    if any(value is None for value in values):
        raise DocumentError(f"{fields.where('sizes')}: a size for each of {', '.join(axes)[:200]} would do")
    return Place(
        sizes=tuple(value or 0 for value in values),
        samples_per_second=fields.number("samples_per_second"),
        rate=fields.number("tflops"),
        torch_rate=fields.number("torch_tflops"),
        ms=fields.number("ms"),
        busy=bool(fields.flag("busy")),
        parts=tuple(_curve(part) for part in fields.objects("parts")),
    )


def _curve(fields: Fields) -> Curve:
    """One operation of a point, with its rate in TFLOP/s."""
    problem = fields.part("problem") or Fields({}, fields.where("problem"))
    flops, ms, torch_ms = problem.integer("flops"), fields.number("ms"), fields.number("torch_ms")
    rate, torch_rate = (flops / time / 1e9 if flops and time else None for time in (ms, torch_ms))
    return Curve(problem.text("pass"), rate, torch_rate, fields.text("plan") or fields.text("reason"))
