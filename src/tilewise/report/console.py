"""Output of reports: tables to stdout, progress to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["progress_bar", "show", "show_json"]

PIPE_WIDTH = 200
"""Columns where stdout is no terminal, so that nothing is cut short in a file."""


def show(*renderables: RenderableType) -> None:
    """Write renderables to stdout, one after the other."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    console = Console(file=sys.stdout, width=width, highlight=False)
    for renderable in renderables:
        console.print(renderable)


def show_json(document: dict[str, Any]) -> None:
    """Write a document to stdout as strict JSON. Raises ``ValueError`` where it holds NaN or an infinity."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


@contextmanager
def progress_bar(title: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on stderr where that is a terminal; it is gone when done.

    Yields a function to call with the name of each next step. ``total`` is the number of steps, ``None`` if unknown.
    """
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.fields[text]}"), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=total, text="")
        started = False

        def step(text: str) -> None:
            nonlocal started
            bar.update(task, advance=int(started), text=text)
            started = True

        yield step
