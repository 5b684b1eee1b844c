"""One complex matrix product per frequency over spectra in a workspace: on the matrix units, or by the library.

Spectra are interleaved complex64, or for the matrix units in fp16 parts: see ``split_gemm.py``. Sums over few channels
need no product of their own: the inverse transform computes them where it would read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tilewise.kernels.cuda.irfft2_summed import MOST_SUMMED
from tilewise.kernels.cuda.operands import Memory
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.common.buffers import Slot, Strided
from tilewise.solvers.common.tiles import busy

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = [
    "BLOCKS",
    "FUSED",
    "IN_PARTS",
    "PART_BLOCKS",
    "PLANES",
    "RATES",
    "Block",
    "Matrices",
    "Scaled",
    "arithmetic",
    "by_library",
    "factors",
    "filled",
    "fuses",
    "launches",
    "matrices",
    "part_blocks",
    "part_launches",
    "products",
    "shape",
    "summands",
]

LONGEST = 1024
"""Products that matrix units sum before the sum is added in fp32 outside of them, which keeps fp32's accuracy."""
PEAK_BLOCK = 1024
WORKSPACE = 3
"""Number of the workspace among a launch's tensors."""
SCALED = ("fp16x3", "fp16")
"""Products of operands that are scaled by powers of two."""
FUSED = "fused"
"""The product inside the inverse transform, in fp32 and for few channels."""
PLANES = "planes"
"""The product of spectra that lie plane by plane, in fp32 and for few rows, columns or channels."""
RATES = {
    "library": 1.0, "fp16x3": 1.6, "tf32x3": 1.4, "tf32": 3.0, "fp16": 2.2, FUSED: 0.5, PLANES: 0.5, "split": 3.6,
    "half": 9.0,
}  # fmt: skip
"""Rate of full tiles relative to the library's fp32 products, for interleaved spectra or spectra in fp16 parts."""
IN_PARTS = {"fp16x3": "split", "fp16": "half"}
"""The form of fp16 parts that a product takes."""


@dataclass(frozen=True, slots=True)
class Block:
    """The part of a product that one program computes: ``rows`` x ``columns``, summed ``depth`` at a time.

    A complex product takes 3 real ``multiplications``, or 4, which need fewer registers.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    multiplications: int = 3


BLOCKS = (
    (Block(64, 64, 32, 4, 3), 1.0), (Block(64, 64, 16, 4, 3, 4), 0.95), (Block(64, 64, 16, 4, 3), 0.92),
    (Block(128, 64, 16, 8, 3, 4), 0.9), (Block(128, 64, 16, 8, 3), 0.86),
    (Block(128, 64, 32, 8, 2), 0.84), (Block(64, 64, 32, 8, 2), 0.8), (Block(128, 32, 32, 8, 2), 0.75),
    (Block(64, 32, 32, 4, 3), 0.75), (Block(32, 64, 32, 4, 3), 0.7), (Block(32, 32, 32, 4, 3), 0.5),
    (Block(64, 16, 32, 4, 3), 0.4), (Block(16, 64, 32, 4, 3), 0.4), (Block(16, 16, 32, 2, 3), 0.2),
)  # fmt: skip
"""Blocks with their expected rate relative to the best. Larger ones spill: a program holds three sums per number."""
PART_BLOCKS = {
    "split": (
        (Block(64, 64, 32, 8, 3), 1.0), (Block(64, 128, 32, 8, 4), 0.98), (Block(128, 64, 32, 8, 4), 0.95),
        (Block(64, 64, 64, 8, 3), 0.93), (Block(64, 128, 16, 8, 5), 0.8), (Block(64, 64, 16, 8, 5), 0.78),
        (Block(32, 64, 32, 4, 3), 0.75), (Block(64, 32, 32, 4, 3), 0.75), (Block(64, 32, 16, 4, 5), 0.6),
        (Block(32, 32, 32, 4, 4), 0.5), (Block(64, 16, 32, 4, 4), 0.35), (Block(16, 64, 32, 4, 3), 0.3),
        (Block(16, 16, 64, 4, 4), 0.15),
    ),
    "half": (
        (Block(64, 64, 64, 8, 3), 1.0), (Block(64, 128, 64, 8, 4), 0.98), (Block(128, 64, 64, 8, 4), 0.95),
        (Block(64, 64, 64, 4, 3), 0.94), (Block(64, 128, 16, 8, 5), 0.7), (Block(64, 64, 16, 8, 5), 0.68),
        (Block(32, 64, 64, 4, 3), 0.75), (Block(64, 32, 64, 4, 3), 0.75), (Block(64, 32, 16, 4, 5), 0.5),
        (Block(32, 32, 64, 4, 3), 0.5), (Block(64, 16, 64, 4, 3), 0.35), (Block(16, 64, 64, 4, 3), 0.3),
        (Block(16, 16, 64, 4, 4), 0.15),
    ),
}  # fmt: skip
"""As ``BLOCKS`` for fp16 parts. A program holds four sums per number; below 32 rows warps multiply separately."""
PART_UNIT = 8
"""Numbers that are copied at a time where the channels are a multiple of it."""
MOST_SUMS = 64
"""Registers of a thread for sums that are added to others outside of the matrix units; twice as many spill."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """A spectrum as a matrix for every frequency and group.

    ``frequency``, ``group``, ``row`` and ``part`` are strides: numbers from one to the next.
    """

    slot: Slot
    frequency: int
    group: int
    row: int
    part: int = 0

    def view(self, frequencies: int, groups: int, rows: int, columns: int, turned: bool = False) -> Strided:
        """All matrices as (frequencies, groups, rows, columns); with ``turned`` the last two are exchanged."""
        sizes = (frequencies, groups, rows, columns)
        view = Strided(sizes, (self.frequency, self.group, self.row, 1), self.slot.offset // 8)
        return view.transposed if turned else view


def products(p: ConvProblem) -> list[str]:
    """Products with the problem's precision, the most promising first."""
    if p.dtype != "fp32" or p.precision == "tf32":
        return ["fp16", "library"]
    return ["fp16x3", "library"]


def matrices(p: ConvProblem, rows: int, slots: dict[str, Slot], parts: Mapping[str, int]) -> dict[str, Matrices]:
    """Spectra by role: images as (frequency, part, row, channel), the filter as (frequency, part, out, in).

    ``rows`` is the number of tiles, ``parts`` how many fp16 parts each role's numbers have, 1 for complex numbers.
    Roles without a slot are left out.
    """
    into, outof = p.in_channels // p.groups, p.out_channels // p.groups
    lying = {
        "x": (rows * p.in_channels, into, p.in_channels),
        "w": (p.out_channels * into, outof * into, into),
        "y": (rows * p.out_channels, outof, p.out_channels),
    }
    return {
        role: Matrices(slot, parts[role] * lying[role][0], *lying[role][1:], lying[role][0])
        for role, slot in slots.items()
    }


def shape(p: ConvProblem, rows: int) -> tuple[int, int, int]:
    """Rows, columns and depth of a group's product at one frequency."""
    into, outof = p.in_channels // p.groups, p.out_channels // p.groups
    return {Pass.FPROP: (rows, outof, into), Pass.DGRAD: (rows, into, outof), Pass.WGRAD: (outof, into, rows)}[p.pass_]


def fuses(p: ConvProblem) -> bool:
    """Whether the product can be :data:`FUSED`: for 2-D problems, few channels, and no weight gradient."""
    return p.dims == 2 and p.pass_ is not Pass.WGRAD and shape(p, 1)[2] <= MOST_SUMMED


def summands(
    p: ConvProblem, images: int, frequencies: int, spectra: Mapping[str, Matrices], at: int
) -> tuple[Memory, Memory]:
    """The factors of a fused product: ``images`` tiles from number ``at`` of their spectrum on, and the filter."""
    left, right, _ = factors(p.pass_)
    _, columns, depth = shape(p, 1)
    a, b = spectra[left], spectra[right]
    inside = (b.row, 1) if p.pass_ is Pass.FPROP else (1, b.row)
    first = Memory(
        (frequencies, images, p.groups, depth), (a.frequency, a.row, a.group, 1), torch.complex64,
        math.gcd(a.slot.offset + 8 * at, 16),
    )  # fmt: skip
    second = Memory(
        (frequencies, p.groups, columns, depth), (b.frequency, b.group, *inside), torch.complex64,
        math.gcd(b.slot.offset, 16),
    )  # fmt: skip
    return first, second


def filled(p: ConvProblem, rows: int, frequencies: int, block: Block) -> float:
    """Share of the products in tiles that the result needs, times the share of busy multiprocessors."""
    m, n, k = shape(p, rows)
    tiles_m, tiles_n = -(-m // block.rows), -(-n // block.columns)
    share = m * n / (tiles_m * block.rows * tiles_n * block.columns)
    share *= k / (-(-k // block.depth) * block.depth)
    return share * busy(tiles_m * tiles_n * frequencies * p.groups)


def launches(
    p: ConvProblem, rows: int, frequencies: int, spectra: dict[str, Matrices], product: str, block: Block,
    peaks: Sequence[tuple[Slot, int]], top: Slot, accumulate: bool, sources: Mapping[str, int],
) -> list[Launch]:  # fmt: skip
    """The launch of the product, preceded by a search for the operands' peaks where they are scaled.

    ``peaks`` holds for the first and second factor where its blocks' peaks are and how many. ``top`` has room for two
    numbers. ``sources`` names the tensor that holds each role's spectra and peaks.
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
        "ACCUMULATE": accumulate, "PRODUCT": product, "SCALED": scaled, "FORM": block.multiplications,
        "PROMOTE": LONGEST // block.depth if interrupted(p, rows, product) else 0,
        "EVEN_M": m % block.rows == 0, "EVEN_N": n % block.columns == 0, "EVEN_K": k % block.depth == 0,
        "BLOCK_M": block.rows, "BLOCK_N": block.columns, "BLOCK_K": block.depth,
    }  # fmt: skip
    tops = [Pointer(WORKSPACE, top.offset + 4 * i, torch.int32) for i in range(2)]
    queued = [
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
        queued.insert(0, Launch(kernels.largest, (2, 1, 1), pointers, counts, {"BLOCK": PEAK_BLOCK}))
    return queued


@dataclass(frozen=True, slots=True)
class Scaled:
    """Where the peak of a factor is, from which the scale of its spectra follows (see ``split_gemm``)."""

    peak: Slot
    spread: int


def part_launches(
    p: ConvProblem, rows: int, frequencies: int, spectra: dict[str, Matrices], product: str, block: Block,
    scales: Mapping[str, Scaled], accumulate: bool, sources: Mapping[str, int],
) -> list[Launch]:  # fmt: skip
    """The launch of a product in fp16 parts. ``sources`` names the tensor that holds each role's spectra and peaks."""
    from tilewise.kernels.triton.launch import Launch, Pointer
    from tilewise.kernels.triton.split_gemm import split_gemm

    left, right, conjugate = factors(p.pass_)
    m, n, k = shape(p, rows)
    tiles_n = -(-n // block.columns)
    tiles = -(-m // block.rows) * tiles_n
    a, b, out = (spectra[role] for role in (left, right, p.result))
    unit = math.gcd(PART_UNIT, p.in_channels // p.groups, p.out_channels // p.groups)
    along = {Pass.FPROP: (1, 1, unit), Pass.DGRAD: (1, unit, unit), Pass.WGRAD: (unit, unit, 1)}[p.pass_]
    constants: dict[str, Any] = {
        "A_DEPTH_INNER": p.pass_ is not Pass.WGRAD, "B_DEPTH_INNER": p.pass_ is Pass.FPROP, "CONJUGATE": conjugate,
        "ACCUMULATE": accumulate, "SPLIT": IN_PARTS[product] == "split", "UNIT": unit,
        "PROMOTE": LONGEST // block.depth if interrupted(p, rows, product) else 0,
        "EVEN_M": m % block.rows == 0, "EVEN_N": n % block.columns == 0, "EVEN_K": k % block.depth == 0,
        "BLOCK_M": block.rows, "BLOCK_N": block.columns, "BLOCK_K": block.depth,
    }  # fmt: skip
    pointers = (
        *(Pointer(sources[role], spectra[role].slot.offset, torch.float16) for role in (left, right)),
        Pointer(sources[p.result], out.slot.offset, torch.float32),
        *(Pointer(sources[role], scales[role].peak.offset, torch.int32) for role in (left, right)),
    )
    operand_steps = (step // unit for x in (a, b) for step in (x.frequency, x.part, x.group, x.row))
    steps = (*operand_steps, out.frequency, out.group, out.row)
    sizes = (size // unit_along for size, unit_along in zip((m, n, k), along, strict=True))
    scalars = (*sizes, tiles_n, tiles, p.groups, scales[left].spread, scales[right].spread, *steps)
    grid = (tiles * frequencies * p.groups, 1, 1)
    return [Launch(split_gemm, grid, pointers, scalars, constants, block.warps, block.stages)]


def interrupted(p: ConvProblem, rows: int, product: str) -> bool:
    """Whether sums are so long that the matrix units' rounding would show."""
    return shape(p, rows)[2] > LONGEST and product.endswith("x3")


def part_blocks(p: ConvProblem, rows: int, product: str) -> list[tuple[Block, float]]:
    """Those of ``PART_BLOCKS`` that do not spill, with their rates."""
    blocks = PART_BLOCKS[IN_PARTS[product]]
    if not interrupted(p, rows, product):
        return list(blocks)
    return [(b, rate) for b, rate in blocks if 4 * b.rows * b.columns <= 32 * b.warps * MOST_SUMS]


def factors(pass_: Pass) -> tuple[str, str, str]:
    """Roles of the left and the right factor, and which of them (``a``, ``b`` or ``none``) is conjugated.

    Cross-correlation is a product with the conjugate; a full convolution, DGRAD, is not.
    """
    return {
        Pass.FPROP: ("x", "w", "b"),
        Pass.DGRAD: ("y", "w", "none"),
        Pass.WGRAD: ("y", "x", "a"),
    }[pass_]


def arithmetic(p: ConvProblem, rows: int, frequencies: int) -> int:
    """Real floating-point operations of all complex products."""
    return 8 * frequencies * p.groups * math.prod(shape(p, rows))


def by_library(
    p: ConvProblem, rows: int, frequencies: int, spectra: dict[str, Matrices], accumulate: bool,
    sources: Mapping[str, int],
) -> Callable[[Sequence[torch.Tensor | None]], None]:  # fmt: skip
    """A function that computes the products with torch, group by group, for spectra in the tensors it is given."""
    left, right, conjugate = factors(p.pass_)
    into, outof = p.in_channels // p.groups, p.out_channels // p.groups
    edges = {"x": (rows, into), "w": (outof, into), "y": (rows, outof)}

    def view(role: str, turned: bool) -> Strided:
        return spectra[role].view(frequencies, p.groups, *edges[role], turned)

    places = [
        (view(left, p.pass_ is Pass.WGRAD), sources[left]),
        (view(right, p.pass_ is Pass.FPROP), sources[right]),
        (view(p.result, False), sources[p.result]),
    ]

    def multiply(tensors: Sequence[torch.Tensor | None]) -> None:
        first, second, target = (placed.of(_numbers(tensors[source])) for placed, source in places)
        if conjugate == "a":
            first = first.conj()
        elif conjugate == "b":
            second = second.conj()
        for group in range(p.groups):
            torch.baddbmm(
                target[:, group], first[:, group], second[:, group], beta=int(accumulate), out=target[:, group]
            )

    return multiply


def _numbers(buffer: torch.Tensor | None) -> torch.Tensor:
    """A buffer as complex64 numbers."""
    assert buffer is not None
    return buffer[: buffer.numel() // 8 * 8].view(torch.complex64)
