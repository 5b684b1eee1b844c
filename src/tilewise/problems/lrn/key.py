"""The canonical text of a local response normalization: how it is written, and how it is read back."""

from __future__ import annotations

import re
from typing import Any, Protocol

__all__ = ["LAYOUTS", "TASKS", "Lrn", "fields_of", "key_of"]

TASKS = ("inference", "training")
"""What is computed: the forward alone, or forward and backward."""
LAYOUTS = ("contiguous", "channels_last")
_N = r"(\d{1,18})"
_REAL = r"(-?\d[\d.e+-]{0,30})"
KEY = re.compile(
    rf"lrn ({'|'.join(TASKS)}) (\w{{4}}) ({'|'.join(LAYOUTS)}) n{_N}c{_N}s(\d{{1,18}}(?:x\d{{1,18}}){{0,7}}) "
    rf"size{_N} alpha{_REAL} beta{_REAL} k{_REAL} (cpu|cuda:[^\n]+)"
)


class Lrn(Protocol):
    """What functions in this folder read of a :class:`~tilewise.problems.lrn.problem.LrnProblem`.

    What each field means is said there.
    """

    @property
    def batch(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def space(self) -> tuple[int, ...]: ...
    @property
    def size(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def beta(self) -> float: ...
    @property
    def k(self) -> float: ...
    @property
    def task(self) -> str: ...
    @property
    def layout_name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...


def key_of(p: Lrn) -> str:
    """Canonical text of ``p``: equal for equal problems, different for different ones."""
    shape = f"n{p.batch}c{p.channels}s{'x'.join(map(str, p.space))}"
    numbers = f"size{p.size} alpha{p.alpha!r} beta{p.beta!r} k{p.k!r}"
    return f"lrn {p.task} {p.dtype} {p.layout_name} {shape} {numbers} {p.device}"


def fields_of(text: str) -> dict[str, Any]:
    """The fields of the problem whose key is ``text``, by name. Raises ``ValueError`` for what is no problem's key.

    Different texts may have the same fields: only one of them is the key.
    """
    match = KEY.fullmatch(text)
    if match is None:
        raise ValueError(f"problem {text[:200]!r}: not a problem's key")
    task, dtype, layout, batch, channels, space, size, alpha, beta, k, device = match.groups()
    return {
        "batch": int(batch),
        "channels": int(channels),
        "space": tuple(map(int, space.split("x"))),
        "size": int(size),
        "alpha": float(alpha),
        "beta": float(beta),
        "k": float(k),
        "task": task,
        "layout_name": layout,
        "dtype": dtype,
        "device": device,
    }
