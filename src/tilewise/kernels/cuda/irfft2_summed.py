"""Inverse 2-D transforms of sums of products of spectra, in one kernel: what is summed is never written to memory.

Where a convolution sums over few channels, each number of its result's spectrum is one multiply-add or a few, and
writing it and reading it again takes longer than computing it where the transform would read it. ``irfft2.cu`` has the
kernel. What is fastest where spectra lie in memory is the default here too: no config of up to 4 products spills more
than a few numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from tilewise.kernels.cuda.fft2d import BLOCKS, Config, checked_size, program_of
from tilewise.kernels.cuda.launch import Bound, has_clusters
from tilewise.kernels.cuda.operands import MOST_PLANES, MOST_STRIDE, Leading, Memory, check, spectrum_shape

__all__ = ["CLUSTERED", "LARGE", "MOST_SUMMED", "bind"]

MOST_SUMMED = 8
"""Most products of a sum: a thread reads two numbers per product for each of its own."""
LARGE = 128
CLUSTERED = Config(8, resident=3, cluster=8)
"""The config for transforms of :data:`LARGE` points: planes share what they read, and three blocks hide latency."""


@functools.lru_cache(maxsize=1024)
def bind(
    image: Memory,
    first: Memory,
    second: Memory,
    s: tuple[int, int],
    offset: tuple[int, int],
    conjugated: bool,
    config: Config | None = None,
    scale: float = 1.0,
) -> Bound:
    """Planes ``(n, groups * columns, h, w)`` whose spectra are sums over the last dimension of products.

    ``first`` has shape (n1 (n2 / 2 + 1), n, groups, summed), ``second`` (n1 (n2 / 2 + 1), groups, columns, summed),
    both complex64; with ``conjugated`` the second's numbers are conjugated. Products and sums are fp32. The planes are
    the window at ``offset`` inside of n1 x n2, and scaled. Takes the addresses of both factors and of the planes.

    ``ValueError`` or ``TypeError`` naming what does not fit.
    """
    checked_size(s)
    n, channels = image.shape[:2]
    check(image, _virtual(image, s), s, offset, "frequency_major")
    columns, summed = second.shape[2:]
    _check_factors(first, second, n, channels, s)
    outer, inner = (step if size > 1 else 0 for size, step in zip((n, channels), image.strides, strict=False))
    planes = Leading(n * channels, channels, (outer, 0), (inner, 0))
    if config is None and max(s) == LARGE and all(size % (2 * CLUSTERED.cluster) == 0 for size in s):
        config = CLUSTERED if has_clusters() and planes.count >= CLUSTERED.planes * BLOCKS else None
    together = summed == 1 or second.strides[-1] == 1
    program = replace(
        program_of(image, _virtual(image, s), planes, s, offset, "frequency_major", True, config, False, "interleaved"),
        summed=summed, conjugated=conjugated, together=together,
        wide=(_wide(first), together and _wide(second)),
    )  # fmt: skip
    problems = program.problems()
    if problems:
        raise ValueError("; ".join(problems))
    lines = (step if size > 1 else 0 for size, step in zip(image.shape[2:], image.strides[2:], strict=True))
    scalars = (
        planes.count, channels, columns, first.strides[1], first.strides[2], first.strides[0], second.strides[1],
        second.strides[2], second.strides[0], second.strides[3], outer, inner, *lines, *image.shape[2:], *offset,
        float(scale),
    )  # fmt: skip
    grid = -(-planes.count // program.config.planes) * program.config.cluster
    return Bound(program, grid, scalars, 3, program.config.cluster)


def _check_factors(first: Memory, second: Memory, n: int, channels: int, s: tuple[int, int]) -> None:
    """Raise ``ValueError`` or ``TypeError`` for factors that do not give ``n`` times ``channels`` planes."""
    groups, columns, summed = second.shape[1:]
    frequencies = s[0] * (s[1] // 2 + 1)
    for name, factor, shape in (
        ("first", first, (frequencies, n, groups, summed)),
        ("second", second, (frequencies, groups, columns, summed)),
    ):
        if factor.shape != shape:
            raise ValueError(f"the {name} factor has shape {factor.shape}: must be {shape}")
        if factor.dtype != torch.complex64:
            raise TypeError(f"the {name} factor is {factor.dtype}: must be complex64")
        if abs(factor.strides[0]) > MOST_STRIDE:
            raise ValueError(f"a stride of {factor.strides[0]} elements between frequencies is over {MOST_STRIDE}")
    if groups * columns != channels:
        raise ValueError(f"{groups} groups of {columns} columns are not the {channels} planes of an image")
    if not 1 <= summed <= MOST_SUMMED:
        raise ValueError(f"sums of {summed} products: 1 to {MOST_SUMMED} would do")
    if summed > 1 and first.strides[-1] != 1:
        raise ValueError(f"the first factor's last stride is {first.strides[-1]}: must be 1")
    if n * channels > MOST_PLANES:
        raise ValueError(f"{n * channels} planes: at most {MOST_PLANES}")


def _virtual(image: Memory, s: Sequence[int]) -> Memory:
    """The memory of the spectrum that is never written."""
    shape = spectrum_shape(image.shape[:-2], s, "frequency_major")
    return Memory(shape, (0,) * len(shape), torch.complex64)


def _wide(factor: Memory) -> bool:
    """Whether the numbers of a sum are whole pairs at multiples of 16 bytes."""
    even = not any(step % 2 for step, size in zip(factor.strides[:-1], factor.shape[:-1], strict=True) if size > 1)
    return even and factor.shape[-1] % 2 == 0 and math.gcd(factor.alignment, 16) == 16
