"""Sizes of memory on the command line, which ask back where a unit was surely forgotten."""

from __future__ import annotations

import re

import click

from tilewise.cli.program import BadInput

__all__ = ["check_size", "checked_size"]

SMALL = 2**20
"""Bytes below which a number without a unit is asked about: nobody gives a kernel so little without a word on it."""
LETTER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG])\s*", re.IGNORECASE)
POWERS = {"K": (3, 10), "M": (6, 20), "G": (9, 30)}
"""By letter, the powers of ten and of two that it may stand for."""


def check_size(flag: str, text: str) -> None:
    """Raise :class:`BadInput` for a ``text`` that is a size to no two people: ``64``, and ``64M``.

    Other text is left to what reads it. In Python whole numbers are bytes, however small: there nobody types ``64`` and
    thinks of megabytes.
    """
    number = text.strip()
    if number.isdecimal() and 0 < int(number[:30]) < SMALL:
        raise BadInput(f"{flag} {text!r}: {number} of what? {number}B would do for bytes, {number}MiB for 2^20 of them")
    if match := LETTER.fullmatch(text):
        count, letter = match[1], match[2].upper()
        ten, two = POWERS[letter]
        raise BadInput(
            f"{flag} {text!r}: {letter} may mean 10^{ten} or 2^{two} bytes; {count}{letter}B would do for the one, "
            f"{count}{letter}iB for the other"
        )


def checked_size(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """``value`` as it is, for an option as its callback, once :func:`check_size` has seen it."""
    if value is not None:
        check_size(param.opts[0], value)
    return value
