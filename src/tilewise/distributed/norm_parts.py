"""What a norm takes of a part by channel: sums and elements, by kernels for dense layouts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Program

__all__ = ["LAST", "NormParts", "Programs", "dense", "order_of"]

TILE, WARPS = 4096, 4
"""Elements that a block has on their way at a time."""
STATISTICS_TILE = 8192
"""The same of statistics where channels are next to each other: sums over a tile wait for its elements twice."""
CHANNELS = 64
"""Channels of a block at most, where they are next to each other in memory."""
ENOUGH, MOST_SPLITS = 528, 264
"""Blocks that keep a GPU busy, and how many may share a channel at most: their sums are then added up."""
MOST_KEPT = 1024
"""Kinds of launches that are kept; more, as where shapes or momenta change every step, are made anew."""
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Channels next to each other, by how many dimensions a tensor has."""


@dataclass(frozen=True, slots=True)
class Lie:
    """How elements lie: ``images`` of ``positions`` for each of ``channels``, their strides, and blocks of them.

    There are ``blocks`` of positions in all, of which a block of a kernel sums up ``each``, in ``splits`` sums, and
    ``columns`` of channels.
    """

    images: int
    channels: int
    positions: int
    stride_n: int
    stride_c: int
    stride_s: int
    block_c: int
    block_s: int
    blocks: int
    columns: int
    each: int
    splits: int

    @staticmethod
    def of(x: torch.Tensor, kernel: str = "") -> Lie:
        """That of a :func:`dense` tensor, for a kernel of :mod:`tilewise.kernels.triton.norm_parts`."""
        return _lie(x.shape, x.is_contiguous(), STATISTICS_TILE if kernel == "statistics" else TILE)


@functools.lru_cache(maxsize=MOST_KEPT)
def _lie(shape: torch.Size, contiguous: bool, last_tile: int) -> Lie:
    images, channels = shape[:2]
    positions = math.prod(shape[2:])
    if positions > 1 and contiguous:
        strides = channels * positions, positions, 1
        block_s = min(TILE, _power(positions))
        block_c = max(1, min(_power(channels), TILE // block_s))
    else:  # images follow each other as positions do
        images, positions, strides = 1, images * positions, (0, 1, channels)
        block_c = min(CHANNELS, _power(channels))
        block_s = min(last_tile // block_c, _power(positions))
    blocks, columns = images * -(-positions // block_s), -(-channels // block_c)
    each = -(-blocks // max(1, min(blocks, -(-ENOUGH // columns), MOST_SPLITS)))
    splits = -(-blocks // each) if blocks else 0
    return Lie(images, channels, positions, *strides, block_c, block_s, blocks, columns, each, splits)


def order_of(x: torch.Tensor) -> torch.memory_format:
    """Channels last where ``x`` is so and not contiguous too."""
    last = LAST.get(x.dim(), torch.contiguous_format)
    return last if not x.is_contiguous() and x.is_contiguous(memory_format=last) else torch.contiguous_format


def dense(x: torch.Tensor) -> torch.Tensor:
    """``x``, contiguous or with channels last; itself where it is."""
    return x.contiguous(memory_format=order_of(x))


class Programs:
    """Launches by what they are made for, a bounded number of them."""

    def __init__(self) -> None:
        self._made: dict[Any, Program] = {}

    def of(self, key: Any, make: Callable[[], Program]) -> Program:
        """That of ``key``, made where it is not there."""
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= MOST_KEPT:
                self._made.clear()
            found = self._made[key] = make()
        return found


class NormParts:
    """Kernels for parts of images (images, channels, ...) that are :func:`dense`, and gradients that lie alike."""

    def __init__(self) -> None:
        self._programs = Programs()

    def statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Sums of elements and of their squares by blocks, (2, splits, channels) in float64, and the splits."""
        return self._summed("statistics", x, [x])

    def gradient_sums(self, dy: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Likewise of the gradient, and of that times the elements less their mean, row 0 of ``rows``."""
        return self._summed("gradient_sums", x, [dy, x, rows])

    def elements(
        self, x: torch.Tensor, rows: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None
    ) -> torch.Tensor:
        """Elements less mean, times row 2 of ``rows``, with weight and bias."""
        y = torch.empty_like(x)
        constants = {"WEIGHT": w is not None, "BIAS": b is not None}
        self._run("elements", x, [x, rows, rows if w is None else w, rows if b is None else b, y], constants)
        return y

    def gradient(
        self, dy: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, means: torch.Tensor, w: torch.Tensor | None
    ) -> torch.Tensor:
        """The gradient of elements, by the whole image's ``means`` of :meth:`gradient_sums`."""
        dx = torch.empty_like(x)
        constants = {"WEIGHT": w is not None}
        self._run("gradient", x, [dy, x, rows, means, rows if w is None else w, dx], constants)
        return dx

    @staticmethod
    def jobs(x: torch.Tensor, device: torch.device) -> list[Callable[[], object]]:
        """What compiles all kernels for parts like ``x``, which may be on the meta device, with weight and bias."""
        part, row, sums = (torch.empty((0,), dtype=t, device=device) for t in (x.dtype, torch.float32, torch.float64))
        kernels: dict[str, tuple[list[torch.Tensor], dict[str, bool]]] = {
            "statistics": ([part, sums], {}),
            "gradient_sums": ([part, part, row, sums], {}),
            "elements": ([part, row, row, row, part], {"WEIGHT": True, "BIAS": True}),
            "gradient": ([part, part, row, row, row, part], {"WEIGHT": True}),
        }
        return [functools.partial(_made, name, Lie.of(x, name), *given) for name, given in kernels.items()]

    def _summed(self, kernel: str, x: torch.Tensor, given: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        splits = Lie.of(x, kernel).splits if x.numel() else 0
        sums = torch.empty((2, splits, x.shape[1]), dtype=torch.float64, device=x.device)
        self._run(kernel, x, [*given, sums], {})
        return sums, splits

    def _run(self, kernel: str, x: torch.Tensor, tensors: list[torch.Tensor], constants: dict[str, bool]) -> None:
        if not x.numel():
            return
        key = (
            kernel, x.shape, x.stride(), *((t.dtype, t.data_ptr() % 16 == 0) for t in tensors), *constants.values(),
        )  # fmt: skip
        self._programs.of(key, lambda: _made(kernel, Lie.of(x, kernel), tensors, constants))(tensors)


def _made(kernel: str, lie: Lie, tensors: list[torch.Tensor], constants: dict[str, bool]) -> Program:
    from tilewise.kernels.triton import norm_parts
    from tilewise.kernels.triton.launch import Launch, Pointer, Program

    sums = kernel in ("statistics", "gradient_sums")
    counts = (lie.images, lie.each) if sums else ()
    scalars = (*counts, lie.channels, lie.positions, lie.stride_n, lie.stride_c, lie.stride_s)
    grid = (lie.splits if sums else lie.blocks, lie.columns, 1)
    sizes = {"BLOCK_C": lie.block_c, "BLOCK_S": lie.block_s}
    pointers = tuple(Pointer(n, 0, t.dtype) for n, t in enumerate(tensors))
    launch = Launch(getattr(norm_parts, kernel), grid, pointers, scalars, constants | sizes, WARPS)
    return Program([launch], [math.gcd(t.data_ptr(), 16) for t in tensors], tensors[0].device)


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
