"""GPU kernels that compute a norm's sums by channel and its elements from a rank's part of an image."""

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
"""Elements that a block loads at a time, and its warps."""
STATISTICS_TILE = 8192
"""As ``TILE``, for statistics of channels-last parts. It is larger, as sums over a tile wait for its elements twice."""
CHANNELS = 64
"""The most channels of a block, where they are next to each other in memory."""
ENOUGH, MOST_SPLITS = 528, 264
"""The number of blocks that keeps a GPU busy, and the most blocks for one channel, whose sums are added up later."""
MOST_KEPT = 1024
"""Kinds of launches that are kept. Where there are more, as shapes or momenta change every step, they are made anew."""
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The memory format with channels last, for each number of dimensions of a tensor."""


@dataclass(frozen=True, slots=True)
class MemoryOrder:
    """How the elements of a part lie in memory, and how kernels divide them into blocks.

    There are ``images`` of ``channels`` with ``positions`` each, at strides ``stride_n``, ``stride_c`` and ``stride_s``
    in elements. A block has ``block_c`` channels and ``block_s`` positions. There are ``blocks`` along positions and
    ``columns`` along channels. A kernel that sums takes ``each`` blocks along positions for one of ``splits`` sums.
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
    def of(x: torch.Tensor, kernel: str = "") -> MemoryOrder:
        """The order of a :func:`dense` tensor, for a kernel of :mod:`tilewise.kernels.triton.norm_parts`."""
        return _memory_order(x.shape, x.is_contiguous(), STATISTICS_TILE if kernel == "statistics" else TILE)


@functools.lru_cache(maxsize=MOST_KEPT)
def _memory_order(shape: torch.Size, contiguous: bool, last_tile: int) -> MemoryOrder:
    """The order of a dense tensor of ``shape``; ``last_tile`` is the size of a block where channels are last."""
    images, channels = shape[:2]
    positions = math.prod(shape[2:])
    if positions > 1 and contiguous:
        strides = channels * positions, positions, 1
        block_s = min(TILE, _power(positions))
        block_c = max(1, min(_power(channels), TILE // block_s))
    else:  # with channels last, images follow each other in memory as positions do
        images, positions, strides = 1, images * positions, (0, 1, channels)
        block_c = min(CHANNELS, _power(channels))
        block_s = min(last_tile // block_c, _power(positions))
    blocks, columns = images * -(-positions // block_s), -(-channels // block_c)
    each = -(-blocks // max(1, min(blocks, -(-ENOUGH // columns), MOST_SPLITS)))
    splits = -(-blocks // each) if blocks else 0
    return MemoryOrder(images, channels, positions, *strides, block_c, block_s, blocks, columns, each, splits)


def order_of(x: torch.Tensor) -> torch.memory_format:
    """The memory format of ``x``: channels last where ``x`` is that and not contiguous as well, else contiguous."""
    last = LAST.get(x.dim(), torch.contiguous_format)
    return last if not x.is_contiguous() and x.is_contiguous(memory_format=last) else torch.contiguous_format


def dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself where it is contiguous or has channels last, else a contiguous copy."""
    return x.contiguous(memory_format=order_of(x))


class Programs:
    """Keeps a bounded number of launches by what they are made for."""

    def __init__(self) -> None:
        self._made: dict[Any, Program] = {}

    def of(self, key: Any, make: Callable[[], Program]) -> Program:
        """The launch kept under ``key``, made by ``make`` where there is none."""
        program = self._made.get(key)
        if program is None:
            if len(self._made) >= MOST_KEPT:
                self._made.clear()
            program = self._made[key] = make()
        return program


class NormParts:
    """Kernels for parts of images (images, channels, ...) that are :func:`dense`; gradients have the same layout.

    ``rows`` are statistics by channel (3, channels): means, variances and reciprocal standard deviations.
    """

    def __init__(self) -> None:
        self._programs = Programs()

    def statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The sums of elements and of their squares by blocks, (2, splits, channels) in float64, and ``splits``."""
        return self._summed("statistics", x, [x])

    def gradient_sums(self, dy: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The same for the gradient ``dy``, and for ``dy`` times the elements less their mean."""
        return self._summed("gradient_sums", x, [dy, x, rows])

    def elements(
        self, x: torch.Tensor, rows: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None
    ) -> torch.Tensor:
        """The normalized elements, with the weight ``w`` and the bias ``b`` applied."""
        y = torch.empty_like(x)
        constants = {"WEIGHT": w is not None, "BIAS": b is not None}
        self._run("elements", x, [x, rows, rows if w is None else w, rows if b is None else b, y], constants)
        return y

    def gradient(
        self, dy: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, means: torch.Tensor, w: torch.Tensor | None
    ) -> torch.Tensor:
        """The gradient of ``x``, where ``means`` are the sums of :meth:`gradient_sums` as means of the whole image."""
        dx = torch.empty_like(x)
        constants = {"WEIGHT": w is not None}
        self._run("gradient", x, [dy, x, rows, means, rows if w is None else w, dx], constants)
        return dx

    @staticmethod
    def jobs(x: torch.Tensor, device: torch.device) -> list[Callable[[], object]]:
        """Calls that compile all kernels, with weight and bias, for parts like ``x``, which may be a meta tensor."""
        dtypes = (x.dtype, torch.float32, torch.float64)
        part, row, sums = (torch.empty((0,), dtype=dtype, device=device) for dtype in dtypes)
        kernels: dict[str, tuple[list[torch.Tensor], dict[str, bool]]] = {
            "statistics": ([part, sums], {}),
            "gradient_sums": ([part, part, row, sums], {}),
            "elements": ([part, row, row, row, part], {"WEIGHT": True, "BIAS": True}),
            "gradient": ([part, part, row, row, row, part], {"WEIGHT": True}),
        }
        return [
            functools.partial(_program, name, MemoryOrder.of(x, name), *arguments)
            for name, arguments in kernels.items()
        ]

    def _summed(self, kernel: str, x: torch.Tensor, operands: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        """Run a kernel that sums; returns the sums (2, splits, channels) and ``splits``."""
        splits = MemoryOrder.of(x, kernel).splits if x.numel() else 0
        sums = torch.empty((2, splits, x.shape[1]), dtype=torch.float64, device=x.device)
        self._run(kernel, x, [*operands, sums], {})
        return sums, splits

    def _run(self, kernel: str, x: torch.Tensor, tensors: list[torch.Tensor], constants: dict[str, bool]) -> None:
        """Launch the kernel called ``kernel`` on ``tensors`` for the part ``x``."""
        if not x.numel():
            return
        key = (
            kernel, x.shape, x.stride(), *((tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors),
            *constants.values(),
        )  # fmt: skip
        self._programs.of(key, lambda: _program(kernel, MemoryOrder.of(x, kernel), tensors, constants))(tensors)


def _program(kernel: str, order: MemoryOrder, tensors: list[torch.Tensor], constants: dict[str, bool]) -> Program:
    """The compiled launch of the kernel called ``kernel`` for parts in this order of memory."""
    from tilewise.kernels.triton import norm_parts
    from tilewise.kernels.triton.launch import Launch, Pointer, Program

    sums = kernel in ("statistics", "gradient_sums")
    counts = (order.images, order.each) if sums else ()
    scalars = (*counts, order.channels, order.positions, order.stride_n, order.stride_c, order.stride_s)
    grid = (order.splits if sums else order.blocks, order.columns, 1)
    sizes = {"BLOCK_C": order.block_c, "BLOCK_S": order.block_s}
    pointers = tuple(Pointer(index, 0, tensor.dtype) for index, tensor in enumerate(tensors))
    launch = Launch(getattr(norm_parts, kernel), grid, pointers, scalars, constants | sizes, WARPS)
    return Program([launch], [math.gcd(tensor.data_ptr(), 16) for tensor in tensors], tensors[0].device)


def _power(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()
