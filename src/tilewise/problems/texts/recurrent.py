"""The text of a recurrent layer, as :mod:`tilewise.problems.recurrent.notation` describes it, read without torch."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["CELLS", "looks_like_recurrent", "read_recurrent"]

CELLS = ("rnn_tanh", "rnn_relu", "gru", "lstm")
"""The cells there are; :mod:`tilewise.problems.recurrent.tensors` says what each computes."""
FORM = re.compile(rf"({'|'.join(CELLS)}):((?:[a-z]\d{{1,18}})+)")
BEGINS = re.compile(r"(rnn\w*|gru\w*|lstm\w*):")
FIELDS = {
    "t": "time", "n": "batch", "i": "inputs", "h": "hidden", "l": "layers", "d": "directions", "b": "biases",
    "p": "packed", "r": "projection",
}  # fmt: skip
NEEDED = "tnih"
MOST_LAYERS = 9999
"""Layers that a text may have: beyond them a list of roles would be long."""
EXAMPLE = "text such as 'lstm:t512n16i768h768' would do"


def looks_like_recurrent(text: str) -> bool:
    """Whether ``text`` is meant as a recurrent layer (a cell, then a colon), right or wrong, and not as a network.

    >>> looks_like_recurrent("gru:t8n2i3h5"), looks_like_recurrent("alexnet")
    (True, False)
    """
    return BEGINS.match(text.strip()) is not None


def read_recurrent(text: str) -> tuple[str, dict[str, Any]]:
    """The cell that ``text`` names, and the fields of its problem.

    Raises ``ValueError`` naming what is wrong and what would do. For example ``read_recurrent("gru:t8n2i3h5")[0]`` is
    ``"gru"``.
    """
    match = FORM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"recurrent layer {text!r}: not one of {', '.join(CELLS)}, a colon and sizes; {EXAMPLE}")
    sizes: dict[str, int] = {}
    for letter, number in re.findall(r"([a-z])(\d+)", match[2]):
        if letter not in FIELDS:
            raise ValueError(f"recurrent layer {text!r}: has {letter!r}; one of {', '.join(FIELDS)} would do")
        if letter in sizes:
            raise ValueError(f"recurrent layer {text!r}: has {letter!r} twice; once would do")
        sizes[letter] = int(number)
    missing = [letter for letter in NEEDED if letter not in sizes]
    if missing:
        raise ValueError(f"recurrent layer {text!r}: has no {', '.join(missing)}; {EXAMPLE}")
    if sizes.get("b", 1) not in (0, 1):
        raise ValueError(f"recurrent layer {text!r}: b{sizes['b']}; b0 for no biases would do")
    if sizes.get("l", 1) > MOST_LAYERS:
        raise ValueError(f"recurrent layer {text!r}: has l{sizes['l']}; at most {MOST_LAYERS} layers would do")
    fields: dict[str, Any] = {FIELDS[letter]: number for letter, number in sizes.items()}
    fields["biases"] = bool(sizes.get("b", 1))
    return match[1], fields
