"""What remains to be done to a result that other kernels have computed: bias, residual and activation, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.gemm.activations import activated

__all__ = ["finish"]


@triton.jit
def finish(
    out, bias, residual, rows, columns, count, batch_stride, row_stride, channels,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add ``bias`` and ``residual`` and apply ``ACTIVATION`` with its parameters, in place and in fp32.

    ``out`` has ``count`` numbers in matrices of ``rows`` by ``columns``, with columns contiguous; ``residual`` lies as
    it does. ``BIAS`` is ``"columns"`` where each column has a number, ``"rows"`` where each row has one, which repeat
    every ``channels`` rows, and else empty. Grid: blocks.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    line, column = place // columns, place % columns
    z, row = line // rows, line % rows
    at = z.to(tl.int64) * batch_stride + row.to(tl.int64) * row_stride + column
    value = tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
    if BIAS == "columns":
        value += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    elif BIAS == "rows":
        value += tl.load(bias + row % channels, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        value += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    value = activated(value, ACTIVATION, FIRST, SECOND, out.dtype.element_ty.primitive_bitwidth)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)
