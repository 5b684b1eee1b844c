"""README and manual: short sentences, a short way to the first code, and a picture of what the table says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("markdown_it")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from draw_steps import PICTURE, drawn, rows  # noqa: E402
from sentences import figures, sentences, words  # noqa: E402

README = (ROOT / "README.md").read_text("utf-8")
MEDIAN, MOST = 18, 35
"""Words of a sentence: the median of a page, and what 95 of 100 have at the most."""
LONGEST = 40
"""Words of the longest sentence, which may stand in a point of a list or a cell of a table."""
PAGES = [
    path.relative_to(ROOT)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "_build" not in path.parts
]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_sentences_are_short(page: Path) -> None:
    text = (ROOT / page).read_text("utf-8")
    _, median, most = figures(text)
    longest = max(sentences(text), key=words, default="")
    assert median <= MEDIAN, longest
    assert most <= MOST, longest


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_no_sentence_is_very_long(page: Path) -> None:
    found = sentences((ROOT / page).read_text("utf-8"), ("paragraph", "td"))
    assert not [sentence for sentence in found if words(sentence) > LONGEST]


def test_words_and_sentences_are_counted() -> None:
    table = "| a | table |\n|---|---|\n| no | words |\n"
    text = f"# A heading\n\nOne two `three four`. Five $x + y$ six (seven). Eight\nnine!\n\n{table}"
    assert sentences(text) == ["One two `three_four`.", "Five formula six (seven).", "Eight nine!"]
    assert [words(sentence) for sentence in sentences(text)] == [3, 4, 2]
    assert figures(text) == (3, 3, 4)
    assert sentences(table, ("paragraph", "td")) == ["no", "words"]


def test_the_readme_shows_code_soon() -> None:
    before, _, _ = README.partition("```python")
    assert len(before.splitlines()) <= 15


def test_the_readme_has_a_short_table_with_losses() -> None:
    table = rows(README)
    assert 5 <= len(table) <= 10
    assert any(row.ours >= row.torch for row in table)
    for row in table:
        assert float(row.ratio) == pytest.approx(row.torch / row.ours, abs=0.02), row


def test_the_picture_is_of_the_table() -> None:
    assert PICTURE.read_text("utf-8") == drawn(rows(README)), "python tools/draw_steps.py would do"
