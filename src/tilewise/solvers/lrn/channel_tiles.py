"""Local response normalization on a GPU: one pass over memory for each direction, in tiles of channels by pixels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise.plan import Config
from tilewise.problems.lrn.problem import LrnProblem
from tilewise.solvers.base import Cost, Run, SolverUnavailable
from tilewise.solvers.common.tiles import PROCESSORS, config_reasons
from tilewise.solvers.common.triton_run import program, triton_missing
from tilewise.solvers.common.views import launch
from tilewise.solvers.lrn._lrn import LrnSolver, is_dense, outside, quarters_of

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["ChannelTiles", "Tiles"]

MOST_WINDOW = 64
"""Channels of the largest window: a tile that passes terms among its rows has more."""
MOST_UNROLLED = 9
"""The largest window whose loads are written out, so that all are under way at once."""
MOST_BLOCKS = 2**31 - 1
IN_32_BITS = 2**31 - 2**20
"""Numbers of a tensor that may be counted in 32 bits, with those of a tile that reaches beyond."""
TILE, SMALL_TILE = 2048, 512
"""Numbers of a tile, and of one where larger ones would leave multiprocessors without work."""
WAVES = 4
"""Tiles for each multiprocessor from which on they are large."""
ACROSS = {"contiguous": (8, 16, 32), "channels_last": (128, 64, 32)}
"""Channels of a tile of the forward."""
PASSING = (32, 64, 128, 256)
"""Channels of a tile of the backward whose rows pass terms to each other."""
HELD = ((8, 128), (16, 128), (16, 256), (32, 128))
"""Channels that a thread of the backward writes of its pixels, and pixels of a tile."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MEMORY = 0.8
"""Share of the memory's bandwidth that a kernel reaches."""


@dataclass(frozen=True)
class Tiles:
    """The tiles of one direction: ``channels`` by ``pixels``, and how terms of the gradient pass among channels.

    ``terms`` is empty forward. It is ``rows`` where rows of a tile pass them, and ``registers`` where a thread has all
    ``channels`` of its pixels.
    """

    p: LrnProblem
    channels: int
    pixels: int
    terms: str = ""

    @property
    def _several(self) -> bool:
        """Whether there are several tiles of channels whose rows pass terms."""
        return self.terms == "rows" and self.channels < self.p.channels

    @property
    def lead(self) -> int:
        """First rows of a tile that serve others alone: none where one tile has all channels."""
        return self.p.after if self._several else 0

    @property
    def rows(self) -> int:
        """Channels that a tile writes."""
        return self.channels - (self.p.after + self.p.before if self._several else 0)

    @property
    def blocks(self) -> int:
        """Tiles along the channels."""
        return -(-self.p.channels // self.rows)

    @property
    def grid(self) -> int:
        """Programs."""
        return self.blocks * -(-self.p.batch * self.p.pixels // self.pixels)


class ChannelTiles(LrnSolver):
    """Squares, window, power and product of a tile at once; the gradient by a second kernel (Krizhevsky et al. 2012).

    Each number is read from memory once; neighbours in a window come from the multiprocessor's cache. The backward
    reads x and the result's gradient and keeps nothing else. It computes each channel's term of the gradient once and
    passes it to the other channels of its window: among the rows of a tile, or among the registers of a thread.
    ``tile`` and ``back`` are (channels, pixels) forward and backward.
    """

    name, version = "channel_tiles", 1
    devices = frozenset({"cuda"})
    compiles = True
    error_bound = {"ieee": 5e-6, "tf32": 5e-6}  # noqa: RUF012 - declared by the base class

    def unsupported(self, p: LrnProblem) -> list[str]:
        """Reasons: no Triton, a large window, or numbers whose powers may be beyond fp32."""
        reasons = triton_missing()
        if p.before + p.after + 1 > MOST_WINDOW:
            reasons.append(f"is for windows of at most {MOST_WINDOW} channels, not {p.before + p.after + 1}")
        if p.batch * p.pixels > IN_32_BITS:
            reasons.append(f"counts pixels to {IN_32_BITS}, not {p.batch * p.pixels}")
        return reasons + outside(p)

    def configs(self, p: LrnProblem) -> Iterable[Config]:
        """Tiles of several shapes, for training with tiles of the backward."""
        forward = [Config(tile=tile) for tile in _shapes(p, ACROSS[p.layout_name])]
        if p.task == "inference":
            return forward
        window = p.before + p.after + 1
        if p.layout_name == "contiguous" and window <= MOST_UNROLLED:
            held = [tile for tile in HELD if tile[0] < 2 * p.channels] or HELD[:1]
            ends = [(tile, "registers") for tile in held]
        else:
            wide = [n for n in PASSING if n >= 2 * window or n >= p.channels][:3]
            ends = [(tile, "rows") for tile in _shapes(p, wide)]
        return [Config(**c, back=back, terms=terms) for back, terms in ends for c in forward[:2]]

    def cost(self, p: LrnProblem, c: Config) -> Cost:
        """Operands read once and results written once."""
        return Cost(p.flops, int(p.bytes / MEMORY), len(p.results), 0.25)

    def bind(self, p: LrnProblem, c: Config, *tensors: Any, **nothing: Any) -> Run:
        """The run. Raises ``SolverUnavailable`` with Triton's reason, or for a config or strides that do not fit."""
        for tensor in tensors:
            if tensor is not None and not is_dense(p, tensor):
                raise SolverUnavailable(f"takes dense tensors in the layout {p.layout_name}")
        passes = self.passes(p, c, tensors[0].device)

        def inference(x: Tensor, y: Tensor, workspace: Tensor | None) -> Tensor:
            return passes.forward(x, y)

        def training(x: Tensor, dy: Tensor, y: Tensor, dx: Tensor, workspace: Tensor | None) -> Any:
            return passes.forward(x, y), passes.backward(x, dy, dx)

        return inference if p.task == "inference" else training

    def passes(self, p: LrnProblem, c: Config, device: torch.device) -> Kernels:
        """Forward and backward apart, compiled. Raises ``SolverUnavailable`` as :meth:`bind`."""
        with config_reasons(p, c):
            forward, backward = tiles_of(p, c)
        return Kernels(p, forward, backward, device)


class Kernels:
    """The compiled kernels of one normalization. They hold no tensor."""

    __slots__ = ("_back", "_to")

    def __init__(self, p: LrnProblem, forward: Tiles, backward: Tiles | None, device: torch.device) -> None:
        aligned = p.alignment_of("x")
        self._to = program([forward_launch(forward)], [aligned] * 2, device)
        self._back = None if backward is None else program([backward_launch(backward)], [aligned] * 3, device)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Write the result of ``x`` into ``y`` and return it. Both are dense in the problem's layout."""
        self._to((x, y))
        return y

    def backward(self, x: Tensor, dy: Tensor, dx: Tensor) -> Tensor:
        """Write the gradient of ``x`` into ``dx`` and return it, by that of the result, ``dy``."""
        assert self._back is not None
        self._back((x, dy, dx))
        return dx


def tiles_of(p: LrnProblem, c: Config) -> tuple[Tiles, Tiles | None]:
    """The tiles of forward and backward. Raises ``KeyError`` or ``ValueError`` for what is no config of ``p``."""
    wanted = {"tile"} if p.task == "inference" else {"tile", "back", "terms"}
    if set(c) != wanted:
        raise ValueError(f"{', '.join(sorted(wanted))} would do")
    forward = Tiles(p, *_tile(c, "tile"))
    if p.task == "inference":
        return forward, None
    terms = c["terms"]
    if terms != "rows" and (terms != "registers" or p.before + p.after >= MOST_UNROLLED):
        raise ValueError(f"terms={terms!r}: rows, or for windows of at most {MOST_UNROLLED} registers, would do")
    backward = Tiles(p, *_tile(c, "back"), terms=str(terms))
    if backward.rows < 1:
        raise ValueError(f"back={c['back']!r}: more channels than {p.before + p.after} would do")
    return forward, backward


def forward_launch(tiles: Tiles) -> Launch:
    """The launch of the forward over x and y."""
    from tilewise.kernels.triton.lrn.windows import normalized

    window = tiles.p.before + tiles.p.after + 1
    return _launch(normalized, tiles, 2, (), UNROLL=_unroll(window), BLOCK_C=tiles.channels)


def backward_launch(tiles: Tiles) -> Launch:
    """The launch of the backward over x, dy and dx."""
    from tilewise.kernels.triton.lrn.windows import gradient, gradient_by_pixels

    if tiles.terms == "registers":
        return _launch(gradient_by_pixels, tiles, 3, (), ROWS=tiles.channels)
    window = tiles.p.before + tiles.p.after + 1
    return _launch(gradient, tiles, 3, (tiles.rows, tiles.lead), UNROLL=_unroll(window), BLOCK_C=tiles.channels)


def _unroll(window: int) -> int:
    """Channels of a window that are written out."""
    return window if window <= MOST_UNROLLED else 4


def _launch(kernel: Any, tiles: Tiles, tensors: int, more: tuple[int, ...], **constants: Any) -> Launch:
    """A launch over tensors of one shape, which come in the order of the kernel's arguments."""
    from tilewise.kernels.triton.launch import Pointer

    p = tiles.p
    if tiles.grid > MOST_BLOCKS:
        raise SolverUnavailable(f"tiles of {tiles.channels} by {tiles.pixels} are more than {MOST_BLOCKS}")
    strides = (1, p.channels) if p.layout_name == "channels_last" else (p.pixels, 1)
    return launch(
        kernel, (tiles.grid,), [Pointer(place, 0, p.torch_dtype("x")) for place in range(tensors)],
        (p.channels, p.pixels, p.batch * p.pixels, tiles.blocks, *more, *strides, p.alpha / p.size, p.beta, p.k),
        QUARTERS=quarters_of(p.beta), BEFORE=p.before, AFTER=p.after, **constants,
        LONG=p.batch * p.channels * p.pixels > IN_32_BITS, BLOCK_P=tiles.pixels,
    )  # fmt: skip


def _tile(c: Config, name: str) -> tuple[int, int]:
    """The channels and pixels of a tile. Raises ``ValueError`` for what is none."""
    tile = c[name]
    if not isinstance(tile, tuple) or len(tile) != 2 or any(n not in SIZES for n in tile):
        raise ValueError(f"{name}={tile!r}: two powers of two from 1 to {SIZES[-1]} would do")
    return int(tile[0]), int(tile[1])


def _shapes(p: LrnProblem, channels: Iterable[int]) -> list[tuple[int, int]]:
    """Tiles of so many channels, or of all channels where these are fewer, each shape once."""
    most = 1 << (p.channels - 1).bit_length()
    pixels = 1 << (p.batch * p.pixels - 1).bit_length()
    size = TILE if p.batch * p.pixels * p.channels >= TILE * WAVES * PROCESSORS else SMALL_TILE
    found: dict[tuple[int, int], None] = {}
    for n in channels:
        c = min(n, most)
        found[c, max(1, min(size // c, SIZES[-1], pixels))] = None
    return list(found)
