"""The largest finite magnitude of real tensors with any strides, without atomics and so the same in every run."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["magnitudes"]


@triton.jit
def _largest(x, out, count, n1, n2, n3, s0, s1, s2, s3, DENSE: tl.constexpr, BLOCK: tl.constexpr):
    """The bits of the largest finite magnitude of one operand in this program's share."""
    top = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        e = start + tl.arange(0, BLOCK)
        if DENSE:
            offset = e
        else:
            row, plane = e // n3, e // n3 // n2
            offset = (e % n3).to(tl.int64) * s3 + (row % n2).to(tl.int64) * s2
            offset += (plane % n1).to(tl.int64) * s1 + (plane // n1).to(tl.int64) * s0
        value = tl.abs(tl.load(x + offset, mask=e < count, other=0.0).to(tl.float32))
        top = tl.maximum(top, tl.where(value <= 3.4028234663852886e38, value, 0.0))
    tl.store(out + tl.program_id(0), tl.max(top, axis=0).to(tl.int32, bitcast=True))


@triton.jit
def magnitudes(
    a, b, a_out, b_out,
    a_count, a_n1, a_n2, a_n3, a_s0, a_s1, a_s2, a_s3, b_count, b_n1, b_n2, b_n3, b_s0, b_s1, b_s2, b_s3,
    A_DENSE: tl.constexpr, B_DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bits of the largest finite magnitude that each program finds in ``a``, and in ``b``; 0 where there is none.

    An operand has ``count`` numbers, dimensions (count / (n1 n2 n3), n1, n2, n3) and strides s0 to s3, or is ``DENSE``.
    Grid (programs, 1 or 2): with 1 only ``a``.
    """
    if tl.program_id(1) == 0:
        _largest(a, a_out, a_count, a_n1, a_n2, a_n3, a_s0, a_s1, a_s2, a_s3, A_DENSE, BLOCK)
    else:
        _largest(b, b_out, b_count, b_n1, b_n2, b_n3, b_s0, b_s1, b_s2, b_s3, B_DENSE, BLOCK)
