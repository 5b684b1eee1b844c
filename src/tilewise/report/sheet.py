"""Tables for terminals of any width: words stay whole, and what has no room beside stands below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

__all__ = ["Sheet"]

GAP = 2
"""Blanks between two columns."""
LEAST_TEXT, LEAST_NOTE = 20, 36
"""Columns that a wrapped text and a note beside their row are to have at least, where they are as long as that."""
INDENT = 4
"""Blanks before what stands below its row."""
NOTHING = ("", "-")
"""Cells that say nothing: left out where each cell is written with its heading."""


@dataclass(frozen=True)
class _Row:
    """The cells of a row; a ``line`` has one, over the whole width."""

    cells: tuple[Text, ...]
    line: bool = False


@dataclass
class Sheet:
    """A table without rules. ``columns`` are pairs of a heading and what the column holds.

    That is ``""`` for words, ``"right"`` for numbers, ``"text"`` for what is wrapped in its place, and ``"note"`` for
    what stands below its row where it has no room beside it. Where even the other columns have no room, as in a
    terminal of 40 columns, each cell is written behind its heading. Cells may have rich's markup.
    """

    columns: Sequence[tuple[str, str]]
    title: str = ""
    rows: list[_Row] = field(default_factory=list)

    def add_row(self, *cells: str, style: str = "") -> None:
        """Add a row with a cell for each column. Raises ``ValueError`` for another number of them."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells: {len(self.columns)} would do, as there are so many columns")
        self.rows.append(_Row(tuple(Text.from_markup(cell, style=style) for cell in cells)))

    def add_line(self, text: str = "") -> None:
        """Add a line over the whole width, such as the name of what follows."""
        self.rows.append(_Row((Text.from_markup(text),), line=True))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines of the table at the console's width."""
        width = options.max_width
        shape = _Shape.of(self, width)
        if self.title:
            yield from Text.from_markup(self.title, style="italic").wrap(console, width)
        if self.rows and shape.widths:
            yield shape.heading(self)
        for row in self.rows:
            if row.line:
                yield from _wrapped(console, row.cells[0], width)
            else:
                yield from shape.row(console, self, row)


@dataclass(frozen=True)
class _Shape:
    """How a sheet is laid out at a width: that of each column, 0 for what stands below. No column where none fits."""

    width: int
    widths: tuple[int, ...]

    @classmethod
    def of(cls, sheet: Sheet, width: int) -> _Shape:
        """The widest layout that has room in ``width``."""
        rows = [row for row in sheet.rows if not row.line]
        kinds = [kind for _, kind in sheet.columns]
        natural = [
            max([len(heading), *(_length(row.cells[i]) for row in rows)])
            for i, (heading, _) in enumerate(sheet.columns)
        ]
        for with_notes in (True, False):
            widths = list(natural)
            wraps = [i for i, kind in enumerate(kinds) if kind == "text" or (kind == "note" and with_notes)]
            for i, kind in enumerate(kinds):
                if kind == "note" and not with_notes:
                    widths[i] = 0
            for i in reversed(wraps):  # a note gives way before a text
                over = _sum(widths) - width
                if over > 0:
                    least = LEAST_NOTE if kinds[i] == "note" else max(LEAST_TEXT, _longest(rows, i))
                    widths[i] = max(widths[i] - over, min(natural[i], least))
            if _sum(widths) <= width:
                return cls(width, tuple(widths))
        return cls(width, ())

    def heading(self, sheet: Sheet) -> Text:
        """The line of headings."""
        headings = zip(sheet.columns, self.widths, strict=True)
        return _beside([(Text(name), width, kind) for (name, kind), width in headings if width], "bold")

    def row(self, console: Console, sheet: Sheet, row: _Row) -> Iterator[Text]:
        """The lines of one row."""
        if not self.widths:
            yield from self._as_pairs(console, sheet, row)
            return
        lines = [
            list(_wrapped(console, cell, width)) if width else []
            for cell, width in zip(row.cells, self.widths, strict=True)
        ]
        for i in range(max(map(len, lines))):
            yield _beside(
                [
                    (line[i] if i < len(line) else Text(), width, kind)
                    for line, width, (_, kind) in zip(lines, self.widths, sheet.columns, strict=True)
                    if width
                ]
            )
        for cell, width in zip(row.cells, self.widths, strict=True):
            if not width and cell.plain:
                yield from _indented(console, cell, self.width)

    def _as_pairs(self, console: Console, sheet: Sheet, row: _Row) -> Iterator[Text]:
        """The first cell that says something, then every other one behind its heading, then notes."""
        said = [(c, *column) for c, column in zip(row.cells, sheet.columns, strict=True) if c.plain not in NOTHING]
        pairs, notes = [], []
        for index, (cell, heading, kind) in enumerate(said):
            if not index and kind != "right":
                yield from _wrapped(console, cell, self.width)
            elif kind == "note":
                notes.append(cell)
            elif kind == "text":
                notes.append(Text(f"{heading} ").append_text(cell))
            else:
                pairs.append(Text(f"{heading} ").append_text(cell))
        yield from _packed(console, pairs, self.width)
        for text in notes:
            yield from _indented(console, text, self.width)


def _packed(console: Console, pairs: Sequence[Text], width: int) -> Iterator[Text]:
    """As many of ``pairs`` in a line as have room, below a row."""
    line = Text()
    for pair in pairs:
        if line and INDENT + line.cell_len + 3 + pair.cell_len > width:
            yield from _indented(console, line.append(","), width)
            line = Text()
        line.append(", " if line else "").append_text(pair)
    if line:
        yield from _indented(console, line, width)


def _beside(cells: Sequence[tuple[Text, int, str]], style: str = "") -> Text:
    """One line of cells, each (text, width, kind)."""
    line = Text(style=style)
    for index, (text, width, kind) in enumerate(cells):
        blanks = " " * (width - text.cell_len)
        line.append(" " * GAP if index else "")
        if kind == "right":
            line.append(blanks).append_text(text)
        else:
            line.append_text(text).append(blanks if index < len(cells) - 1 else "")
    line.rstrip()
    return line


def _wrapped(console: Console, text: Text, width: int) -> Iterator[Text]:
    """``text`` in lines of ``width``; the second and further ones of a line begin where the first one does."""
    for line in text.split("\n", allow_blank=True):
        indent = len(line.plain) - len(line.plain.lstrip(" "))
        if line.cell_len <= width or not indent:
            yield from _whole(line, console, width)
            continue
        for part in _whole(line[indent:], console, max(width - indent, 8)):
            yield Text(" " * indent).append_text(part)


def _whole(line: Text, console: Console, width: int) -> Iterator[Text]:
    """``line`` in lines of ``width``, broken between words."""
    for part in line.wrap(console, width) if line.plain else [Text()]:
        part.rstrip()
        yield part


def _indented(console: Console, text: Text, width: int) -> Iterator[Text]:
    """``text`` in lines below a row."""
    for line in _wrapped(console, text, width - INDENT):
        yield Text(" " * INDENT).append_text(line)


def _length(text: Text) -> int:
    """The cells that the longest line of ``text`` takes."""
    return max((line.cell_len for line in text.split("\n")), default=0)


def _longest(rows: Sequence[_Row], column: int) -> int:
    """The cells that the longest word of a column takes, with the blanks before it where it begins a line."""
    words = (word for row in rows for word in row.cells[column].plain.split())
    return max((Text(word).cell_len for word in words), default=0)


def _sum(widths: Sequence[int]) -> int:
    """The width of a row, with the gaps."""
    shown = [width for width in widths if width]
    return sum(shown) + GAP * (len(shown) - 1)
