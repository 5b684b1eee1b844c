"""Operators for the sums by channel that a norm needs in training, as blocks of pixels have them.

On a GPU they are kernels of :mod:`tilewise.kernels.triton.channels_last.channel_sums`. On a CPU, where Inductor's own
loops are as good, they exist for tests.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Program

__all__ = ["fits", "run"]

WARPS, STAGES = 4, 3
"""Warps of a program, and tiles of pixels that are on their way to it at a time."""
CHANNELS = 64
"""The most channels of a program: 128 bytes of a pixel in half precision, which is a line of the L2."""
MOMENTS_TILE, GRADIENT_TILE = 8192, 4096
"""Elements of a tile: a gradient's sums read two tensors."""
PROGRAMS = 264
"""Programs that keep a GPU's memory busy, two for each multiprocessor of a Hopper; more make more sums to add up."""
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
MOST = 2**31 - 2**20
"""Most pixels: kernels count them in 32 bits."""

_library = torch.library.Library("tilewise", "FRAGMENT")
for _schema in (
    "channel_moments(Tensor x) -> Tensor",
    "channel_gradient_sums(Tensor dy, Tensor x, Tensor mean, Tensor[] gate) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


class Division(NamedTuple):
    """How programs share the pixels: ``splits`` sums of ``each`` pixels, in tiles of ``pixels`` by ``channels``."""

    splits: int
    each: int
    pixels: int
    channels: int
    columns: int

    @staticmethod
    def of(x: torch.Tensor, tile: int) -> Division:
        """The division of a tensor (images, channels, height, width) for tiles of so many elements."""
        count, channels = x.numel() // max(x.shape[1], 1), x.shape[1]
        block = min(CHANNELS, 1 << max(channels - 1, 0).bit_length())
        pixels, columns = tile // block, -(-channels // block)
        splits = max(1, min(-(-count // pixels), PROGRAMS // columns))
        each = -(-count // (splits * pixels)) * pixels
        return Division(-(-count // each), each, pixels, block, columns)


def fits(x: torch.Tensor) -> bool:
    """Whether the operators take a tensor such as ``x``: images with channels innermost, dense, of a known type."""
    return (
        x.dim() == 4
        and x.dtype in DTYPES
        and all(isinstance(n, int) for n in x.shape)
        and 0 < x.numel() // max(x.shape[1], 1) <= MOST
        and x.shape[1] > 1
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def _checked(*images: torch.Tensor) -> None:
    """Raise ``ValueError`` for tensors that kernels cannot read by address."""
    x = images[0]
    for t in images:
        if not fits(t) or t.shape != x.shape or t.dtype != x.dtype or t.device != x.device:
            found = ", ".join(f"{tuple(t.shape)} {t.dtype} strides {t.stride()} on {t.device}" for t in images)
            raise ValueError(f"tensors {found}: dense images in channels_last, all alike, would do")


def _checked_rows(channels: int, mean: torch.Tensor, gate: list[torch.Tensor]) -> None:
    """Raise ``ValueError`` for numbers by channel that are not as many as channels, or do not lie side by side."""
    if len(gate) not in (0, 4) or any(t.numel() != channels or not t.is_contiguous() for t in (mean, *gate)):
        raise ValueError(f"mean and gate have {[t.numel() for t in (mean, *gate)]} elements: {channels} each would do")


def _moments(x: torch.Tensor) -> torch.Tensor:
    """Sums (splits, 2, channels) in float32, of ``x`` less its first pixel and of that squared."""
    _checked(x)
    division = Division.of(x, MOMENTS_TILE)
    parts = x.new_empty((division.splits, 2, x.shape[1]), dtype=torch.float32)
    run("moments", division, [x], parts)
    return parts


def _gradient_sums(dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, gate: list[torch.Tensor]) -> torch.Tensor:
    """Sums (splits, 2, channels) in float32, of ``dy`` and of that times ``x`` less ``mean``.

    ``gate`` is empty, or what the ReLU behind the norm saw: mean, reciprocal deviation, weight and bias by channel.
    """
    _checked(x, dy)
    _checked_rows(x.shape[1], mean, gate)
    division = Division.of(x, GRADIENT_TILE)
    parts = x.new_empty((division.splits, 2, x.shape[1]), dtype=torch.float32)
    run("gradient_sums", division, [dy, x, mean, *(gate or [mean] * 4)], parts, GATED=bool(gate))
    return parts


def run(kernel: str, division: Division, tensors: list[torch.Tensor], parts: torch.Tensor, **constants: bool) -> None:
    """Launch a kernel over ``tensors`` into ``parts``. Raises what Triton raises for one that does not compile."""
    first = tensors[0]
    types = tuple(t.dtype for t in (*tensors, parts))
    aligned = tuple(math.gcd(t.data_ptr(), 16) for t in (*tensors, parts))
    count, channels = first.numel() // first.shape[1], first.shape[1]
    program = _program(kernel, division, types, aligned, (count, channels), tuple(constants.items()), first.device)
    program([*tensors, parts])


@functools.lru_cache(maxsize=1024)
def _program(
    kernel: str, division: Division, types: tuple[torch.dtype, ...], aligned: tuple[int, ...], sizes: tuple[int, int],
    constants: tuple[tuple[str, bool], ...], device: torch.device,
) -> Program:  # fmt: skip
    """The compiled launch."""
    from tilewise.kernels.triton.channels_last import channel_sums
    from tilewise.kernels.triton.launch import Launch, Pointer, Program

    pointers = tuple(Pointer(n, 0, dtype) for n, dtype in enumerate(types))
    fixed = {**dict(constants), "STAGES": STAGES, "BLOCK_P": division.pixels, "BLOCK_C": division.channels}
    grid = (division.splits, division.columns, 1)
    launch = Launch(getattr(channel_sums, kernel), grid, pointers, (*sizes, division.each), fixed, WARPS)
    return Program([launch], aligned, device)


def _moments_on_cpu(x: torch.Tensor) -> torch.Tensor:
    _checked(x)
    parts = x.new_zeros((Division.of(x, MOMENTS_TILE).splits, 2, x.shape[1]), dtype=torch.float32)
    less = x.double() - x[:1, :, :1, :1].double()
    parts[0, 0], parts[0, 1] = less.sum((0, 2, 3)), (less * less).sum((0, 2, 3))
    return parts


def _gradient_sums_on_cpu(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, gate: list[torch.Tensor]
) -> torch.Tensor:
    _checked(x, dy)
    _checked_rows(x.shape[1], mean, gate)
    parts = x.new_zeros((Division.of(x, GRADIENT_TILE).splits, 2, x.shape[1]), dtype=torch.float32)
    value, upstream = x.float(), dy.double()
    if gate:
        centre, scale, weight, bias = (t.float().view(1, -1, 1, 1) for t in gate)
        result = ((value - centre) * scale * weight + bias).to(x.dtype)
        upstream = torch.where(result <= 0, 0.0, upstream)
    parts[0, 0] = upstream.sum((0, 2, 3))
    parts[0, 1] = (upstream * (value.double() - mean.double().view(1, -1, 1, 1))).sum((0, 2, 3))
    return parts


def _moments_fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((Division.of(x, MOMENTS_TILE).splits, 2, x.shape[1]), dtype=torch.float32)


def _gradient_sums_fake(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, gate: list[torch.Tensor]
) -> torch.Tensor:
    return x.new_empty((Division.of(x, GRADIENT_TILE).splits, 2, x.shape[1]), dtype=torch.float32)


_library.impl("channel_moments", _moments, "CUDA")
_library.impl("channel_moments", _moments_on_cpu, "CPU")
_library.impl("channel_gradient_sums", _gradient_sums, "CUDA")
_library.impl("channel_gradient_sums", _gradient_sums_on_cpu, "CPU")
torch.library.register_fake("tilewise::channel_moments", _moments_fake, lib=_library)
torch.library.register_fake("tilewise::channel_gradient_sums", _gradient_sums_fake, lib=_library)
