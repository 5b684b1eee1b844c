"""Layer normalization of rows that one program holds in its registers: each number is read and written once."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["row_norm"]


@triton.jit
def row_norm(
    x, weight, bias, out, rows, columns,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows of ``out``: those of ``x`` less their mean, over their deviation, times ``weight`` plus ``bias``.

    Both have ``columns`` contiguous numbers to a row, ``COLUMNS`` at the most. Mean and variance are computed in fp32,
    one after the other (Ba et al. 2016, section 3). Grid: blocks of ``ROWS`` rows.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    exists = column < columns
    known = (row < rows)[:, None] & exists[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    value = tl.load(x + at, mask=known, other=0.0).to(tl.float32)
    distance = tl.where(known, value - (tl.sum(value, axis=1) / columns)[:, None], 0.0)
    variance = tl.sum(distance * distance, axis=1) / columns
    value = distance * (1.0 / tl.sqrt(variance + EPS))[:, None]
    if WEIGHT:
        value *= tl.load(weight + column, mask=exists, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        value += tl.load(bias + column, mask=exists, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=known)
