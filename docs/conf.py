"""Sphinx configuration of the manual."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from tilewise import __version__

project = "tilewise"
author = "The tilewise authors"
project_copyright = author
release = __version__
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}

html_theme = "furo"
html_title = f"tilewise {release}"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False

AUTOMODULE = re.compile(r"^\.\. automodule:: ([\w.]+)$", re.MULTILINE)


# In docstrings these keep their markup; signs in the text between them mean themselves.
MARKUP = re.compile(r"(``.*?``|:[\w:]+:`.*?`)", re.DOTALL)
SIGNS = re.compile(r"([|*](?!\s)|(?<=\w)_(?!\w))")


def leave_out_missing_modules(_: Sphinx, page: str, source: list[str]) -> None:
    """Drop those sections of the API page whose modules do not exist."""
    if page == "api":
        head, *sections = re.split(r"(?m)^(?=## )", source[0])
        source[0] = head + "".join(text for text in sections if all(map(module_exists, AUTOMODULE.findall(text))))


def module_exists(name: str) -> bool:
    """Whether the module could be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def take_signs_literally(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text with literals and roles: ``|a|``, ``*args`` and ``pass_`` are not markup in it."""
    text = MARKUP.split("\n".join(lines))
    text[::2] = [SIGNS.sub(r"\\\1", between) for between in text[::2]]
    lines[:] = "".join(text).split("\n")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", leave_out_missing_modules)
    app.connect("autodoc-process-docstring", take_signs_literally)
