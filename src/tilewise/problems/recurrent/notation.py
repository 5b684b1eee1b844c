"""Recurrent layers as text: ``lstm:t512n16i768h768`` has 512 steps, a batch of 16, 768 inputs and 768 hidden units.

Before the colon stands the cell: ``rnn_tanh``, ``rnn_relu``, ``gru`` or ``lstm``. Behind it each size follows its
letter, as in oneDNN's benchdnn: ``t`` steps, ``n`` batch, ``i`` inputs, ``h`` hidden units, and where they differ from
one layer in one direction with biases ``l`` layers, ``d`` directions and ``b0``. ``p`` is the sum of all lengths of a
packed batch, of which ``t`` is the longest. ``r`` are the numbers of an LSTM's projection. Types and device are not
part of it.
"""

from __future__ import annotations

from tilewise.problems.limits import INT64_MAX
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.problems.texts.recurrent import looks_like_recurrent, read_recurrent

__all__ = ["format_recurrent", "looks_like_recurrent", "parse_recurrent"]


def parse_recurrent(
    text: str, *, task: str = "inference", dtype: str = "fp32", precision: str = "ieee", device: str = "cpu"
) -> RecurrentProblem:
    """The problem of the recurrent layer ``text``.

    Raises ``ValueError`` naming what is wrong and what would do.

    >>> parse_recurrent("gru:t8n2i3h5").hidden
    5
    """
    cell, fields = read_recurrent(text)
    problem = RecurrentProblem(cell, **fields, task=task, dtype=dtype, precision=precision, device=device)
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
