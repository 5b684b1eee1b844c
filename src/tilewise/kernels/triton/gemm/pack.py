"""Copies of operands that lie awkwardly, in the form that a GPU's widest accesses and matrix units take."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.gemm.thin import operand_tile
from tilewise.kernels.triton.overlap import begin

__all__ = ["pack_operand"]


@triton.jit
def pack_operand(
    source, target, outers, depth, width, stride, batch_stride,
    DEPTH_INNER: tl.constexpr, OUTERS: tl.constexpr, DEPTHS: tl.constexpr,
    WAITS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """Copy matrices of ``outers`` rows (or columns) by ``depth`` into dense ones of ``outers`` by ``width``.

    In the copy depth is contiguous, and zeros follow from ``depth`` to ``width``. ``stride`` is that of
    :func:`~tilewise.kernels.triton.gemm.thin.operand_tile`, ``batch_stride`` lies between matrices.
    Grid: blocks of depth, of the other dimension, matrices.
    """
    begin(WAITS, LEADS)
    z = tl.program_id(2).to(tl.int64)
    outer = tl.program_id(1) * OUTERS + tl.arange(0, OUTERS)
    k = tl.program_id(0) * DEPTHS + tl.arange(0, DEPTHS)
    value = operand_tile(source + z * batch_stride, outer, outers, k, depth, stride, DEPTH_INNER, False)
    rows = z * outers + outer
    mask = (outer < outers)[:, None] & (k < width)[None, :]
    tl.store(target + (rows * width)[:, None] + k[None, :], value, mask=mask)
