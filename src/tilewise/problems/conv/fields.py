"""The fields of a convolution's problem: their types, and which values make a convolution."""

from __future__ import annotations

from typing import Protocol

import torch

from tilewise.problems.activations import require_activation
from tilewise.problems.base import DTYPES, LAYOUTS, PRECISIONS
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.passes import SPACE, Pass

__all__ = ["Convolution", "require_convolution"]


class Convolution(Protocol):
    """What functions in this folder read of a :class:`~tilewise.problems.conv.problem.ConvProblem`, which calls them.

    What each field and method means is said there.
    """

    @property
    def pass_(self) -> Pass: ...
    @property
    def batch(self) -> int: ...
    @property
    def in_channels(self) -> int: ...
    @property
    def out_channels(self) -> int: ...
    @property
    def axes(self) -> tuple[Axis, ...]: ...
    @property
    def groups(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def out_dtype(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def bias(self) -> bool: ...
    @property
    def activation(self) -> str: ...
    @property
    def residual(self) -> bool: ...
    @property
    def accumulate(self) -> bool: ...
    @property
    def constant_weight(self) -> bool: ...
    @property
    def checked_weight(self) -> bool: ...
    @property
    def layouts(self) -> tuple[str, str, str]: ...
    @property
    def alignment(self) -> tuple[int, int, int]: ...
    @property
    def device(self) -> str: ...
    @property
    def space(self) -> tuple[str, ...]: ...
    @property
    def operands(self) -> tuple[str, str]: ...
    @property
    def result(self) -> str: ...
    def shape(self, role: str) -> tuple[int, ...]: ...
    def torch_dtype(self, role: str) -> torch.dtype: ...


def require_convolution(p: Convolution) -> None:
    """Raise ``ValueError`` naming the field of ``p`` whose value makes no convolution."""
    if not isinstance(p.pass_, Pass):
        raise ValueError(f"pass_={p.pass_!r:.80}: one of {', '.join(map(str, Pass))} would do")
    for axis in p.axes:
        if not isinstance(axis, Axis):
            raise ValueError(f"axes has {axis!r:.40}: a tilewise.axis.Axis would do, such as Axis(size=8, kernel=3)")
    for name in ("batch", "in_channels", "out_channels", "groups"):
        value = getattr(p, name)
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    for name in ("in_channels", "out_channels"):
        value = getattr(p, name)
        if value % p.groups:
            raise ValueError(f"{name}={value} is not a multiple of groups={p.groups}")
    if len(p.axes) not in SPACE:
        raise ValueError(f"axes: {len(p.axes)} given; a convolution here has 1, 2 or 3 spatial axes")
    for name, known in (("dtype", DTYPES), ("out_dtype", DTYPES), ("precision", PRECISIONS)):
        value = getattr(p, name)
        if value not in known:
            raise ValueError(f"{name}={value!r}: one of {', '.join(known)} would do")
    _require_epilogue(p)
    for layout in p.layouts:
        if layout not in LAYOUTS:
            raise ValueError(f"layouts has {layout!r}: one of {', '.join(LAYOUTS)} would do")


def _require_epilogue(p: Convolution) -> None:
    """Raise ``ValueError`` for an activation or a residual that ``p`` cannot have."""
    require_activation(p.activation)
    for name, none in (("activation", "none"), ("residual", False)):
        value = getattr(p, name)
        if value == none:
            continue
        if p.pass_ is not Pass.FPROP:
            raise ValueError(f"{name}={value!r}: {none!r} would do for {p.pass_.value}; only fprop has one")
        if p.accumulate:
            raise ValueError(f"{name}={value!r}: {none!r} would do for a convolution that accumulates")
