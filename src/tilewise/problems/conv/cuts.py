"""How a convolution is cut along an axis: which ranges of its tensors a part takes, and what its own sizes are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewise.problems.base import Range, Write, dense_strides, layout_of
from tilewise.problems.conv.fields import Convolution
from tilewise.problems.conv.passes import ROLES, Pass

__all__ = ["Cut", "cut"]


@dataclass(frozen=True, slots=True)
class Cut:
    """One part of a convolution.

    ``uses`` and ``write`` are those of its :class:`~tilewise.problems.base.Part`. ``changes`` has the fields in which
    its problem differs from the whole; it is ``None`` for a part that meets no data.
    """

    uses: Mapping[str, tuple[Range, ...]]
    write: Write
    changes: Mapping[str, Any] | None


def cut(p: Convolution, axis: str, start: int, stop: int, *, scatter: bool) -> Cut:
    """The part ``[start, stop)`` of ``p`` along ``axis``. Raises ``ValueError`` for one that cuts across groups.

    ``scatter``: along space DGRAD is cut by its outputs, whose results overlap.
    """
    if axis == "batch":
        images = (Range(0, start, stop - start),)
        write = Write.ADD if p.pass_ is Pass.WGRAD else Write.SET
        return _cut(p, write, images, (), images, batch=stop - start)
    if axis in p.space:
        return _along_space(p, p.space.index(axis), start, stop, scatter)
    if axis == "groups":
        step = p.out_channels // p.groups
        return _along_channels(p, "out_channels", start * step, stop * step)
    return _along_channels(p, axis, start, stop)


def _along_space(p: Convolution, index: int, start: int, stop: int, scatter: bool) -> Cut:
    """A part of the spatial axis ``index``, with what its outputs or inputs meet on the other side of the taps."""
    axis = p.axes[index]
    gathers = p.pass_ is Pass.DGRAD and not scatter
    other_side = axis.writing(start, stop) if gathers else axis.reading(start, stop)
    write = Write.SET
    if p.pass_ is Pass.WGRAD:
        write = Write.ADD
    elif scatter:
        write = Write.OVERLAP_ADD
    cut_range = Range(index + 2, start, stop - start)
    if other_side is None:
        return Cut({"x" if gathers else "y": (cut_range,)}, write, None)
    other_range = Range(index + 2, other_side[0], other_side[1] - other_side[0])
    x, y = (cut_range, other_range) if gathers else (other_range, cut_range)
    axes = (*p.axes[:index], other_side[2], *p.axes[index + 1 :])
    return _cut(p, write, (x,), (), (y,), axes=axes)


def _along_channels(p: Convolution, axis: str, start: int, stop: int) -> Cut:
    """A part of the input or output channels: whole groups, or some channels of one group."""
    ic, oc = p.in_channels // p.groups, p.out_channels // p.groups
    unit = oc if axis == "out_channels" else ic
    first, last = start // unit, -(-stop // unit)
    groups = last - first
    adds = (p.pass_, axis) in ((Pass.FPROP, "in_channels"), (Pass.DGRAD, "out_channels"))
    if start % unit == 0 and stop % unit == 0:
        x, y = Range(1, first * ic, groups * ic), Range(1, first * oc, groups * oc)
        w: tuple[Range, ...] = (Range(0, first * oc, groups * oc),)
        write = Write.ADD if adds and p.groups == 1 else Write.SET
    elif groups == 1:
        inside = Range(1, start, stop - start)
        if axis == "out_channels":
            x, y = Range(1, first * ic, ic), inside
            w = (Range(0, start, stop - start),)
        else:
            x, y = inside, Range(1, first * oc, oc)
            w = (Range(0, first * oc, oc), Range(1, start - first * ic, stop - start))
        write = Write.ADD if adds else Write.SET
    else:
        raise ValueError(f"{axis} [{start}, {stop}) cuts across groups of {unit}: cut at their boundaries or in one")
    return _cut(p, write, (x,), w, (y,), in_channels=x.length, out_channels=y.length, groups=groups)


def _cut(
    p: Convolution, write: Write, x: tuple[Range, ...], w: tuple[Range, ...], y: tuple[Range, ...], **sizes: object
) -> Cut:
    """The part of these ranges, whose problem has these ``sizes``. Parts that add keep their sums in fp32."""
    uses = {"x": x, "w": w, "y": y}
    layouts, alignment = zip(*(_narrowed(p, place, uses[role]) for place, role in enumerate(ROLES)), strict=True)
    sums = write is not Write.SET
    changes = {
        "bias": False,
        "activation": "none",
        "residual": False,
        "accumulate": p.accumulate or sums,
        "out_dtype": "fp32" if sums else p.out_dtype,
        "layouts": layouts,
        "alignment": alignment,
        **sizes,
    }
    return Cut(uses, write, changes)


def _narrowed(p: Convolution, place: int, ranges: tuple[Range, ...]) -> tuple[str, int]:
    """The layout and the alignment of the tensor at a place of :data:`ROLES`, narrowed to ``ranges``."""
    role, layout, align = ROLES[place], p.layouts[place], p.alignment[place]
    shape = list(p.shape(role))
    ranges = tuple(r for r in ranges if r.length != shape[r.dim])
    if not ranges:
        return layout, align
    itemsize = p.torch_dtype(role).itemsize
    strides = dense_strides(tuple(shape), layout)
    for r in ranges:
        shape[r.dim] = r.length
        # How far apart the elements of a view lie is not known here.
        align = math.gcd(align, r.start * itemsize * (1 if layout == "view" else strides[r.dim]))
    return ("view" if layout == "view" else layout_of(shape, strides)), align
