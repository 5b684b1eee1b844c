"""Thin products on a CPU: tiles, shares of threads, and the run of the compiled kernel."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tilewise.kernels.cpu.gemm.told import DEPTH_OF_DOTS, DEPTH_OF_OUTER, TILES, Told, zeros
from tilewise.kernels.cpu.sizes import HEADER, LANES
from tilewise.plan import Config
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.base import Cost, Run, SolverUnavailable
from tilewise.solvers.common.cpu_run import (
    balanced_parts,
    byte_strides,
    kernel_data,
    numba_missing,
    numba_reasons,
    start,
    vector_lanes,
    with_teams,
)
from tilewise.solvers.common.tiles import config_reasons, integer

__all__ = ["bind", "configs", "cost", "unsupported", "workspace"]

THIN = 128
"""The most rows or columns of a product that is thin."""
ONE_THREAD = 2e5
"""Multiply-adds that one thread does in less time than it takes to start others."""
FIRST_CACHE = 2**14
"""Bytes of a tile of the large operand, which stay in a core's first cache."""
SECOND_CACHE = 2**18
"""Bytes of the small operand that are used at a time where threads divide the rows, in a core's second cache."""
EFFICIENCY = 0.8
"""Share of the processor's peak that sums in registers reach where tiles are full."""


def unsupported(p: GemmProblem) -> list[str]:
    """Reasons: no Numba, a batch, both operands stored with their rows exchanged, or no axis that is short."""
    reasons = numba_missing()
    if p.dtype != "fp32" or p.out_dtype != "fp32":
        reasons.append(f"on a CPU takes fp32, not {p.dtype} to {p.out_dtype}")
    if p.batch:
        reasons.append("takes one product, not a batch of them")
    if p.op == "TT":
        reasons.append("takes NN, NT and TN, not TT: neither columns nor sums lie in one row of an operand")
    if min(p.m, p.n) > THIN:
        reasons.append(f"is for at most {THIN} rows or columns, not {p.m} and {p.n}")
    return reasons


@dataclass(frozen=True)
class Layout:
    """The tiles of a config and all that follows from them.

    ``rows`` and ``others`` are the most of a block: rows of the result and vectors of its columns, or with ``dots``
    rows of the long and of the short operand. Threads divide the columns of the result where ``columns`` is set, else
    its rows. Where it is ``turned`` the right operand of an NN product is copied with its rows exchanged: it is short.
    """

    p: GemmProblem
    lanes: int
    rows: int
    others: int
    columns: bool
    turned: bool = False

    @property
    def dots(self) -> bool:
        """Whether vectors lie along the sums, which are contiguous in both operands."""
        return self.p.op == "NT" or self.turned

    @functools.cached_property
    def many(self) -> tuple[int, int, int]:
        """Tiles along the axis that threads divide: their number, lines of each, lines of the last."""
        extent = self.p.n if self.columns else self.p.m
        if self.dots:
            return _fixed(extent, self.rows)
        return _fixed(extent, self.others * self.lanes) if self.columns else _balanced(extent, self.rows)

    @functools.cached_property
    def few(self) -> tuple[int, int, int]:
        """The same along the other axis."""
        extent = self.p.m if self.columns else self.p.n
        if self.dots:
            return _balanced(extent, self.others)
        return _balanced(extent, self.rows) if self.columns else _fixed(extent, self.others * self.lanes)

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """Sizes of the blocks that are called: for a whole tile and the last one along the short axis, twice."""
        few, many = self.few[1:], self.many[1:]
        if self.dots:
            return tuple((self.rows, other) for _ in many for other in few)
        if self.columns:
            return tuple((row, -(-column // self.lanes)) for column in many for row in few)
        return tuple((row, -(-column // self.lanes)) for row in many for column in few)

    @property
    def part(self) -> int:
        """The length of sums that are computed at a time."""
        depth = self.p.k
        if self.dots:
            most = DEPTH_OF_DOTS
        elif self.columns:
            most = FIRST_CACHE // (4 * self.many[1])
        else:
            most = min(DEPTH_OF_OUTER, max(64, SECOND_CACHE // (4 * self.p.n)))
        return -(-depth // -(-depth // most))

    def share(self, threads: int) -> int:
        """Tiles of a unit of work, so that all of ``threads`` threads are busy."""
        count = self.many[0]
        return -(-count // balanced_parts(1, count, threads))


def _fixed(extent: int, tile: int) -> tuple[int, int, int]:
    """How many tiles of ``tile`` lines ``extent`` lines make, lines of each, and of the last."""
    count = -(-extent // tile)
    return count, tile, extent - (count - 1) * tile


def _balanced(extent: int, most: int) -> tuple[int, int, int]:
    """As :func:`_fixed`, with tiles of at most ``most`` lines that are as equal as they can be."""
    return _fixed(extent, -(-extent // -(-extent // most)))


def configs(p: GemmProblem) -> Iterable[Config]:
    """Tiles that fill the registers, on torch's threads and on threads of our own.

    NN with few columns is offered with its right operand turned, too: their rows may fill a vector only in part.
    """
    threads = torch.get_num_threads() if p.flops > 2 * ONE_THREAD else 1
    lanes, columns = vector_lanes(), int(p.n >= p.m)
    rows, others = TILES[lanes]
    wide = Config(lanes=lanes, tile=(rows, others), columns=columns, threads=threads)
    along = Config(lanes=lanes, tile=(others, rows), columns=columns, threads=threads)
    if p.op == "NT":
        yield from with_teams(along)
        return
    if p.op == "NN" and not columns:
        yield from with_teams(Config(**along, turned=1))
    if columns or p.n >= lanes:
        yield from with_teams(wide)


def workspace(p: GemmProblem, c: Config) -> int:
    """Bytes of the right operand where it is turned; a dense one with a single column need not be copied."""
    return 4 * p.n * p.k if _layout(p, c).turned and (p.n > 1 or p.leading[1]) else 0


def cost(p: GemmProblem, c: Config) -> Cost:
    """The arithmetic in full tiles, and the operands read once."""
    apart = 2 * workspace(p, c)
    return Cost(p.flops, p.bytes, 2 if apart else 1, EFFICIENCY, apart)


def bind(p: GemmProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Run:
    """The run. Raises ``SolverUnavailable`` with Numba's reason, or for a config or strides that are none of ours."""
    with config_reasons(p, c):
        layout, threads = _layout(p, c), integer(c, "threads")
    if any(t.stride(1) != 1 and t.shape[1] > 1 for t in (a, b, out)):
        raise SolverUnavailable("takes matrices whose rows are contiguous")
    if not layout.turned:
        return ThinRun(layout, c, threads, a, b, out).run
    copied = torch.empty((p.n, p.k), dtype=torch.float32, device="meta")
    product = ThinRun(layout, c, threads, a, copied, out).run
    return _turned(p, product) if workspace(p, c) else product


def _turned(p: GemmProblem, product: Run) -> Run:
    """A run of ``product`` with the right operand copied into the workspace, its rows and columns exchanged."""
    size, shape = 4 * p.n * p.k, (p.n, p.k)

    def run(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None, *bias: torch.Tensor
    ) -> torch.Tensor:
        assert workspace is not None
        copied = workspace[:size].view(torch.float32).view(shape)
        copied.copy_(b.mT)
        return product(a, copied, out, None, *bias)

    return run


@functools.lru_cache(maxsize=1024)
def _layout(p: GemmProblem, c: Config) -> Layout:
    """The layout of a config. Raises ``KeyError`` or ``ValueError`` for what is no config of ``p``."""
    tile, lanes, columns = c["tile"], integer(c, "lanes"), c["columns"]
    if lanes not in LANES:
        raise ValueError(f"lanes={lanes}: one of {', '.join(map(str, LANES))} would do")
    if not isinstance(tile, tuple) or len(tile) != 2 or not all(1 <= n <= 8 for n in tile):
        raise ValueError(f"tile={tile!r}: two numbers from 1 to 8 would do")
    turned = c.get("turned", 0)
    if columns not in (0, 1) or turned not in (0, 1):
        raise ValueError(f"columns={columns!r}, turned={turned!r}: 0 or 1 would do")
    if turned and (p.op != "NN" or columns):
        raise ValueError(f"turned={turned}: for NN whose rows threads divide")
    return Layout(p, lanes, tile[0], tile[1], bool(columns), bool(turned))


class ThinRun:
    """The compiled kernel over all units of work; :meth:`run` is a :data:`~tilewise.solvers.base.Run`."""

    __slots__ = ("_data", "_openmp", "_run", "_swapped", "_threads", "_zeros")

    def __init__(
        self, layout: Layout, c: Config, threads: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
    ) -> None:
        from tilewise.kernels.cpu.compiling import load_thin

        with numba_reasons():
            run, *calls = load_thin(layout.lanes, layout.blocks, layout.dots)
        self._run, self._threads, self._openmp = run, threads, c.get("team") == "openmp"
        self._zeros = zeros()
        self._swapped = layout.dots and layout.columns
        told = _told(layout, threads, (a, b, out), self._zeros.ctypes.data, (calls[0], calls[1], calls[2], calls[3]))
        self._data = kernel_data(-(-told.many // told.share), 0, told.numbers(), header=HEADER)

    def run(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        workspace: torch.Tensor | None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the kernel."""
        assert out is not None
        added = 0 if bias is None else bias.data_ptr()
        left, right = a.data_ptr(), b.data_ptr()
        if self._swapped:
            left, right = right, left
        start(self._run, self._data.copy(), self._threads, self._openmp, added, left, right, out.data_ptr())
        return out


def _told(
    layout: Layout,
    threads: int,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    zeros: int,
    calls: tuple[int, int, int, int],
) -> Told:
    """The kernel's numbers."""
    p = layout.p
    (a_row, a_step), (b_row, _), (c_row, c_step) = (byte_strides(t) for t in tensors)
    if p.op[0] == "T":
        a_row, a_step = a_step, a_row
    if layout.dots and layout.columns:  # the weight, whose rows threads divide, takes the place of the left operand
        a_row, b_row, c_row, c_step = b_row, a_row, c_step, c_row
    many, few = layout.many, layout.few
    return Told(
        many=many[0],
        share=layout.share(threads),
        few=few[0],
        many_tile=many[1],
        many_last=many[2],
        few_tile=few[1],
        few_last=few[2],
        depth=p.k,
        part=layout.part,
        columns=int(layout.columns),
        initial=1 if p.accumulate else 2 if p.bias else 0,
        bias_columns=int(not layout.columns),
        a_row=a_row,
        a_step=a_step,
        b_row=b_row,
        c_row=c_row,
        c_step=c_step,
        zeros=zeros,
        calls=calls,
    )
