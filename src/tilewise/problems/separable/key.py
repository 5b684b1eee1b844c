"""The canonical text of a separable convolution: how it is written, and how it is read back."""

from __future__ import annotations

import re
from typing import Any, Protocol

from tilewise.problems.activations import CONV_ACTIVATIONS
from tilewise.problems.conv.axis import Axis

__all__ = ["Separable", "fields_of", "key_of"]

_N = r"(\d{1,18})"
_AXIS = r"i[hw]\d{1,18}k[hw]\d{1,18}s[hw]\d{1,18}d[hw]\d{1,18}p[hw]-?\d{1,18},-?\d{1,18}"
_FUNCTION = rf"(?:{'|'.join(CONV_ACTIVATIONS)})(?::[-+.0-9a-z]{{1,32}}){{0,2}}"
KEY = re.compile(
    rf"separable (\w{{4}}) mb{_N}ic{_N}mc{_N}oc{_N}((?:{_AXIS}){{2}}) "
    rf"(?:pw=({_FUNCTION})>)?dw=({_FUNCTION})(?:>pw=({_FUNCTION}))?( residual)? (cpu|cuda:[^\n]+)"
)
AXIS = re.compile(r"i[hw](\d+)k[hw](\d+)s[hw](\d+)d[hw](\d+)p[hw](-?\d+),(-?\d+)")
"""The form of one axis in a key."""


class Separable(Protocol):
    """What functions in this folder read of a :class:`~tilewise.problems.separable.problem.SeparableProblem`.

    What each field means is said there.
    """

    @property
    def batch(self) -> int: ...
    @property
    def in_channels(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def out_channels(self) -> int: ...
    @property
    def axes(self) -> tuple[Axis, Axis]: ...
    @property
    def expands(self) -> bool: ...
    @property
    def projects(self) -> bool: ...
    @property
    def functions(self) -> tuple[str, ...]: ...
    @property
    def residual(self) -> bool: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...


def key_of(p: Separable) -> str:
    """Canonical text of ``p``: equal for equal problems, different for different ones."""
    sizes = f"mb{p.batch}ic{p.in_channels}mc{p.channels}oc{p.out_channels}"
    for name, a in zip("hw", p.axes, strict=True):
        sizes += f"i{name}{a.size}k{name}{a.kernel}s{name}{a.stride}d{name}{a.dilation - 1}p{name}{a.before},{a.after}"
    kinds = ["pw"] * p.expands + ["dw"] + ["pw"] * p.projects
    stages = ">".join(f"{kind}={function}" for kind, function in zip(kinds, p.functions, strict=True))
    return " ".join(["separable", p.dtype, sizes, stages, *["residual"] * p.residual, p.device])


def fields_of(text: str) -> dict[str, Any]:
    """The fields of the problem whose key is ``text``, by name. Raises ``ValueError`` for what is no problem's key.

    Different texts may have the same fields: only one of them is the key.
    """
    match = KEY.fullmatch(text)
    if match is None:
        raise ValueError(f"problem {text[:200]!r}: not a problem's key")
    dtype, batch, into, middle, outof, axes, first, second, third, residual, device = match.groups()
    functions = [function for function in (first, second, third) if function is not None]
    return {
        "batch": int(batch),
        "in_channels": int(into),
        "channels": int(middle),
        "out_channels": int(outof),
        "axes": tuple(
            Axis(size, kernel, stride, dilation + 1, before, after)
            for size, kernel, stride, dilation, before, after in (map(int, axis) for axis in AXIS.findall(axes))
        ),
        "expands": first is not None,
        "projects": third is not None,
        "inner": tuple(functions[:-1]),
        "activation": functions[-1],
        "residual": bool(residual),
        "dtype": dtype,
        "device": device,
    }
