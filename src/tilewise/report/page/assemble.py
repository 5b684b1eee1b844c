"""The whole page: sections, style and script in one file that loads nothing."""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources
from typing import NamedTuple

from tilewise.report.page.advice import advice_line, advice_sections
from tilewise.report.page.advice_document import read_advice
from tilewise.report.page.batches import batches_section
from tilewise.report.page.budget import budget_section
from tilewise.report.page.contents import Report
from tilewise.report.page.document import read
from tilewise.report.page.fronts import fronts_section
from tilewise.report.page.html import Child, Markup, filled, join
from tilewise.report.page.layers import layers_section
from tilewise.report.page.memory import layer_memory_section
from tilewise.report.page.roofline import roofline_section
from tilewise.report.page.summary import summary_section
from tilewise.report.page.svg import patterns
from tilewise.report.page.timeline import step_section
from tilewise.report.page.treemap import treemap_section
from tilewise.report.page.words import short, size

__all__ = ["page"]


class Section(NamedTuple):
    """One section of the page."""

    id: str
    name: str
    inside: Markup


def page(document: object) -> str:
    """One self-contained HTML page of a ``tilewise/plan``, ``tilewise/time`` or ``tilewise/advise`` document, as text.

    ``docs/json.md`` describes the documents.

    Everything is rendered here; the script only sorts, filters and opens. The page's content security policy lets
    nothing run or load but its own style and script, by their hashes. Raises :class:`DocumentError` naming what is
    wrong in the document.

    >>> page({"schema": "tilewise/plan", "version": 1, "target": "mynet"}).partition("<title>")[2][:24]
    'mynet: tilewise schedule'
    """
    if isinstance(document, dict) and document.get("schema") == "tilewise/advise":
        advice = read_advice(document)
        sections = [_section(*each) for each in advice_sections(advice)]
        return _page(advice.target or "advice", "tilewise advice", advice_line(advice), sections, advice.version)
    report = read(document)
    return _page(report.target or "schedule", "tilewise schedule", _line(report), _sections(report), report.version)


def _page(target: str, what: str, line: str, sections: list[Section], version: str) -> str:
    """A whole page of ``sections``; ``what`` it is stands in its title, after ``target``."""
    style, script = _asset("style.css"), _asset("script.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    return filled(
        "page.html",
        title=short(target, 120),
        what=what,
        line=line,
        sections=sections,
        foot=_foot(version),
        patterns=patterns(),
        policy=Markup(policy),
        style=style,
        script=script,
    )


def _sections(report: Report) -> list[Section]:
    """The sections of a schedule: the whole first, then pass by pass; only those that have something to show."""
    sections = [_section("summary", "Summary", summary_section(report))]
    whole = [
        ("map", "Where the time goes", treemap_section(report)),
        ("roofline", "Roofline", roofline_section(report)),
        ("step", "A step in time and memory", step_section(report.step, report) if report.step is not None else None),
    ]
    sections += [_section(id_, name, inside) for id_, name, inside in whole if inside]
    sections.append(_section("layers", "Layers and passes", layers_section(report)))
    if report.parts:
        sections += [
            _section("batches", "Divided plans", batches_section(report)),
            _section("fronts", "Time against workspace", fronts_section(report)),
            _section("memory", "Memory per layer", layer_memory_section(report)),
        ]
    if report.budget is not None:
        sections.append(_section("budget", "The budget", budget_section(report.budget)))
    return sections


def _section(id_: str, name: str, inside: list[Child]) -> Section:
    """One section of the page."""
    return Section(id_, name, join(inside))


def _line(report: Report) -> str:
    """What was planned, in one line."""
    options = dict(report.options)
    words = ["tilewise schedule", f"batch {options['mini-batch']}" if "mini-batch" in options else ""]
    words += [" ".join(options[name] for name in ("operands", "products") if name in options), report.device]
    if "workspace per kernel" in options:
        limit = "" if report.workspace is None else f" of {size(report.workspace)} per kernel"
        words.append(f"workspace limit{limit}" if limit else "no workspace limit")
    return " · ".join(short(word, 120) for word in words if word)


def _foot(version: str) -> str:
    """The text at the page's foot: the version that wrote it, and the units of its numbers."""
    words = f"Written by tilewise {short(version, 40)}." if version else "Written by tilewise."
    return f"{words} Times are medians in milliseconds, sizes are binary (1 MiB = 1,048,576 bytes)."


@functools.cache
def _asset(name: str) -> Markup:
    """A file of this package, as it stands in the page."""
    return Markup(resources.files(__package__).joinpath(name).read_text("utf-8").strip() + "\n")


def _hash(text: str) -> str:
    """A source of the policy that admits exactly ``text``."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
