"""Recurrent layers as text: ``lstm:t512n16i768h768`` has 512 steps, a batch of 16, 768 inputs and 768 hidden units.

Before the colon stands the cell: ``rnn_tanh``, ``rnn_relu``, ``gru`` or ``lstm``. Behind it each size follows its
letter, as in oneDNN's benchdnn: ``t`` steps, ``n`` batch, ``i`` inputs, ``h`` hidden units, and where they differ from
one layer in one direction with biases ``l`` layers, ``d`` directions and ``b0``. ``p`` is the sum of all lengths of a
packed batch, of which ``t`` is the longest. ``r`` are the numbers of an LSTM's projection. Types and device are not
part of it.
"""

from __future__ import annotations

import re
from typing import Any

from tilewise.problems.limits import INT64_MAX
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.problems.recurrent.tensors import CELLS

__all__ = ["format_recurrent", "looks_like_recurrent", "parse_recurrent"]

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


def parse_recurrent(
    text: str, *, task: str = "inference", dtype: str = "fp32", precision: str = "ieee", device: str = "cpu"
) -> RecurrentProblem:
    """The problem of the recurrent layer ``text``.

    Raises ``ValueError`` naming what is wrong and what would do.

    >>> parse_recurrent("gru:t8n2i3h5").hidden
    5
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
    problem = RecurrentProblem(match[1], **fields, task=task, dtype=dtype, precision=precision, device=device)
    largest = max(problem.nbytes(role) for role in problem.roles)
    if largest > INT64_MAX:
        raise ValueError(f"recurrent layer {text!r}: one of its tensors has {largest} bytes, beyond any memory")
    return problem


def format_recurrent(problem: RecurrentProblem) -> str:
    """The text of a recurrent layer; :func:`parse_recurrent` reads it back.

    Types and device are not part of it.

    >>> format_recurrent(tilewise.RecurrentProblem("gru", 8, 2, 3, 5, layers=2))
    'gru:t8n2i3h5l2'
    """
    text = f"{problem.cell}:t{problem.time}n{problem.batch}i{problem.inputs}h{problem.hidden}"
    text += f"l{problem.layers}" if problem.layers > 1 else ""
    text += f"d{problem.directions}" if problem.directions > 1 else ""
    text += "" if problem.biases else "b0"
    text += f"p{problem.packed}" if problem.packed else ""
    return text + (f"r{problem.projection}" if problem.projection else "")
