"""Complex products over spectra that lie plane by plane, for products with few rows, columns or channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.common.buffers import Slot
from tilewise.solvers.fourier._frequency_products import factors, shape

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["FEW", "few", "launches"]

FEW = 8
"""Rows, columns or summed products up to which arithmetic is small beside the traffic."""
EDGE = 4
"""Rows and columns of a tile; twice as many in one direction where the other has one."""
UNROLLED = 4
"""Longest sums that are written out without a loop."""
SHORT = 512
"""Numbers of a plane below which a program is one warp."""
WARP_NUMBERS = 64


def few(p: ConvProblem, rows: int) -> bool:
    """Whether the product for ``rows`` tiles has few rows, columns or channels."""
    return min(shape(p, rows)) <= FEW


def launches(
    p: ConvProblem, rows: int, frequencies: int, slots: Mapping[str, Slot], accumulate: bool, sources: Mapping[str, int]
) -> list[Launch]:
    """The product over planes: (tile, channel) of operands and results, (out, in) of the filter.

    ``slots`` and ``sources`` say where each role's spectra begin and in which tensor.
    """
    from tilewise.kernels.triton.launch import Launch, Pointer
    from tilewise.kernels.triton.plane_product import plane_product

    left, right, conjugate = factors(p.pass_)
    m, n, k = shape(p, rows)
    into, outof = p.in_channels // p.groups, p.out_channels // p.groups
    # From group to group, and between the two dimensions that a matrix of planes has.
    lying = {"x": (into, p.in_channels, 1), "w": (outof * into, into, 1), "y": (outof, p.out_channels, 1)}
    (a_group, *a), (b_group, *b), out = (lying[role] for role in (left, right, p.result))
    if left == "y" and right == "x":  # the sum goes over rows of both
        a = a[::-1]
    if right == "w" and left == "x":  # filters are (out, in), the sum goes over in
        b = b[::-1]
    tile_m, tile_n = _edges(m, n)
    warps = 1 if frequencies < SHORT else 2
    block = WARP_NUMBERS * warps
    tiles_n = -(-n // tile_n)
    tiles, pieces = -(-m // tile_m) * tiles_n, -(-frequencies // block)
    constants: dict[str, Any] = {
        "CONJUGATE": conjugate, "ACCUMULATE": accumulate, "DEPTH": k if k <= UNROLLED else 0, "UNROLL": 2,
        "BLOCK_M": tile_m, "BLOCK_N": tile_n, "BLOCK": block, "EVEN": frequencies % block == 0,
    }  # fmt: skip
    pointers = tuple(Pointer(sources[role], slots[role].offset, torch.float32) for role in (left, right, p.result))
    scalars = (m, n, k, frequencies, tiles_n, tiles, p.groups, pieces, a_group, *a, b_group, *b, *out)
    return [Launch(plane_product, (tiles * p.groups * pieces, 1, 1), pointers, scalars, constants, warps)]


def _edges(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a tile."""
    m, n = (min(EDGE, 1 << (size - 1).bit_length()) for size in (rows, columns))
    if n == 1 and rows > EDGE:
        m = 2 * EDGE
    elif m == 1 and columns > EDGE:
        n = 2 * EDGE
    return m, n
