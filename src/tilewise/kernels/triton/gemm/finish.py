"""What remains to be done to a product that a library has computed: its bias and its activation, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.gemm.activations import activated

__all__ = ["finish"]


@triton.jit
def finish(
    out, bias, rows, columns, count, batch_stride, row_stride,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add ``bias`` to every row and apply ``ACTIVATION``, in place.

    ``out`` has ``count`` numbers in matrices of ``rows`` by ``columns``, with columns contiguous. Grid: blocks.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    line, column = place // columns, place % columns
    z, row = line // rows, line % rows
    pointers = out + z.to(tl.int64) * batch_stride + row.to(tl.int64) * row_stride + column
    value = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, activated(value, ACTIVATION).to(out.dtype.element_ty), mask=mask)
