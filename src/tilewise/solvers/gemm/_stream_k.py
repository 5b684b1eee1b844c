"""Products by stream-K on a GPU: tiles, programs, their stretches of work, and the launches of Triton's kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tilewise.plan import Config
from tilewise.problems.gemm.layouts import dense_row
from tilewise.problems.gemm.problem import ROLES, GemmProblem
from tilewise.solvers.common.buffers import Arena, Slot
from tilewise.solvers.common.tiles import integer
from tilewise.solvers.common.triton_run import triton_missing
from tilewise.solvers.common.views import at, launch

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch, Pointer

__all__ = [
    "COLUMNS",
    "NATIVE",
    "PRODUCTS",
    "Work",
    "launches",
    "uneven_columns",
    "unsupported",
    "wide",
    "work_of",
    "workspace",
]

MOST = 2**31 - 2**20
"""Most numbers of a matrix: kernels count them in 32 bits."""
EDGES = (16, 32, 64, 128, 256)
COLUMNS = (16, 32, 48, 64, 80, 96, 128, 256)
"""Columns of a tile: a power of two, and 16 or 32 more. A row of 65 numbers then is no tile of 128."""
PRODUCTS = {"ieee": ("tf32x3", "bf16x6"), "tf32": ("tf32",)}
"""How fp32 operands are multiplied, by the problem's precision: in three products of TF32 parts, or in six of bf16
parts, both with fp32's accuracy (Ootomo and Yokota 2022, section 3), or in one of TF32."""
NATIVE = "native"
"""How 16-bit operands are multiplied."""
PROMOTE = 1024
"""Terms of a sum of fp32 accuracy that matrix units add up before it is added to another outside of them."""
MOST_PROGRAMS = 4096
MOST_SPLITS = 32
LINES = 16
"""Lines of a tile that a program adds up."""
PACKED_OUTERS, PACKED_DEPTHS = 32, 32
"""The part of an operand that a program packs: rows or columns, and terms of sums."""
GRAIN, WIDEST = 16, 16
"""Numbers by whose multiples Triton knows sizes, and bytes of the widest access."""


@dataclass(frozen=True)
class Work:
    """A config's tiles and what its programs do.

    The long side of the result is the kernel's rows: matrix units take 64 of them at a time. Where that is the
    problem's columns the product is ``turned``: the transposed result from the operands in the other order. ``tile`` is
    a tile's rows, columns and step of the sums.

    ``programs`` have equal stretches of all steps; with ``splits``, which is 0 else, every tile is divided among so
    many programs instead. Operands named in ``pack`` are copied first, with depth contiguous and rows of whole steps.
    """

    p: GemmProblem
    tile: tuple[int, int, int]
    programs: int
    product: str
    warps: int
    stages: int
    splits: int = 0
    pack: str = ""

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
    def tiles(self) -> int:
        """Tiles of all matrices of the batch."""
        return self.grid[0] * self.grid[1] * max(1, self.p.batch)

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return -(-self.p.k // self.tile[2])

    @property
    def total(self) -> int:
        """Steps of all tiles."""
        return self.tiles * self.steps

    @property
    def used(self) -> int:
        """Programs that have any steps."""
        return self.tiles * self.splits if self.splits else min(self.programs, self.total)

    @property
    def shared(self) -> bool:
        """Whether any tile is shared by programs: all stretches are whole tiles otherwise."""
        if self.splits:
            return True
        quotient, remainder = divmod(self.total, self.used)
        return self.steps > 1 and (remainder > 0 or quotient % self.steps > 0)

    @property
    def share(self) -> str:
        """What programs have equal numbers of: whole ``tiles``, ``steps``, or ``parts`` of each tile."""
        return "parts" if self.splits else "steps" if self.shared else "tiles"

    @property
    def awkward(self) -> str:
        """The operands that are read as they lie although the widest accesses cannot read them."""
        return "".join(role for role in "ab" if role not in self.pack and not wide(self.p, role))

    @functools.cached_property
    def places(self) -> dict[str, Slot]:
        """What lies in the workspace: ``sums`` of parts of tiles, and packed operands."""
        arena, found = Arena(), {}
        rows, columns, depth = self.tile
        if self.shared:
            found["sums"] = arena.add((self.used, 1 if self.splits else 2, rows, columns), torch.float32)
        for role in self.pack:
            outers = self.p.m if role == "a" else self.p.n
            width = self.steps * depth
            found[role] = arena.add((max(1, self.p.batch), outers, width), self.p.torch_dtype(role))
        return found


def uneven_columns(columns: int) -> bool:
    """Whether a tile's columns are no power of two, so that a step multiplies twice.

    Of 16-bit numbers that the widest accesses cannot read, such tiles gave wrong sums and read outside their memory on
    an H100 (Triton 3.6), although the PTX is right. They are refused there; of other operands they are right.
    """
    return columns & (columns - 1) != 0


def wide(p: GemmProblem, role: str) -> bool:
    """Whether a GPU's widest accesses can read the operand of ``role`` as it lies, also at its edges."""
    row = dense_row(p, role)
    itemsize = p.torch_dtype(role).itemsize
    leading = p.leading["abc".index(role)] or row
    return row % GRAIN == 0 and leading * itemsize % WIDEST == 0 and p.alignment_of(role) == WIDEST


def unsupported(p: GemmProblem) -> list[str]:
    """Reasons: no Triton, or too many numbers for 32 bits."""
    reasons = triton_missing()
    largest = max(p.nbytes(role) // p.torch_dtype(role).itemsize for role in ROLES)
    if largest > MOST:
        reasons.append(f"counts to {MOST}; one of the matrices has {largest} numbers")
    return reasons


def workspace(work: Work) -> int:
    """Bytes of the sums of parts of tiles and of packed operands."""
    return max((slot.offset + slot.bytes for slot in work.places.values()), default=0)


def launches(work: Work, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list[Launch]:
    """The copies of packed operands, the product, and the sums of shared tiles where there are any."""
    from tilewise.kernels.triton.gemm.stream_k import add_stretches, stream_k_product
    from tilewise.kernels.triton.launch import Pointer
    from tilewise.kernels.triton.overlap import may_overlap

    p, places, (rows, columns, depth) = work.p, work.places, work.tile
    result = Pointer(2, 0, out.dtype)
    bias = Pointer(4, 0, out.dtype) if p.bias else result
    sums = at(places["sums"]) if work.shared else result
    sides = _operand(work, "a", a), _operand(work, "b", b)
    sizes, strides = (p.m, p.n), (out.stride(-2), 1)
    if work.turned:
        sides, sizes, strides = sides[::-1], sizes[::-1], strides[::-1]
    left, right = sides
    quotient, remainder = divmod(work.total, work.used)
    down, along = work.grid
    exact = p.dtype == "fp32" and p.precision == "ieee"
    main = 1 << (columns.bit_length() - 1)
    cut = (down, along, work.steps, quotient, remainder, work.splits)
    batch = out.stride(0) if p.batch else 0
    common: dict[str, Any] = {
        "BIAS": p.bias, "BIAS_ALONG_ROWS": work.turned, "ACCUMULATE": p.accumulate, "ACTIVATION": p.activation,
        "PARTS": work.splits > 0, "BLOCK_M": rows, "BLOCK_N": main, "MORE": columns - main,
    }  # fmt: skip
    overlap = may_overlap(a.device)
    queued = [_packing(work, role, tensor, overlap) for role, tensor in (("a", a), ("b", b)) if role in work.pack]
    product = launch(
        stream_k_product, (work.used,), (left.pointer, right.pointer, result, bias, sums),
        (*sizes, p.k, *cut, left.stride, right.stride, left.batch, right.batch, batch, *strides),
        work.warps, work.stages, LEFT_DEPTH_INNER=left.inner, RIGHT_DEPTH_INNER=right.inner,
        PRECISION="ieee" if work.product == NATIVE else work.product, LEFT_EVEN=left.even, RIGHT_EVEN=right.even,
        PROMOTE=PROMOTE // depth if exact and p.k > PROMOTE else 0, BLOCK_K=depth,
        WAITS=overlap and work.pack != "", LEADS=overlap and work.shared, **common,
    )  # fmt: skip
    queued.append(replace(product, overlaps=overlap and len(queued) > 0))
    if work.shared:
        lines = min(LINES, rows)
        grid = (work.tiles, rows // lines)
        addition = launch(
            add_stretches, grid, (sums, result, bias), (*sizes, *cut, batch, *strides),
            SPAN=1 << (columns - 1).bit_length(), LINES=lines, WAITS=overlap, **common,
        )  # fmt: skip
        queued.append(replace(addition, overlaps=overlap))
    return queued


@dataclass(frozen=True)
class _Operand:
    """An operand as the product reads it: where it begins, its stride and that of its batch, and how it lies."""

    pointer: Pointer
    stride: int
    batch: int
    inner: bool
    even: bool


def _operand(work: Work, role: str, tensor: torch.Tensor) -> _Operand:
    """The tensor of ``role``, or its packed copy."""
    from tilewise.kernels.triton.launch import Pointer

    if role in work.pack:
        slot = work.places[role]
        _, outers, width = slot.sizes
        return _Operand(at(slot), width, outers * width, True, True)
    inner = work.p.op["ab".index(role)] == "NT"["ab".index(role)]
    batch = tensor.stride(0) if work.p.batch else 0
    pointer = Pointer("ab".index(role), 0, tensor.dtype)
    return _Operand(pointer, tensor.stride(-2), batch, inner, work.p.k % work.tile[2] == 0)


def _packing(work: Work, role: str, tensor: torch.Tensor, overlap: bool) -> Launch:
    """The launch that packs the operand of ``role``. The first one waits for all that was queued before."""
    from tilewise.kernels.triton.gemm.pack import pack_operand
    from tilewise.kernels.triton.launch import Pointer

    p, slot = work.p, work.places[role]
    batch, outers, width = slot.sizes
    lies = p.op["ab".index(role)] == "NT"["ab".index(role)]
    source = Pointer("ab".index(role), 0, tensor.dtype)
    grid = (-(-width // PACKED_DEPTHS), -(-outers // PACKED_OUTERS), batch)
    waits = overlap and role != work.pack[0]
    packing = launch(
        pack_operand, grid, (source, at(slot)),
        (outers, p.k, width, tensor.stride(-2), tensor.stride(0) if p.batch else 0), DEPTH_INNER=lies,
        OUTERS=PACKED_OUTERS, DEPTHS=PACKED_DEPTHS, WAITS=waits, LEADS=overlap,
    )  # fmt: skip
    return replace(packing, overlaps=waits)


@functools.lru_cache(maxsize=1024)
def work_of(p: GemmProblem, c: Config) -> Work:
    """The work of a config. Raises ``KeyError`` or ``ValueError`` for what is no config of ``p``."""
    exact, share, tile = p.dtype == "fp32", c["share"], c["tile"]
    counted = "splits" if share == "parts" else "programs"
    names = {"tile", counted, "share", "warps", "stages", *({"product"} if exact else ())}
    if not names <= set(c) <= names | {"pack"} or not isinstance(tile, tuple) or len(tile) != 3:
        raise ValueError(f"a tile of three sizes, {', '.join(sorted(names - {'tile'}))} would do, and pack may be")
    rows, columns, depth = tile
    if rows not in EDGES or columns not in COLUMNS or depth not in EDGES or rows * columns > 2**15:
        words = f"rows and depth {', '.join(map(str, EDGES))}, columns {', '.join(map(str, COLUMNS))}"
        raise ValueError(f"tile={tile!r}: {words}, of at most 2^15 numbers, would do")
    product = c["product"] if exact else NATIVE
    if exact and product not in PRODUCTS[p.precision]:
        raise ValueError(f"product={product!r}: one of {', '.join(PRODUCTS[p.precision])} would do")
    count, warps, stages = integer(c, counted), integer(c, "warps"), integer(c, "stages")
    most = MOST_SPLITS if share == "parts" else MOST_PROGRAMS
    if count > most or warps not in (1, 2, 4, 8) or stages > 8:
        raise ValueError(f"{c}: at most {most} {counted}, 1, 2, 4 or 8 warps and 8 stages would do")
    pack = c.get("pack", "")
    if pack not in ("", "a", "b", "ab"):
        raise ValueError(f"pack={pack!r}: a, b or ab would do")
    programs, splits = (0, count) if share == "parts" else (count, 0)
    work = Work(p, (rows, columns, depth), programs, str(product), warps, stages, splits, str(pack))
    if uneven_columns(columns) and product == NATIVE and work.awkward:
        raise ValueError(f"tile={tile!r}: a power of two as columns, or pack={work.awkward} would do")
    if share != work.share or not (splits == 0 or 2 <= splits <= work.steps) or work.used > MOST_PROGRAMS:
        raise ValueError(f"share={share!r}, {counted}={count}: programs would have equal numbers of {work.share}")
    return work
