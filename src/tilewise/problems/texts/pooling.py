"""The text of a pooling, as :mod:`tilewise.problems.pooling.notation` describes it, read without torch."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["looks_like_pooling", "read_pooling"]

_NS = r"\d{1,18}(?:x\d{1,18}){0,2}"
FORM = re.compile(rf"(max|avg)_pool:((?:[a-z]{_NS})+)(\+ceil)?(\+nopad)?(?:\+divisor(\d{{1,18}}))?")
FIELDS = {
    "n": "batch", "c": "channels", "i": "space", "k": "kernel", "s": "stride", "p": "padding", "d": "dilation",
}  # fmt: skip
EXAMPLE = "text such as 'max_pool:n16c64i112x112k3x3s2x2p1x1' would do"


def looks_like_pooling(text: str) -> bool:
    """Whether ``text`` is meant as a pooling, right or wrong, and not as a network.

    >>> looks_like_pooling("avg_pool:n1c3i8k2"), looks_like_pooling("alexnet")
    (True, False)
    """
    return text.strip().startswith(("max_pool:", "avg_pool:"))


def read_pooling(text: str) -> tuple[str, dict[str, Any]]:
    """``max`` or ``avg``, whichever ``text`` names, and the fields of its problem.

    Raises ``ValueError`` naming what is wrong and what would do. For example
    ``read_pooling("max_pool:n1c3i8x8k2x2")[1]["kernel"]`` is (2, 2).
    """
    match = FORM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"pooling {text!r}: not max_pool or avg_pool, a colon and sizes; {EXAMPLE}")
    sizes: dict[str, tuple[int, ...]] = {}
    for letter, numbers in re.findall(rf"([a-z])({_NS})", match[2]):
        if letter not in FIELDS:
            raise ValueError(f"pooling {text!r}: has {letter!r}; one of {', '.join(FIELDS)} would do")
        if letter in sizes:
            raise ValueError(f"pooling {text!r}: has {letter!r} twice; once would do")
        sizes[letter] = tuple(map(int, numbers.split("x")))
    missing = [letter for letter in "ncik" if letter not in sizes]
    if missing:
        raise ValueError(f"pooling {text!r}: has no {', '.join(missing)}; {EXAMPLE}")
    if any(len(sizes[letter]) > 1 for letter in "nc"):
        raise ValueError(f"pooling {text!r}: one number for n and one for c would do")
    fields: dict[str, Any] = {FIELDS[letter]: numbers for letter, numbers in sizes.items()}
    fields |= {"batch": sizes["n"][0], "channels": sizes["c"][0], "stride": sizes.get("s", sizes["k"])}
    fields |= {"ceil_mode": bool(match[3]), "count_include_pad": not match[4], "divisor": int(match[5] or 0)}
    return match[1], fields
