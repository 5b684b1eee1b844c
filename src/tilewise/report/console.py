"""Output of reports to stdout: tables for people, documents for programs."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rich.console import Console, RenderableType

__all__ = ["show", "show_json"]

PIPE_WIDTH = 200
"""Columns where stdout is no terminal, so that nothing is cut short in a file."""


class _Output(Console):
    """A console that tells of a closed pipe by Python's own error, which the command line knows what to do with."""

    def on_broken_pipe(self) -> None:
        """Raise the error that is being handled."""
        raise BrokenPipeError("nobody reads the output any more")


def show(*renderables: RenderableType) -> None:
    """Write renderables to stdout, one after the other. Raises ``BrokenPipeError`` where nobody reads on."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    console = _Output(file=sys.stdout, width=width, highlight=False)
    for renderable in renderables:
        console.print(renderable)


def show_json(document: dict[str, Any]) -> None:
    """Write a document to stdout as strict JSON. Raises ``ValueError`` where it holds NaN or an infinity."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
