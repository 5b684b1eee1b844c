"""Products by stream-K on a GPU: tiles, programs, their stretches of work, and the launches of Triton's kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tilewise.plan import Config
from tilewise.problems.gemm.problem import ROLES, GemmProblem
from tilewise.solvers.base import Cost
from tilewise.solvers.common.buffers import Arena, Slot
from tilewise.solvers.common.tiles import PROCESSORS, integer
from tilewise.solvers.common.triton_run import has_triton
from tilewise.solvers.common.views import at, launch

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["PRODUCTS", "Work", "configs", "cost", "launches", "unsupported", "work_of"]

MOST = 2**31 - 2**20
"""Most numbers of a matrix: kernels count them in 32 bits."""
EDGES = (16, 32, 64, 128, 256)
PRODUCTS = {"ieee": ("tf32x3", "bf16x6"), "tf32": ("tf32",)}
"""How fp32 operands are multiplied, by the problem's precision: in three products of TF32 parts, or in six of bf16
parts, both with fp32's accuracy (Ootomo and Yokota 2022, section 3), or in one of TF32."""
NATIVE = "native"
"""How 16-bit operands are multiplied."""
TIMES = {"tf32x3": 3, "bf16x6": 6, "tf32": 1, NATIVE: 1}
"""Products of matrix units for one."""
PROMOTE = 1024
"""Terms of a sum of fp32 accuracy that matrix units add up before it is added to another outside of them."""
SHARE = {False: "tiles", True: "steps"}
"""What programs have equal numbers of, by whether tiles are shared."""
MOST_PROGRAMS = 4096
LINES = 16
"""Lines of a tile that a program adds up."""
MEMORY, CACHE, ONE_READS = 3e6, 5.5e6, 1e5
"""Bytes a microsecond from an H100's memory, from its second cache, and that one of its multiprocessors can read."""
RATES = {"tf32x3": 2e6, "bf16x6": 4e6, "tf32": 2e6, NATIVE: 4e6}
"""Operations a microsecond that the matrix units of one multiprocessor reach in kernels like these."""
FIRST_US, LAUNCH_US = 1.0, 1.5
"""Microseconds until the first tiles are there, and that a second kernel takes at least."""


@dataclass(frozen=True)
class Work:
    """A config's tiles and the stretches of its programs.

    The long side of the result is the kernel's rows: matrix units take 64 of them at a time. Where that is the
    problem's columns the product is ``turned``: the transposed result from the operands in the other order. ``tile`` is
    a tile's rows, columns and step of the sums.
    """

    p: GemmProblem
    tile: tuple[int, int, int]
    programs: int
    product: str
    warps: int
    stages: int

    @property
    def turned(self) -> bool:
        """Whether the problem has more columns than rows."""
        return self.p.n > self.p.m

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles down and along the result, as the kernel has it."""
        rows, columns = (self.p.n, self.p.m) if self.turned else (self.p.m, self.p.n)
        return -(-rows // self.tile[0]), -(-columns // self.tile[1])

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return -(-self.p.k // self.tile[2])

    @property
    def total(self) -> int:
        """Steps of all tiles."""
        return self.grid[0] * self.grid[1] * self.steps

    @property
    def used(self) -> int:
        """Programs that have any steps."""
        return min(self.programs, self.total)

    @property
    def shared(self) -> bool:
        """Whether any tile is shared by programs: all stretches are whole tiles otherwise."""
        quotient, remainder = divmod(self.total, self.used)
        return self.steps > 1 and (remainder > 0 or quotient % self.steps > 0)

    @property
    def sums(self) -> Slot | None:
        """Where sums of parts of tiles lie in the workspace; ``None`` where no tile is shared."""
        rows, columns, _ = self.tile
        return Arena().add((self.used, 2, rows, columns), torch.float32) if self.shared else None


def unsupported(p: GemmProblem) -> list[str]:
    """Reasons: no Triton, a batch, or too many numbers for 32 bits."""
    reasons = [] if has_triton() else ["needs the package triton"]
    if p.batch:
        reasons.append("takes one product, not a batch of them")
    largest = max(p.nbytes(role) // p.torch_dtype(role).itemsize for role in ROLES)
    if largest > MOST:
        reasons.append(f"counts to {MOST}; one of the matrices has {largest} numbers")
    return reasons


@functools.cache
def _processors() -> int:
    """Multiprocessors of the current GPU; those of an H100 where there is none."""
    if not torch.cuda.is_available():
        return PROCESSORS
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def configs(p: GemmProblem) -> Iterable[Config]:
    """Tiles of each shape with one or two programs for each multiprocessor, or one for each tile, the best first."""
    products = PRODUCTS[p.precision] if p.dtype == "fp32" else (NATIVE,)
    found = []
    for product in products:
        for tile, warps, stages in _tiles(p):
            whole = Work(p, tile, 1, product, warps, stages)
            tiles = whole.grid[0] * whole.grid[1]
            most = min(whole.total, 2 * _processors())
            counts = dict.fromkeys((min(most, _processors()), most, tiles))
            found += [replace(whole, programs=programs) for programs in counts if programs <= most]
    found.sort(key=lambda work: _expected_us(work) + (LAUNCH_US if work.shared else 0))
    return [_config(work) for work in found]


def _tiles(p: GemmProblem) -> Iterable[tuple[tuple[int, int, int], int, int]]:
    """Tiles with all of the short side up to 128, warps and stages."""
    wide = p.torch_dtype("a").itemsize == 4
    long, short = max(p.m, p.n), min(p.m, p.n)
    columns = min(128, max(16, 1 << (short - 1).bit_length()))
    for rows in (64, 128) if long > 64 else (64,):
        for side in (columns, columns // 2) if columns == 128 else (columns,):
            depth = 32 if wide else 64
            held = (rows + side) * depth * (4 if wide else 2)
            stages = max(2, min(5, 2**17 // held))
            yield (rows, side, depth), 8 if rows * side >= 2**14 else 4, stages


def _config(work: Work) -> Config:
    """The config of some work."""
    named = {} if work.product == NATIVE else {"product": work.product}
    share = SHARE[work.shared]
    return Config(
        tile=work.tile, programs=work.programs, share=share, warps=work.warps, stages=work.stages, **named
    )  # fmt: skip


def _expected_us(work: Work) -> float:
    """Microseconds that the kernels take of an H100, without their launches: what orders configs.

    A program reads the tiles of its steps, at its share of the memory's rate or its own limit, while matrix units
    work on others. The first tiles are waited for.
    """
    rows, columns, depth = work.tile
    size = work.p.torch_dtype("a").itemsize
    active = min(work.used, _processors())
    read = (rows + columns) * depth * size / min(CACHE / active, ONE_READS)
    multiplied = 2 * rows * columns * depth * TIMES[work.product] / RATES[work.product]
    steps = -(-work.total // work.used) * (work.used / active)
    summed = 2 * 4 * rows * columns * min(2 * work.used, work.used + work.grid[0] * work.grid[1])
    return FIRST_US + steps * max(read, multiplied) + (summed / CACHE if work.shared else 0)


def workspace(work: Work) -> int:
    """Bytes of the sums of parts of tiles."""
    return 0 if work.sums is None else work.sums.bytes


def cost(work: Work) -> Cost:
    """The product as the device can do it at best, and beside that what tiles and shared sums take longer."""
    p = work.p
    late_us = _expected_us(work) - p.bytes / MEMORY
    return Cost(p.flops, p.bytes, 1 + work.shared, apart=max(0, int(MEMORY * late_us)))


def launches(work: Work, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list[Launch]:
    """The product, and the sums of shared tiles where there are any."""
    from tilewise.kernels.triton.gemm.stream_k import add_stretches, stream_k_product
    from tilewise.kernels.triton.launch import Pointer

    p, sums, (rows, columns, depth) = work.p, work.sums, work.tile
    left, right, result = (Pointer(place, 0, t.dtype) for place, t in enumerate((a, b, out)))
    bias = Pointer(4, 0, out.dtype) if p.bias else result
    sizes, strides, places = (p.m, p.n), (a.stride(0), b.stride(0)), (out.stride(0), 1)
    inner = p.op[0] == "N", p.op[1] == "T"
    if work.turned:
        left, right, sizes, strides, places, inner = right, left, sizes[::-1], strides[::-1], places[::-1], inner[::-1]
    quotient, remainder = divmod(work.total, work.used)
    along = work.grid[1]
    exact = p.dtype == "fp32" and p.precision == "ieee"
    common = {"BIAS": p.bias, "BIAS_ALONG_ROWS": work.turned, "ACCUMULATE": p.accumulate}
    product = launch(
        stream_k_product, (work.used,), (left, right, result, bias, result if sums is None else at(sums)),
        (*sizes, p.k, along, work.steps, quotient, remainder, *strides, *places), work.warps, work.stages,
        LEFT_DEPTH_INNER=inner[0], RIGHT_DEPTH_INNER=inner[1],
        PRECISION="ieee" if work.product == NATIVE else work.product, EVEN=p.k % depth == 0,
        PROMOTE=PROMOTE // depth if exact and p.k > PROMOTE else 0,
        BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=depth, **common,
    )  # fmt: skip
    if sums is None:
        return [product]
    lines = min(LINES, rows)
    addition = launch(
        add_stretches, (work.grid[0] * along, rows // lines), (at(sums), result, bias),
        (*sizes, along, work.steps, quotient, remainder, *places),
        BLOCK_M=rows, BLOCK_N=columns, LINES=lines, **common,
    )  # fmt: skip
    return [product, addition]


@functools.lru_cache(maxsize=1024)
def work_of(p: GemmProblem, c: Config) -> Work:
    """The work of a config. Raises ``KeyError`` or ``ValueError`` for what is no config of ``p``."""
    tile, names = c["tile"], {"tile", "programs", "share", "warps", "stages"}
    exact = p.dtype == "fp32"
    if set(c) != names | ({"product"} if exact else set()) or not isinstance(tile, tuple) or len(tile) != 3:
        raise ValueError("a tile of three sizes, programs, share, warps, stages and for fp32 a product would do")
    rows, columns, depth = tile
    if rows not in EDGES or columns not in EDGES or depth not in EDGES or rows * columns > 2**15:
        raise ValueError(f"tile={tile!r}: powers of two from 16 to 256, of which two are at most 2^15, would do")
    product = c["product"] if exact else NATIVE
    if exact and product not in PRODUCTS[p.precision]:
        raise ValueError(f"product={product!r}: one of {', '.join(PRODUCTS[p.precision])} would do")
    numbers = {name: integer(c, name) for name in ("programs", "warps", "stages")}
    if numbers["programs"] > MOST_PROGRAMS or numbers["warps"] not in (1, 2, 4, 8) or numbers["stages"] > 8:
        raise ValueError(f"{c}: at most {MOST_PROGRAMS} programs, 1, 2, 4 or 8 warps and 8 stages would do")
    work = Work(p, (rows, columns, depth), numbers["programs"], str(product), numbers["warps"], numbers["stages"])
    if c["share"] != SHARE[work.shared]:
        raise ValueError(f"share={c['share']!r}: these programs have equal numbers of {SHARE[work.shared]}")
    return work
