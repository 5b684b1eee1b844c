"""Pooling on a GPU by kernels of our own: one pass over memory forward, and one backward that gathers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise.plan import Config
from tilewise.problems.base import dense_strides
from tilewise.problems.pooling.problem import PoolingProblem
from tilewise.solvers.base import Cost, SolverUnavailable
from tilewise.solvers.common.triton_run import program, triton_missing
from tilewise.solvers.common.views import launch
from tilewise.solvers.pooling._pooling import Pooler, PoolingSolver

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["Tiles", "WindowTiles"]

MOST_KEPT = 256
"""Elements of a window whose numbers fit into a byte."""
MOST_WINDOW = 2**16
"""Elements of the largest window that one thread adds up."""
MOST_UNROLLED = 16
"""Elements of a window whose loads are written out, so that all are under way at once."""
UNROLLED = 8
"""Loads that are written out of larger windows."""
IN_32_BITS = 2**31 - 2**20
"""Numbers of a tensor that may be counted in 32 bits, with those of a tile that reaches beyond."""
LONGEST = 2**30
"""Sizes of an axis with its padding are below this, so that places along it are counted in 32 bits."""
SIZES = (128, 256, 512, 1024, 2048)
"""Numbers of a tile."""
WARPS = 4
WIDEST = {"contiguous": 128, "channels_last": 256}
"""Columns of a tile at the most."""
MEMORY = 0.8
"""Share of the memory's bandwidth that a kernel reaches."""

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Tiles:
    """The tiles of one direction of ``p``, forward or ``back``: ``size`` numbers, as many columns as there are."""

    p: PoolingProblem
    size: int
    back: bool = False

    @property
    def last(self) -> bool:
        """Whether columns are channels; else they lie along the width."""
        return self.p.layout_name == "channels_last"

    @property
    def written(self) -> Triple:
        """The sizes of space of what is written."""
        return _triple(self.p.space if self.back else self.p.pooled_space, 1)

    @property
    def columns(self) -> int:
        """Columns that there are."""
        return self.p.channels if self.last else self.written[2]

    @property
    def lines(self) -> int:
        """Lines that there are."""
        depth, height, width = self.written
        return self.p.batch * depth * height * (width if self.last else self.p.channels)

    @property
    def wide(self) -> int:
        """Columns of a tile."""
        return min(1 << (self.columns - 1).bit_length(), WIDEST[self.p.layout_name], self.size)

    @property
    def high(self) -> int:
        """Lines of a tile."""
        return self.size // self.wide

    @property
    def blocks(self) -> int:
        """Tiles along the columns."""
        return -(-self.columns // self.wide)

    @property
    def grid(self) -> int:
        """Programs."""
        return self.blocks * -(-self.lines // self.high)


class WindowTiles(PoolingSolver):
    """Every result from its whole window at once, and every gradient from all results that took the input.

    For the backward of a maximum a byte of each result says which element of its window it was, where torch keeps an
    index of 8 bytes. Each number is written once, nothing is set to zero first, and nothing is added by atomics: the
    same bits come every time. ``tile`` and ``back`` are the numbers of a tile forward and backward.
    """

    name, version = "window_tiles", 1
    devices = frozenset({"cuda"})
    compiles = True
    kept_bytes = 1
    error_bound = {"ieee": 1e-6, "tf32": 1e-6}  # noqa: RUF012 - declared by the base class

    def unsupported(self, p: PoolingProblem) -> list[str]:
        """Reasons: no Triton, a window that is too large, or more places than are counted in 32 bits."""
        reasons = triton_missing()
        if p.op == "max" and p.task == "training" and p.window > MOST_KEPT:
            reasons.append(f"keeps a byte for each result: for windows of up to {MOST_KEPT} elements, not {p.window}")
        if p.window > MOST_WINDOW:
            reasons.append(f"is for windows of up to {MOST_WINDOW} elements, not {p.window}")
        reach = [d * k for d, k in zip(p.dilation, p.kernel, strict=True)]
        if max(*p.space, *reach, *p.stride) >= LONGEST:
            reasons.append(f"is for sizes below {LONGEST}, not {max(*p.space, *reach, *p.stride)}")
        lines = max(Tiles(p, SIZES[0], back).lines for back in (False, True))
        if lines > IN_32_BITS:
            reasons.append(f"counts lines to {IN_32_BITS}, not {lines}")
        return reasons

    def configs(self, p: PoolingProblem) -> Iterable[Config]:
        """Tiles of several sizes; smaller ones where windows are large, whose elements fill the first cache."""
        sizes = SIZES[2:] if p.window <= MOST_UNROLLED else SIZES[:3]
        if p.task == "inference":
            return [Config(tile=size) for size in sizes]
        return [Config(tile=size, back=back) for back in (512, 1024, 2048) for size in sizes[:2]]

    def cost(self, p: PoolingProblem, c: Config) -> Cost:
        """The traffic, with what is kept written and read."""
        moved = p.bytes + 2 * self.kept(p)
        return Cost(p.flops, int(moved / MEMORY), len(p.results), efficiency=0.1)

    def pooler(self, p: PoolingProblem, c: Config, device: torch.device) -> Pooler:
        """The compiled kernels. Raises ``SolverUnavailable`` with Triton's reason, or for a config that is none."""
        names = ("tile",) if p.task == "inference" else ("tile", "back")
        if set(c) != set(names) or any(c[name] not in SIZES for name in names):
            raise SolverUnavailable(f"{c} is no config of {p.key}: {' and '.join(names)} of {SIZES} would do")
        return Kernels(p, *(int(c[name]) for name in names), device=device)  # type: ignore[arg-type]


class Kernels:
    """The compiled forward, and for training the backward. They hold no tensor."""

    __slots__ = ("_backward", "_dtype", "_forward", "_keep", "_shapes")

    def __init__(self, p: PoolingProblem, tile: int, back: int = 0, *, device: torch.device) -> None:
        self._dtype = p.torch_dtype("x")
        self._shapes = {role: (p.shape(role), dense_strides(p.shape(role), p.layout(role))) for role in p.roles}
        self._keep = p.op == "max" and p.task == "training"
        aligned = [p.alignment_of("x")] * 3
        self._forward = program([forward_launch(Tiles(p, tile))], aligned, device)
        self._backward = program([backward_launch(Tiles(p, back, back=True))], aligned, device) if back else None

    def forward(self, x: Tensor, *, keep: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As :meth:`Pooler.forward`."""
        shape, strides = self._shapes["y"]
        y = torch.empty_strided(shape, strides, dtype=self._dtype, device=x.device)
        saved: tuple[Tensor, ...] = ()
        if self._keep:
            saved = (torch.empty(y.numel(), dtype=torch.uint8, device=x.device),)
        self._forward((x, y, *saved) if saved else (x, y, y))
        return y, saved if keep else ()

    def backward(self, saved: tuple[Tensor, ...], dy: Tensor) -> Tensor:
        """As :meth:`Pooler.backward`."""
        assert self._backward is not None
        shape, strides = self._shapes["dx"]
        dx = torch.empty_strided(shape, strides, dtype=self._dtype, device=dy.device)
        self._backward((dy, *saved, dx) if saved else (dy, dy, dx))
        return dx


def forward_launch(tiles: Tiles) -> Launch:
    """The launch of the forward over x, y and what is kept, which is y again where nothing is."""
    from tilewise.kernels.triton.launch import Pointer
    from tilewise.kernels.triton.pooling.windows import pooled

    p = tiles.p
    dtype, keep = p.torch_dtype("x"), p.op == "max" and p.task == "training"
    pointers = [Pointer(0, 0, dtype), Pointer(1, 0, dtype), Pointer(2, 0, torch.uint8 if keep else dtype)]
    return _launch(pooled, tiles, pointers, p.window, KEEP=keep)


def backward_launch(tiles: Tiles) -> Launch:
    """The launch of the backward over dy, what was kept (dy again where nothing was), and dx."""
    from tilewise.kernels.triton.launch import Pointer
    from tilewise.kernels.triton.pooling.windows import gathered

    p = tiles.p
    dtype = p.torch_dtype("x")
    takers = tuple((k - 1) * d // s + 1 for k, d, s in zip(p.kernel, p.dilation, p.stride, strict=True))
    td, th, tw = _triple(takers, 1)
    pointers = [Pointer(0, 0, dtype), Pointer(1, 0, torch.uint8 if p.op == "max" else dtype), Pointer(2, 0, dtype)]
    return _launch(gathered, tiles, pointers, td * th * tw, TD=td, TH=th, TW=tw)


def _launch(kernel: Any, tiles: Tiles, pointers: list[Any], turns: int, **constants: Any) -> Launch:
    """A launch whose loop over a window, or over results that take an input, has so many ``turns``."""
    p = tiles.p
    if tiles.grid >= 2**31:
        raise SolverUnavailable(f"tile={tiles.size}: {tiles.grid} tiles are more than a launch has")
    of_axes: dict[str, int] = {}
    for letter, numbers, lacking in (
        ("S", p.stride, 1), ("P", p.padding, 0), ("D", p.dilation, 1), ("K", p.kernel, 1),
    ):  # fmt: skip
        of_axes |= dict(zip((letter + axis for axis in "DHW"), _triple(numbers, lacking), strict=True))
    largest = max(p.nbytes(role) for role in p.roles) // p.torch_dtype("x").itemsize
    return launch(
        kernel, (tiles.grid,), pointers,
        (tiles.lines, tiles.columns, tiles.blocks, *_triple(p.space, 1), *_triple(p.pooled_space, 1),
         p.channels if tiles.last else 1),
        WARPS, **of_axes, MAX=p.op == "max", PADDED=p.count_include_pad, DIVISOR=p.divisor, **constants,
        UNROLL=turns if turns <= MOST_UNROLLED else UNROLLED, LAST=tiles.last, LONG=largest > IN_32_BITS,
        BLOCK_L=tiles.high, BLOCK_C=tiles.wide,
    )  # fmt: skip


def _triple(numbers: tuple[int, ...], lacking: int) -> Triple:
    """Numbers of three axes; ``lacking`` is that of an axis which the problem does not have."""
    first, second, third = (*(lacking,) * (3 - len(numbers)), *numbers)
    return first, second, third
