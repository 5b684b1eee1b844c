"""The canonical text of a recurrent layer's problem: how it is written, and how it is read back."""

from __future__ import annotations

import re
from typing import Any

from tilewise.problems.recurrent.tensors import CELLS, TASKS, Recurrent

__all__ = ["fields_of", "key_of"]

_N = r"(\d{1,18})"
KEY = re.compile(
    rf"rnn ({'|'.join(CELLS)}) ({'|'.join(TASKS)}) (\w{{4}}) (ieee|tf32) "
    rf"t{_N}n{_N}i{_N}h{_N}l(\d{{1,4}})d([12])( biases)?(?: packed{_N})?(?: projection{_N})? (cpu|cuda:[^\n]+)"
)


def key_of(p: Recurrent) -> str:
    """Canonical text of ``p``: equal for equal problems, different for different ones."""
    sizes = f"t{p.time}n{p.batch}i{p.inputs}h{p.hidden}l{p.layers}d{p.directions}"
    biases = ["biases"] if p.biases else []
    packed = [f"packed{p.packed}"] if p.packed else []
    projection = [f"projection{p.projection}"] if p.projection else []
    return " ".join(["rnn", p.cell, p.task, p.dtype, p.precision, sizes, *biases, *packed, *projection, p.device])


def fields_of(text: str) -> dict[str, Any]:
    """The fields of the problem whose key is ``text``, by name. Raises ``ValueError`` for what is no problem's key.

    Different texts may have the same fields: only one of them is the key.
    """
    match = KEY.fullmatch(text)
    if match is None:
        raise ValueError(f"problem {text[:200]!r}: not a problem's key")
    cell, task, dtype, precision, *numbers, biases, packed, projection, device = match.groups()
    names = ("time", "batch", "inputs", "hidden", "layers", "directions")
    sizes = dict(zip(names, map(int, numbers), strict=True))
    return {
        "cell": cell,
        "task": task,
        "dtype": dtype,
        "precision": precision,
        **sizes,
        "biases": bool(biases),
        "packed": int(packed or 0),
        "projection": int(projection or 0),
        "device": device,
    }
