"""The whole page: sections, style and script in one file that loads nothing."""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources

from tilewise.report.page.advice import advice_line, advice_sections
from tilewise.report.page.advice_document import read_advice
from tilewise.report.page.batches import batches_section
from tilewise.report.page.budget import budget_section
from tilewise.report.page.contents import Report
from tilewise.report.page.document import read
from tilewise.report.page.fronts import fronts_section
from tilewise.report.page.html import Child, Markup, tag
from tilewise.report.page.layers import layers_section
from tilewise.report.page.memory import layer_memory_section, step_section
from tilewise.report.page.summary import summary_section
from tilewise.report.page.svg import patterns
from tilewise.report.page.words import short, size

__all__ = ["page"]


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
        return _page(advice.target or "advice", advice_line(advice), advice_sections(advice), _foot(advice.version))
    report = read(document)
    return _page(report.target or "schedule", _line(report), _sections(report), _foot(report.version))


def _page(target: str, line: str, sections: list[tuple[str, str, list[Child]]], foot: str) -> str:
    """A whole page of ``sections``, each an identifier, a name and contents."""
    title = short(target, 120)
    links = [tag("li", tag("a", name, href=f"#{id_}")) for id_, name, _ in sections]
    body = tag(
        "body",
        tag("a", "Skip to the report", href="#main", class_="skip"),
        patterns(),
        tag("header", tag("h1", title), tag("p", line), tag("nav", tag("ul", links), aria_label="Sections")),
        tag("main", [_section(id_, name, inside) for id_, name, inside in sections], id="main"),
        tag("footer", tag("p", foot)),
        tag("script", _asset("script.js")),
    )
    return f"<!doctype html>\n{tag('html', _head(title), body, lang='en')}\n"


def _sections(report: Report) -> list[tuple[str, str, list[Child]]]:
    """Identifier, name and contents of each section, optional ones only where the document has them."""
    sections = [
        ("summary", "Summary", summary_section(report)),
        ("layers", "Layers and passes", layers_section(report)),
    ]
    if report.parts:
        sections += [
            ("batches", "Micro-batches", batches_section(report)),
            ("fronts", "Time against workspace", fronts_section(report)),
            ("memory", "Memory per layer", layer_memory_section(report)),
        ]
    if report.step is not None:
        sections.append(("step", "Memory over a step", step_section(report.step)))
    if report.budget is not None:
        sections.append(("budget", "The budget", budget_section(report.budget)))
    return sections


def _section(id_: str, name: str, inside: list[Child]) -> Markup:
    """One section of the page."""
    return tag("section", tag("h2", name, id=id_), inside, aria_labelledby=id_)


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


def _head(title: str) -> Markup:
    """The page's ``head`` element: title, style, script, and a policy that lets nothing else run."""
    style, script = _asset("style.css"), _asset("script.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("meta", name_="referrer", content="no-referrer"),
        tag("title", f"{title}: tilewise schedule"),
        tag("style", style),
    )


@functools.cache
def _asset(name: str) -> Markup:
    """A file of this package, as it stands in the page."""
    return Markup(resources.files(__package__).joinpath(name).read_text("utf-8").strip() + "\n")


def _hash(text: str) -> str:
    """A source of the policy that admits exactly ``text``."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
