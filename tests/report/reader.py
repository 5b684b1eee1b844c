"""A strict reader of pages, and what tests ask of one: elements, text, tables, numbers as the page has them."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

VOID = {"br", "col", "input", "meta", "wbr"}


class Reader(HTMLParser):
    """Builds a tree and refuses elements that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root: dict[str, Any] = {"tag": "", "attributes": {}, "children": []}
        self._open = [self.root]
        self.all: list[dict[str, Any]] = []
        self.feed(text)
        self.close()
        assert len(self._open) == 1, self._open[-1]["tag"]

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"an attribute twice in {tag}"
        node = {"tag": tag, "attributes": dict(attrs), "children": [], "parent": self._open[-1]}
        self._open[-1]["children"].append(node)
        self.all.append(node)
        if tag not in VOID:
            self._open.append(node)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self._open.pop()["tag"] == tag

    def handle_data(self, data):
        self._open[-1]["children"].append(data)

    def find(self, tag: str, **attributes: str) -> list[dict[str, Any]]:
        found = [node for node in self.all if node["tag"] == tag]
        return [n for n in found if all(v in (n["attributes"].get(k) or "").split() for k, v in attributes.items())]


def text_of(node: dict[str, Any] | str) -> str:
    if isinstance(node, str):
        return node
    return "".join(text_of(child) for child in node["children"])


def inner(node: dict[str, Any], tag: str) -> list[dict[str, Any]]:
    found = [child for child in node["children"] if not isinstance(child, str)]
    return [n for child in found for n in ([child] if child["tag"] == tag else []) + inner(child, tag)]


def tables(reader: Reader) -> dict[str, list[list[str]]]:
    """Rows of cells by caption, of the tables that have one."""
    found = {}
    for table in reader.find("table"):
        for caption in inner(table, "caption"):
            rows = [[text_of(c) for c in row["children"]] for row in inner(table, "tr")]
            found[text_of(caption)] = rows
    return found


def table_of(reader: Reader, start: str) -> list[dict[str, str]]:
    ((head, *rows),) = [rows for caption, rows in tables(reader).items() if caption.startswith(start)]
    return [dict(zip(head, row, strict=True)) for row in rows]


def ms(value: float | None) -> str:
    """Four digits, no finer than a microsecond."""
    if value is None:
        return "-"
    return f"{value:.{0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 10 else 3}f}"


def mib(size: int) -> str:
    """A size, by steps of 1024."""
    names = ["B", "KiB", "MiB", "GiB"]
    power = 0
    while size >= 1024 ** (power + 1) and power < 3:
        power += 1
    return f"{size / 1024**power:.1f} {names[power]}" if power else f"{size} B"


def parts_of(document: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(layer, found) for layer in document["layers"] for found in layer["passes"]]
