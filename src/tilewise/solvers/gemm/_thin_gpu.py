"""Thin products on a GPU: tiles, parts of sums, and the launches of Triton's kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tilewise.plan import Config
from tilewise.problems.gemm.problem import ROLES, GemmProblem
from tilewise.solvers.base import Cost, Run, SolverUnavailable
from tilewise.solvers.common.buffers import Arena, Slot
from tilewise.solvers.common.tiles import PROCESSORS, config_reasons, integer
from tilewise.solvers.common.triton_run import compiled, triton_missing
from tilewise.solvers.common.views import at, launch

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["Tiles", "bind", "configs", "cost", "launches", "unsupported", "workspace"]

THIN = 64
"""The most rows or columns that one tile has: more are for a library's kernels."""
MOST = 2**31 - 2**20
"""Most numbers of a result: kernels count them in 32 bits."""
LONG = (32, 64, 128)
"""Lengths of a tile along the long side."""
DEPTHS = {2: 128, 4: 32}
"""Terms of a step of the sums, by the bytes of an operand's number."""
MOST_PARTS = 32
WIDE = 4096
"""Sums of a tile from which on four warps have too few registers for their parts."""
BLOCK = 1024
"""Numbers that a program adds up from parts."""
PRECISION = {"ieee": "tf32x3", "tf32": "tf32"}
"""How fp32 operands are multiplied; ``tf32x3`` has fp32's accuracy."""
MEMORY = 0.8
"""Share of the memory's bandwidth that reading the large operand reaches."""


def unsupported(p: GemmProblem) -> list[str]:
    """Reasons: no Triton, a batch, no side that is short, both operands turned, or too many numbers for 32 bits."""
    reasons = triton_missing()
    if p.batch:
        reasons.append("takes one product, not a batch of them")
    if min(p.m, p.n) > THIN:
        reasons.append(f"is for at most {THIN} rows or columns on a GPU, not {p.m} and {p.n}")
    largest = max(p.nbytes(role) // p.torch_dtype(role).itemsize for role in ROLES)
    if largest > MOST:
        reasons.append(f"counts to {MOST}; one of the matrices has {largest} numbers")
    return reasons


@dataclass(frozen=True)
class Tiles:
    """A config's tiles and parts: ``rows`` by ``columns`` of the result, steps of ``depth``, ``parts`` of the sums."""

    p: GemmProblem
    rows: int
    columns: int
    depth: int
    parts: int
    warps: int
    stages: int

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles down and along the result."""
        return -(-self.p.m // self.rows), -(-self.p.n // self.columns)

    @property
    def part(self) -> int:
        """Terms of a part of the sums: whole steps."""
        steps = -(-self.p.k // self.depth)
        return -(-steps // self.parts) * self.depth

    @property
    def used(self) -> int:
        """Parts that have any terms."""
        return -(-self.p.k // self.part)

    @property
    def sums(self) -> Slot | None:
        """Where parts of sums lie in the workspace; ``None`` where there is one part."""
        return None if self.used == 1 else Arena().add((self.used, self.p.m, self.p.n), torch.float32)


def configs(p: GemmProblem) -> Iterable[Config]:
    """Tiles of each length, with as many parts as fill the multiprocessors, once and four times over."""
    depth = DEPTHS[p.torch_dtype("a").itemsize]
    short = max(16, 1 << (min(p.m, p.n) - 1).bit_length())
    found: dict[Config, None] = {}
    for long in LONG:
        rows, columns = (short, long) if p.m <= p.n else (long, short)
        count = -(-p.m // rows) * -(-p.n // columns)
        steps = -(-p.k // depth)
        for waves in (1, 4):
            parts = max(1, min(waves * PROCESSORS // count, steps, MOST_PARTS))
            warps = 8 if rows * columns >= WIDE else 4
            tile = Tiles(p, rows, columns, depth, parts, warps, 4)
            found[Config(tile=(rows, columns, depth), parts=tile.used, warps=warps, stages=4)] = None
    return list(found)


def workspace(p: GemmProblem, c: Config) -> int:
    """Bytes of the parts of sums."""
    sums = _tiles(p, c).sums
    return 0 if sums is None else sums.bytes


def cost(p: GemmProblem, c: Config) -> Cost:
    """The operands read once, at the rate of the memory as far as there are programs, and the parts of sums."""
    tiles = _tiles(p, c)
    programs = tiles.grid[0] * tiles.grid[1] * tiles.used
    busy = min(1.0, programs / PROCESSORS)
    moved = int(p.bytes / (MEMORY * busy))
    return Cost(p.flops, moved, 1 if tiles.sums is None else 2, 0.5 * busy, apart=2 * workspace(p, c))


def bind(p: GemmProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Run:
    """Compile the kernels for these strides. Raises ``SolverUnavailable`` with Triton's reason."""
    with config_reasons(p, c):
        tiles = _tiles(p, c)
    if any(t.stride(1) != 1 and t.shape[1] > 1 for t in (a, b, out)):
        raise SolverUnavailable("takes matrices whose rows are contiguous")
    return compiled(p, launches(tiles, a, b, out), a.device)


def launches(tiles: Tiles, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list[Launch]:
    """The product, and the sum of its parts where there are several."""
    from tilewise.kernels.triton.gemm.thin import add_parts, thin_product
    from tilewise.kernels.triton.launch import Pointer
    from tilewise.kernels.triton.overlap import may_overlap

    p, sums = tiles.p, tiles.sums
    left, right, result = (Pointer(place, 0, t.dtype) for place, t in enumerate((a, b, out)))
    bias = Pointer(4, 0, out.dtype) if p.bias else result
    down, along = tiles.grid
    overlaps = sums is not None and may_overlap(a.device)
    alone, steps = sums is None, tiles.part // tiles.depth
    target = result if sums is None else at(sums)
    stride, between = (out.stride(0), 0) if alone else (p.n, p.m * p.n)
    product = launch(
        thin_product, (down * along, tiles.used), (left, right, target, bias),
        (p.m, p.n, p.k, along, steps, a.stride(0), b.stride(0), stride, between), tiles.warps, tiles.stages,
        A_DEPTH_INNER=p.op[0] == "N", B_DEPTH_INNER=p.op[1] == "T", BIAS=p.bias and alone,
        ACCUMULATE=p.accumulate and alone, ACTIVATION=p.activation if alone else "none",
        PRECISION=PRECISION[p.precision], EVEN=p.k % tiles.depth == 0, LEADS=overlaps,
        BLOCK_M=tiles.rows, BLOCK_N=tiles.columns, BLOCK_K=tiles.depth,
    )  # fmt: skip
    if alone:
        return [product]
    count = p.m * p.n
    addition = launch(
        add_parts, (-(-count // BLOCK),), (target, result, bias), (p.n, count, tiles.used, out.stride(0)),
        BIAS=p.bias, ACCUMULATE=p.accumulate, ACTIVATION=p.activation, BLOCK=BLOCK,
        WAITS=overlaps,
    )  # fmt: skip
    return [product, replace(addition, overlaps=overlaps)]


@functools.lru_cache(maxsize=1024)
def _tiles(p: GemmProblem, c: Config) -> Tiles:
    """The tiles of a config. Raises ``KeyError`` or ``ValueError`` for what is no config of ``p``."""
    edges = c["tile"]
    if set(c) != {"tile", "parts", "warps", "stages"} or not isinstance(edges, tuple) or len(edges) != 3:
        raise ValueError("a tile of three sizes, parts, warps and stages would do")
    if any(n not in (16, 32, 64, 128) for n in edges):
        raise ValueError(f"tile={edges!r}: powers of two from 16 to 128 would do")
    parts = integer(c, "parts")
    if parts > MOST_PARTS:
        raise ValueError(f"parts={parts}: at most {MOST_PARTS} would do")
    return Tiles(p, *edges, parts=parts, warps=integer(c, "warps"), stages=integer(c, "stages"))
