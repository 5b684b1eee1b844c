"""How windows slide over a bottom: kernel, stride, padding and dilation of each axis, by Caffe's fields."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["Fail", "kernel_sizes", "pair", "pooled_size", "window_sizes"]

Fail = Callable[[str], NoReturn]


def kernel_sizes(message: Any, axes: int, fail: Fail) -> tuple[int, ...]:
    """The kernel's size along each of ``axes``, from ``kernel_size`` or ``kernel_h`` and ``kernel_w``."""
    sizes = window_sizes(message, "kernel_size", "kernel", axes, None, fail)
    if min(sizes, default=1) < 1:
        fail(f"kernel_size = {list(sizes)}; at least 1 would do")
    return sizes


def window_sizes(message: Any, field: str, stem: str, axes: int, default: int | None, fail: Fail) -> tuple[int, ...]:
    """Values of a repeated field for each of ``axes``; of ``stem_h`` and ``stem_w`` where these are given.

    One value counts for all axes. ``default`` stands for a field that is not given; where it is ``None``, one must be.
    """
    values = list(getattr(message, field))
    names = message.DESCRIPTOR.fields_by_name
    given = f"{stem}_h" in names and (message.HasField(f"{stem}_h") or message.HasField(f"{stem}_w"))
    if given:
        if values or axes != 2:
            fail(f"{stem}_h and {stem}_w are for two axes without {field}, not {axes} axes and {values}")
        return int(getattr(message, f"{stem}_h")), int(getattr(message, f"{stem}_w"))
    if not values:
        if default is None:
            fail(f"{field} is not given; one value, or one for each of {axes} axes, would do")
        values = [default]
    if len(values) not in (1, axes):
        fail(f"{field} = {values}; one value, or one for each of {axes} axes, would do")
    return tuple(int(value) for value in (values * axes if len(values) == 1 else values))


def pair(message: Any, field: str, stem: str, fail: Fail) -> tuple[int, int]:
    """Values of a field that is not repeated, or of ``stem_h`` and ``stem_w``, for height and width."""
    height, width = f"{stem}_h", f"{stem}_w"
    given = [name for name in (height, width) if message.HasField(name)]
    if given:
        if message.HasField(field) or len(given) == 1:
            fail(f"{field}, {height}, {width}: either the first alone or the two others would do")
        return int(getattr(message, height)), int(getattr(message, width))
    return (int(getattr(message, field)),) * 2


def pooled_size(size: int, kernel: int, stride: int, pad: int, *, any_pad: bool, ceil: bool = True) -> int:
    """How many windows lie along an axis of ``size``.

    Caffe rounds up, and leaves the last window out where it would begin beyond the bottom and the padding before it.
    It looks for that only where one of the axes has padding: ``any_pad``.
    """
    count = (math.ceil if ceil else math.floor)((size + 2 * pad - kernel) / stride) + 1
    if any_pad and (count - 1) * stride >= size + pad:
        count -= 1
    return count
