"""The modules of the current folder, for networks that a command gets as ``MODULE:FACTORY``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from tilewise.frontends.names import is_factory

__all__ = ["modules_here", "modules_here_until_the_end"]


@contextmanager
def modules_here(text: str) -> Iterator[None]:
    """Have the current folder first on ``sys.path`` within, where ``text`` names a factory in a module.

    ``python -m tilewise`` has it there and the console script has not. Where Python was asked to keep it out
    (``python -P``), or the folder is gone, nothing is changed.

    >>> before = list(sys.path)
    >>> with modules_here("alexnet"):  # it needs no module of the user's
    ...     sys.path == before
    True
    """
    folder = _folder() if is_factory(text) and not sys.flags.safe_path else None
    if folder is None or folder in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def modules_here_until_the_end(text: str) -> None:
    """As :func:`modules_here`, from now to the end of the command: a network may import more when it runs."""
    click.get_current_context().with_resource(modules_here(text))


def _folder() -> str | None:
    """The current folder; ``None`` where somebody deleted it."""
    try:
        return os.getcwd()
    except OSError:
        return None
