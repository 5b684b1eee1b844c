"""``TILEWISE_*`` variables: what ``enable`` and ``enabled`` take where an argument is not given."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from typing import Any

from tilewise.plan import parse_bytes
from tilewise.planner.options import BATCH_SIZES, RIGORS, Options

__all__ = ["MOST_PLANS", "VARIABLES", "Unset", "settled"]

MOST_PLANS = 512
"""Problems planned in one session at most, by default."""


class Unset(enum.Enum):
    """In place of an argument: the environment's value, else the default."""

    ENVIRONMENT = "environment"


def _one_of(choices: tuple[str, ...]) -> Callable[[str, str], str]:
    def read(name: str, text: str) -> str:
        if text not in choices:
            raise ValueError(f"{name}={text!r}: one of {', '.join(choices)} would do")
        return text

    return read


def _flag(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"{name}={text!r}: 1 or 0 would do")
    return text == "1"


def _size(name: str, text: str) -> int | None:
    return None if text == "none" else parse_bytes(text, name)


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}={text!r}: a positive number would do, such as 1e-5")
    return value


def _count(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{name}={text!r}: a whole number would do, such as {MOST_PLANS}")
    return int(text)


def _names(name: str, text: str) -> tuple[str, ...]:
    names = tuple(word.strip() for word in text.split(","))
    try:
        return Options(exclude=names).exclude
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: {error}") from error


VARIABLES: dict[str, tuple[str, Callable[[str, str], Any], Any]] = {
    "workspace": ("TILEWISE_WORKSPACE", _size, None),
    "batch_sizes": ("TILEWISE_BATCH_SIZES", _one_of(BATCH_SIZES), "powers_of_two"),
    "rigor": ("TILEWISE_RIGOR", _one_of(RIGORS), "measure"),
    "deterministic": ("TILEWISE_DETERMINISTIC", _flag, False),
    "error_limit": ("TILEWISE_ERROR_LIMIT", _number, None),
    "strict": ("TILEWISE_STRICT", _flag, False),
    "cuda_graphs": ("TILEWISE_CUDA_GRAPHS", _flag, False),
    "exclude": ("TILEWISE_EXCLUDE", _names, ()),
    "most_plans": ("TILEWISE_MOST_PLANS", _count, MOST_PLANS),
}
"""By argument: its variable, what reads the variable's text, and the default without it."""


def settled(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with every :class:`Unset` one from the environment.

    Raises ``ValueError`` naming the variable at fault, its value and what would do.
    """
    values = {}
    for argument, value in given.items():
        if value is Unset.ENVIRONMENT:
            name, read, default = VARIABLES[argument]
            text = os.environ.get(name, "").strip()
            value = read(name, text) if text else default
        values[argument] = value
    return values
