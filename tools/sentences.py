"""How long the sentences of a page are: ``sentences.py docs/guide.md ...`` prints its figures and its longest ones."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

# A point ends a sentence where space follows, and something that begins one. "e.g." and initials do not occur here.
END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9`])")
WORD = re.compile(r"[A-Za-z0-9]")


def _text(inline: Token) -> str:
    """The words of a paragraph as they are read: of links their text, and code as one word, in its backticks."""
    found = []
    for child in inline.children or []:
        if child.type == "code_inline":
            found.append(f"`{child.content.replace(' ', '_')}`")
        elif child.type in ("softbreak", "hardbreak"):
            found.append(" ")
        elif child.type == "text":
            found.append(child.content)
    return "".join(found)


def paragraphs(markdown: str, kinds: tuple[str, ...] = ("paragraph",)) -> Iterator[str]:
    """The paragraphs of a page, and the points of its lists; of ``kinds`` that name ``td``, its tables' cells as well.

    There are no headings, code or displayed formulas among them.
    """
    tokens = MarkdownIt("commonmark").enable("table").parse(re.sub(r"\$\$.*?\$\$", "", markdown, flags=re.DOTALL))
    for before, token in itertools.pairwise(tokens):
        if token.type == "inline" and before.type.removesuffix("_open") in kinds:
            yield _text(token)


def sentences(markdown: str, kinds: tuple[str, ...] = ("paragraph",)) -> list[str]:
    """All sentences of a page's :func:`paragraphs`. A formula counts as one word."""
    found = []
    for paragraph in paragraphs(markdown, kinds):
        plain = re.sub(r"\$[^$]+\$", "formula", paragraph)
        found += [sentence.strip() for sentence in END.split(plain) if WORD.search(sentence)]
    return found


def words(sentence: str) -> int:
    """The words of a sentence; signs by themselves are none."""
    return sum(bool(WORD.search(word)) for word in sentence.split())


def figures(markdown: str) -> tuple[int, int, int]:
    """Sentences, the median of their words, and what 95 of 100 have at the most."""
    counts = sorted(words(sentence) for sentence in sentences(markdown))
    if not counts:
        return 0, 0, 0
    return len(counts), counts[len(counts) // 2], counts[min(len(counts) - 1, len(counts) * 95 // 100)]


def main() -> None:
    """Print a line for each page, and with ``--longest`` its longest sentences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--longest", type=int, default=0, metavar="N", help="print the N longest sentences of each")
    given = parser.parse_args()
    for page in given.pages:
        text = page.read_text("utf-8")
        count, median, most = figures(text)
        print(f"{page}: {count} sentences, median {median} words, 95 % have at most {most}")
        for sentence in sorted(sentences(text), key=words, reverse=True)[: given.longest]:
            print(f"  {words(sentence)}: {sentence}")


if __name__ == "__main__":
    main()
