"""HTML that is safe by construction: jinja2's templates escape what they are given, and so does :func:`tag`.

Whatever is not :class:`markupsafe.Markup` is text from a document. :func:`clean` takes out of it what HTML cannot show,
and it is escaped where it enters.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jinja2
from markupsafe import Markup, escape

__all__ = ["Child", "Markup", "clean", "escaped", "filled", "join", "render", "table", "tag"]

LONGEST = 2000
"""Most characters shown of one text: names and reasons are far shorter, and no text may fill a page."""
UNSHOWN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff"
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
"""Control characters, lone surrogates, non-characters, and those that change the direction of what follows."""
MOST_ROWS = 1500
"""Most rows of a table, where nobody says otherwise: a page of thousands of layers must open at once."""
VOID = frozenset({"br", "col", "input", "meta"})
SHAPES = frozenset({"circle", "line", "path", "rect"})
"""SVG elements that are written as empty elements where they have no children."""

Child: TypeAlias = "str | Iterable[Child] | None"
"""Text, which is escaped; markup; several of either; or ``None`` for nothing."""


def clean(text: str) -> str:
    """``text`` without what HTML cannot show, and cut off where it would fill the page."""
    if len(text) > LONGEST:
        text = text[:LONGEST] + "…"
    # What Python calls printable holds none of those.
    return text if text.isprintable() else UNSHOWN.sub("\ufffd", text)


def escaped(text: str) -> Markup:
    """``text`` as HTML that shows it, in an element or a quoted attribute. Markup stays as it is."""
    return text if type(text) is Markup else escape(clean(text))


def join(children: Iterable[Child]) -> Markup:
    """Children one after the other, as markup."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, str):
            parts.append(escaped(child))
        elif child is not None:
            parts.append(join(child))
    return Markup("".join(parts))


def render(name: str, **values: Any) -> Markup:
    """A piece of a page: :func:`filled` as markup."""
    return Markup(filled(name, **values))


def filled(name: str, **values: Any) -> str:
    """The template ``name`` of this package, filled with ``values``. A name that it lacks is an error."""
    return _templates().get_template(name).render(values)


@functools.cache
def _templates() -> jinja2.Environment:
    """The templates of this package. All of them escape, and refuse names that they were not given."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _finalize(value: object) -> object:
    """What a template shows of a value: nothing of ``None``, the children of a list, text cleaned."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value if type(value) is Markup else clean(value)
    return join(value) if isinstance(value, (list, tuple)) else value


def tag(name: str, *children: Child, **attributes: str | int | bool | None) -> Markup:
    """An element, such as ``tag("td", "a < b", class_="num")``.

    In the names of attributes a trailing underscore is dropped and other underscores become hyphens. ``None`` and
    ``False`` leave an attribute out, ``True`` gives it without a value.
    """
    head = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.removesuffix("_").replace("_", "-")
        head.append(key if value is True else f'{key}="{escaped(str(value))}"')
    start = " ".join(head)
    if name in VOID:
        return Markup(f"<{start}>")
    inside = join(children)
    if not inside and name in SHAPES:
        return Markup(f"<{start}/>")
    return Markup(f"<{start}>{inside}</{name}>")


def table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[str | Sequence[str]],
    captioned: bool = True,
    most: int | None = MOST_ROWS,
) -> Markup:
    """A table in a box that scrolls by itself.

    Columns whose name begins with ``#`` hold numbers. Each row's first cell is its heading; a row that is only text is
    a heading for the rows below it. ``caption`` names the box, and is shown above the table if ``captioned``. Rows
    beyond ``most`` are counted in a last one.
    """
    rows = list(rows)
    beyond = 0 if most is None else max(0, len(rows) - most)
    if beyond:
        rows[most:] = [f"{beyond:,} more rows are left out; the document has them"]
    kinds = " ".join(f"n{i}" for i, name in enumerate(columns, 1) if name.startswith("#"))
    head = "".join(f"<th>{escaped(name.removeprefix('#'))}</th>" for name in columns)
    body: list[str] = []
    for row in rows:
        if isinstance(row, str):
            span = f'<tr><th colspan="{len(columns)}" scope="rowgroup">{escaped(row)}</th></tr>'
            body.append(f"</tbody><tbody>{span}" if body else span)
        else:
            cells = "</td><td>".join([escaped(cell) for cell in row[1:]])
            body.append(f"<tr><th>{escaped(row[0])}</th><td>{cells}</td></tr>")
    inside = (
        f'<table class="{kinds}">{f"<caption><span>{escaped(caption)}</span></caption>" if captioned else ""}'
        f"<thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table>"
    )
    return tag("div", Markup(inside), class_="scroll", tabindex=0, role="region", aria_label=caption)
