"""Python blocks of README and manual run as they stand, each file's in one namespace from top to bottom.

A tutorial is skipped where a library that it plans is not installed. Examples in docstrings give what they say; those
of public names run in tests/test_api.py.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest
from benchmarks.harness.detection_operators import declare_detection_operators

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages_with_blocks() -> list[Path]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in pages if "_build" not in page.parts and BLOCK.search(page.read_text("utf-8"))]


LONG = ("inference.md", "recurrent.md", "torch.md", "depthwise.md", "lightning.md", "monai.md", "timm.md", "unet.md")
"""Pages whose blocks train models or compile kernels for a long time."""
LIBRARIES = ("diffusers", "lightning", "monai", "timm")
"""What tutorials plan, of which this environment may have none: they are the extra ``tutorials``."""


def imported(blocks: str) -> set[str]:
    """The packages that a page's code imports."""
    found = set()
    for node in ast.walk(ast.parse(blocks)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def skip_without(blocks: str) -> None:
    """Skip the test of a page whose code imports a library of tutorials that is not installed."""
    for name in sorted(imported(blocks).intersection(LIBRARIES)):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install '.[tutorials]' would do")
        declare_detection_operators()


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if page.name in LONG else []) for page in pages_with_blocks()],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text("utf-8")
    skip_without("\n".join(BLOCK.findall(text)))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        lines_before = text.count("\n", 0, block.start(1))
        # Blank lines first, so that a traceback has the page's line numbers.
        exec(compile("\n" * lines_before + block.group(1), str(page), "exec"), names)


def test_packages_of_a_page_are_found() -> None:
    blocks = "import torch\nfrom monai.networks.nets import UNet\n\ndef late():\n    import timm.models as models\n"
    assert imported(blocks) == {"torch", "monai", "timm"}


def test_a_page_without_its_library_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LIBRARIES", ("timm", "no_such_package"))
    skip_without("import torch")
    with pytest.raises(pytest.skip.Exception, match="no_such_package is not installed"):
        skip_without("import no_such_package")


def test_tutorials_are_listed_and_named_in_the_extra() -> None:
    tutorials = {page.stem for page in (ROOT / "docs" / "tutorials").glob("*.md")} - {"index"}
    index = (ROOT / "docs" / "tutorials" / "index.md").read_text("utf-8")
    assert tutorials == set(re.findall(r"\]\((\w+)\.md\)", index))
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]["tutorials"]
    assert sorted(re.split(r"\W", each)[0] for each in extra) == sorted(LIBRARIES)


def test_a_block_is_found() -> None:
    assert BLOCK.findall("text\n\n```python\nx = 1\n```\n\n```text\ny\n```\n") == ["x = 1\n"]


WITH_EXAMPLES = (
    "tilewise.kernels.building.target", "tilewise.machine.files", "tilewise.nn.conclusion", "tilewise.nn.ranges",
    "tilewise.problems.kept_runs", "tilewise.report.page.assemble", "tilewise.report.page.treemap",
)  # fmt: skip
"""Modules with examples beside the public ones, which tests/test_api.py runs."""


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_run(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried
    assert not failed
