"""How a product is cut along an axis: which ranges of its matrices a part takes, and what its own sizes are."""

from __future__ import annotations

import math
from typing import Any

from tilewise.problems.base import Range, Write
from tilewise.problems.gemm.layouts import ROLES, Product, dense_row, matrix_axes, normal_leading

__all__ = ["SIZES", "cut", "step_of"]

SIZES = {"batch": "batch", "rows": "m", "columns": "n", "depth": "k"}
"""The field that has the size along each axis."""


def cut(p: Product, axis: str, start: int, length: int) -> tuple[dict[str, tuple[Range, ...]], Write, dict[str, Any]]:
    """The part of ``p`` with ``length`` of ``axis`` from ``start`` on: its ranges, its write, and its changed fields.

    Parts of the depth are terms of a sum, which is kept in fp32.
    """
    sums = axis == "depth"
    uses: dict[str, tuple[Range, ...]] = {}
    leading, alignment = [], []
    for place, role in enumerate(ROLES):
        dim = _dim(p, role, axis)
        lead, align = p.leading[place], p.alignment[place]
        if dim is not None:
            uses[role] = (Range(dim, start, length),)
            lead = _leading(p, role, axis, length)
            align = math.gcd(align, start * step_of(p, role, dim) * p.torch_dtype(role).itemsize)
        leading.append(lead)
        alignment.append(align)
    changes = {
        SIZES[axis]: length,
        "bias": False,
        "activation": "none",
        "accumulate": p.accumulate or sums,
        "out_dtype": "fp32" if sums else p.out_dtype,
        "leading": tuple(leading),
        "alignment": tuple(alignment),
    }
    return uses, Write.ADD if sums else Write.SET, changes


def step_of(p: Product, role: str, dim: int) -> int:
    """Elements between neighbours along ``dim`` of the tensor of ``role``; 1, which divides all, where it is unknown.

    How far apart the matrices of a view lie is known only where the view is bound.
    """
    shape, place = p.shape(role), ROLES.index(role)
    if dim == len(shape) - 1:
        return 1
    row = p.leading[place] or dense_row(p, role)
    if dim == len(shape) - 2:
        return row
    return 1 if p.leading[place] else row * shape[-2]


def _dim(p: Product, role: str, axis: str) -> int | None:
    """The dimension of the tensor of ``role`` that lies along ``axis``; ``None`` where it has none."""
    if axis == "batch":
        return 0
    axes = matrix_axes(p.op, role)
    return axes.index(axis) + (p.batch > 0) if axis in axes else None


def _leading(p: Product, role: str, axis: str, length: int) -> int:
    """The leading dimension of the part of a matrix that is cut along ``axis``; 0 where the part is dense."""
    lead, row = p.leading[ROLES.index(role)], dense_row(p, role)
    rows_axis, row_axis = matrix_axes(p.op, role)
    whole = p.extent(axis)
    if axis == "batch" or length == whole:
        return lead
    rows, left = p.extent(rows_axis), row
    if axis == row_axis:
        left = length
    else:
        rows = length
    return normal_leading(p.batch, rows, left, lead or row)
