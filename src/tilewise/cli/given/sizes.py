"""Sizes of memory on the command line, which ask back where a unit was surely forgotten."""

from __future__ import annotations

import click

from tilewise.cli.program import BadInput
from tilewise.plan import question_of

__all__ = ["checked_size"]


def checked_size(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """``value`` as it is, as an option's callback. Raises :class:`BadInput` for ``64`` and ``64M``.

    Other text is left to what reads it.
    """
    if value is not None and (question := question_of(value)):
        raise BadInput(f"{param.opts[0]} {value!r}: {question}")
    return value
