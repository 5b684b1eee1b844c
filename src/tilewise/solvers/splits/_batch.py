"""Parts of a mini-batch as problems of their own."""

from __future__ import annotations

import math
from dataclasses import replace

from tilewise.problems.base import dense_strides
from tilewise.problems.conv.problem import ROLES, ConvProblem

__all__ = ["batch_part"]


def batch_part(p: ConvProblem, size: int, unit: int) -> ConvProblem:
    """The problem of ``size`` images of ``p`` that start at any multiple of ``unit`` images."""
    part = p.split("batch", [n for n in (size, p.batch - size) if n])[0].problem
    assert part is not None
    alignment = []
    for role, layout, align in zip(ROLES, p.layouts, p.alignment, strict=True):
        if role != "w" and size < p.batch:
            image = 1 if layout == "view" else dense_strides(p.shape(role), layout)[0]
            align = math.gcd(align, image * unit * p.torch_dtype(role).itemsize)
        alignment.append(align)
    ax, aw, ay = alignment
    return replace(part, alignment=(ax, aw, ay))
