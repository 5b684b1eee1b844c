"""Python blocks of README and manual run as they stand, each file's in one namespace from top to bottom.

Examples in docstrings of public modules give what they say.
"""

from __future__ import annotations

import doctest
import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages_with_blocks() -> list[Path]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in pages if "_build" not in page.parts and BLOCK.search(page.read_text("utf-8"))]


LONG = ("recurrent.md", "torch.md")
"""Pages whose blocks train models or compile kernels for a long time."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if page.name in LONG else []) for page in pages_with_blocks()],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text("utf-8")
    names: dict[str, object] = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        lines_before = text.count("\n", 0, block.start(1))
        # Blank lines first, so that a traceback has the page's line numbers.
        exec(compile("\n" * lines_before + block.group(1), str(page), "exec"), names)


def test_a_block_is_found() -> None:
    assert BLOCK.findall("text\n\n```python\nx = 1\n```\n\n```text\ny\n```\n") == ["x = 1\n"]


WITH_EXAMPLES = (
    "tilewise.cpu", "tilewise.fft", "tilewise.frontends.layers", "tilewise.frontends.networks",
    "tilewise.kernels.building.target", "tilewise.machine.device", "tilewise.report.page.assemble",
    "tilewise.wisdom.store",
)  # fmt: skip
"""Modules that users import, where what they import is defined, and others with examples."""


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_run(name: str) -> None:
    if name == "tilewise.cpu" and not sys.platform.startswith("linux"):
        pytest.skip("glibc is Linux's")
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried
    assert not failed
