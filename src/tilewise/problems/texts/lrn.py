"""The text of a local response normalization, as :mod:`tilewise.problems.lrn.notation` describes it, without torch."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["looks_like_lrn", "read_lrn"]

FORM = re.compile(r"lrn:n(\d{1,18})c(\d{1,18})s(\d{1,18}(?:x\d{1,18}){0,7})k(\d{1,18})((?:,[a-z]+=[^,\s]{1,32})*)")
NUMBERS = {"alpha": "alpha", "beta": "beta", "add": "k"}
EXAMPLE = "text such as 'lrn:n64c96s55x55k5' or 'lrn:n64c96s55x55k5,alpha=0.001' would do"


def looks_like_lrn(text: str) -> bool:
    """Whether ``text`` is meant as a local response normalization, right or wrong, and not as a network.

    >>> looks_like_lrn("lrn:n2c3s4x5k3"), looks_like_lrn("alexnet")
    (True, False)
    """
    return text.strip().startswith("lrn:")


def read_lrn(text: str) -> dict[str, Any]:
    """The fields of the problem that ``text`` is.

    Raises ``ValueError`` naming what is wrong and what would do. For example ``read_lrn("lrn:n2c3s4x5k3")["space"]`` is
    ``(4, 5)``.
    """
    match = FORM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"local response normalization {text[:200]!r}: {EXAMPLE}")
    batch, channels, space, size, rest = match.groups()
    numbers: dict[str, Any] = {}
    for word in rest.split(",")[1:]:
        name, _, number = word.partition("=")
        if name not in NUMBERS:
            raise ValueError(f"local response normalization {text!r}: has {name!r}; alpha, beta or add would do")
        if NUMBERS[name] in numbers:
            raise ValueError(f"local response normalization {text!r}: has {name} twice; once would do")
        try:
            numbers[NUMBERS[name]] = float(number)
        except ValueError:
            reason = f"local response normalization {text!r}: {name}={number}: a number would do"
            raise ValueError(reason) from None
    shape = {"batch": int(batch), "channels": int(channels), "size": int(size)}
    return {**shape, "space": tuple(map(int, space.split("x"))), **numbers}
