"""One complex matrix product per frequency over spectra in a workspace: on the matrix units, or by the library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tilewise.problem import ConvProblem, Pass
from tilewise.solvers._buffers import Slot, Strided
from tilewise.solvers._tiles import busy

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = [
    "BLOCKS",
    "RATES",
    "Block",
    "Matrices",
    "arithmetic",
    "factors",
    "filled",
    "launches",
    "matrices",
    "products",
    "shape",
]

LONGEST = 1024
"""Products summed in the matrix units before a sum is added outside of them, where fp32's accuracy is asked for."""
PEAK_BLOCK = 1024
WORKSPACE = 3
"""The tensor of a launch's pointers."""
SCALED = ("fp16x3", "fp16")
RATES = {"library": 1.0, "fp16x3": 3.0, "tf32x3": 1.4, "tf32": 3.0, "fp16": 6.0}
"""Rate of full tiles beside fp32 products of the library."""


@dataclass(frozen=True, slots=True)
class Block:
    """What one program computes: ``rows`` x ``columns`` of a product, ``depth`` products at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


BLOCKS = (
    (Block(64, 64, 32, 4, 3), 1.0), (Block(64, 64, 16, 4, 3), 0.92), (Block(128, 64, 16, 8, 3), 0.86),
    (Block(128, 64, 32, 8, 2), 0.84), (Block(64, 64, 32, 8, 2), 0.8), (Block(128, 32, 32, 8, 2), 0.75),
    (Block(64, 32, 32, 4, 3), 0.75), (Block(32, 64, 32, 4, 3), 0.7), (Block(32, 32, 32, 4, 3), 0.5),
    (Block(64, 16, 32, 4, 3), 0.4), (Block(16, 64, 32, 4, 3), 0.4), (Block(16, 16, 32, 2, 3), 0.2),
)  # fmt: skip
"""With their rate beside the best, as expected. Larger ones spill: a program holds three sums of each number."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """A spectrum as matrices for every frequency and group: complex numbers between them and between rows."""

    slot: Slot
    frequency: int
    group: int
    row: int

    def view(self, frequencies: int, groups: int, rows: int, columns: int, turned: bool = False) -> Strided:
        """All of them, (frequencies, groups, rows, columns), or with the last two exchanged."""
        sizes = (frequencies, groups, rows, columns)
        view = Strided(sizes, (self.frequency, self.group, self.row, 1), self.slot.offset // 8)
        return view.transposed if turned else view


def products(p: ConvProblem) -> list[str]:
    """The products that have the problem's precision, the most promising first."""
    if p.dtype != "fp32" or p.precision == "tf32":
        return ["fp16", "library"]
    return ["fp16x3", "library"]


def matrices(p: ConvProblem, rows: int, slots: dict[str, Slot]) -> dict[str, Matrices]:
    """The spectra of ``rows`` tiles of images: (frequency, row, channel), the filter's (frequency, out, in)."""
    into, outof = p.in_channels // p.groups, p.out_channels // p.groups
    return {
        "x": Matrices(slots["x"], rows * p.in_channels, into, p.in_channels),
        "w": Matrices(slots["w"], p.out_channels * into, outof * into, into),
        "y": Matrices(slots["y"], rows * p.out_channels, outof, p.out_channels),
    }


def shape(p: ConvProblem, rows: int) -> tuple[int, int, int]:
    """Rows, columns and depth of a group's product at one frequency."""
    into, outof = p.in_channels // p.groups, p.out_channels // p.groups
    return {Pass.FPROP: (rows, outof, into), Pass.DGRAD: (rows, into, outof), Pass.WGRAD: (outof, into, rows)}[p.pass_]


def filled(p: ConvProblem, rows: int, frequencies: int, block: Block) -> float:
    """Share of the arithmetic done that is asked for, times the share of multiprocessors that are busy."""
    m, n, k = shape(p, rows)
    tiles_m, tiles_n = -(-m // block.rows), -(-n // block.columns)
    share = m * n / (tiles_m * block.rows * tiles_n * block.columns)
    share *= k / (-(-k // block.depth) * block.depth)
    return share * busy(tiles_m * tiles_n * frequencies * p.groups)


def launches(
    p: ConvProblem, rows: int, frequencies: int, spectra: dict[str, Matrices], product: str, block: Block,
    peaks: Sequence[tuple[Slot, int]], top: Slot, accumulate: bool, sources: Mapping[str, int],
) -> list[Launch]:  # fmt: skip
    """The product, and before it, where operands are scaled, the search for their largest magnitudes.

    ``peaks``: of the first and second factor, with how many there are. ``top``: room for two numbers. ``sources``: the
    tensors that spectra and peaks of each role lie in.
    """
    from tilewise.kernels.triton import complex_gemm as kernels
    from tilewise.kernels.triton.launch import Launch, Pointer

    left, right, conjugate = factors(p.pass_)
    m, n, k = shape(p, rows)
    tiles_n = -(-n // block.columns)
    tiles = -(-m // block.rows) * tiles_n
    a, b, out = (spectra[role] for role in (left, right, p.result))
    scaled = product in SCALED
    constants: dict[str, Any] = {
        "A_DEPTH_INNER": p.pass_ is not Pass.WGRAD, "B_DEPTH_INNER": p.pass_ is Pass.FPROP, "CONJUGATE": conjugate,
        "ACCUMULATE": accumulate, "PRODUCT": product, "SCALED": scaled, "FORM": 3,
        "PROMOTE": LONGEST // block.depth if k > LONGEST and product.endswith("x3") else 0,
        "EVEN_M": m % block.rows == 0, "EVEN_N": n % block.columns == 0, "EVEN_K": k % block.depth == 0,
        "BLOCK_M": block.rows, "BLOCK_N": block.columns, "BLOCK_K": block.depth,
    }  # fmt: skip
    tops = [Pointer(WORKSPACE, top.offset + 4 * i, torch.int32) for i in range(2)]
    found = [
        Launch(
            kernels.complex_gemm,
            (tiles * frequencies * p.groups, 1, 1),
            (*(Pointer(sources[r], spectra[r].slot.offset, torch.float32) for r in (left, right, p.result)), *tops),
            (m, n, k, tiles_n, tiles, p.groups, *(step for x in (a, b, out) for step in (x.frequency, x.group, x.row))),
            constants,
            block.warps,
            block.stages,
        )
    ]
    if scaled:
        places = zip((left, right), peaks, strict=True)
        pointers = (*(Pointer(sources[role], slot.offset, torch.int32) for role, (slot, _) in places), tops[0])
        counts = tuple(count for _, count in peaks)
        found.insert(0, Launch(kernels.largest, (2, 1, 1), pointers, counts, {"BLOCK": PEAK_BLOCK}))
    return found


def factors(pass_: Pass) -> tuple[str, str, str]:
    """The left and the right factor, and which of them (a, b or none) is conjugated.

    Cross-correlation is a product with the conjugate; a full convolution, DGRAD, is not.
    """
    return {
        Pass.FPROP: ("x", "w", "b"),
        Pass.DGRAD: ("y", "w", "none"),
        Pass.WGRAD: ("y", "x", "a"),
    }[pass_]


def arithmetic(p: ConvProblem, rows: int, frequencies: int) -> int:
    """Real operations of all complex products."""
    return 8 * frequencies * p.groups * math.prod(shape(p, rows))
