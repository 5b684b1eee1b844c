"""The canonical text of a pooling problem: how it is written, and how it is read back."""

from __future__ import annotations

import re
from typing import Any, Protocol

__all__ = ["LAYOUTS", "OPS", "TASKS", "Pooling", "fields_of", "joined", "key_of"]

OPS = ("max", "avg")
TASKS = ("inference", "training")
LAYOUTS = ("contiguous", "channels_last")

_N = r"\d{1,18}"
_NS = rf"{_N}(?:x{_N}){{0,2}}"
KEY = re.compile(
    rf"pool ({'|'.join(OPS)}) ({'|'.join(TASKS)}) (\w{{4}}) ({'|'.join(LAYOUTS)}) "
    rf"n({_N})c({_N})i({_NS})k({_NS})s({_NS})p({_NS})d({_NS})( ceil)?( nopad)?(?: divisor({_N}))? (cpu|cuda:[^\n]+)"
)


class Pooling(Protocol):
    """The fields of a pooling problem that its texts hold."""

    @property
    def op(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def space(self) -> tuple[int, ...]: ...
    @property
    def kernel(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def padding(self) -> tuple[int, ...]: ...
    @property
    def dilation(self) -> tuple[int, ...]: ...
    @property
    def ceil_mode(self) -> bool: ...
    @property
    def count_include_pad(self) -> bool: ...
    @property
    def divisor(self) -> int: ...
    @property
    def task(self) -> str: ...
    @property
    def layout_name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...


def joined(numbers: tuple[int, ...]) -> str:
    """Numbers of all axes as text, such as ``3x3``."""
    return "x".join(map(str, numbers))


def key_of(p: Pooling) -> str:
    """Canonical text of ``p``: equal for equal problems, different for different ones."""
    sizes = f"n{p.batch}c{p.channels}i{joined(p.space)}k{joined(p.kernel)}s{joined(p.stride)}"
    sizes += f"p{joined(p.padding)}d{joined(p.dilation)}"
    options = ["ceil"] if p.ceil_mode else []
    options += [] if p.count_include_pad else ["nopad"]
    options += [f"divisor{p.divisor}"] if p.divisor else []
    return " ".join(["pool", p.op, p.task, p.dtype, p.layout_name, sizes, *options, p.device])


def fields_of(text: str) -> dict[str, Any]:
    """The fields of the problem whose key is ``text``, by name. Raises ``ValueError`` for what is no problem's key.

    Different texts may have the same fields: only one of them is the key.
    """
    match = KEY.fullmatch(text)
    if match is None:
        raise ValueError(f"problem {text[:200]!r}: not a problem's key")
    op, task, dtype, layout, batch, channels, *axes, ceil, nopad, divisor, device = match.groups()
    names = ("space", "kernel", "stride", "padding", "dilation")
    sizes = {name: tuple(map(int, each.split("x"))) for name, each in zip(names, axes, strict=True)}
    return {
        "op": op,
        "task": task,
        "dtype": dtype,
        "layout_name": layout,
        "batch": int(batch),
        "channels": int(channels),
        **sizes,
        "ceil_mode": bool(ceil),
        "count_include_pad": not nopad,
        "divisor": int(divisor or 0),
        "device": device,
    }
