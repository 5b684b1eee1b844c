"""What estimates need to know of products and caches."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

__all__ = ["LIFTED", "LOWERED", "MKL", "PLAIN_ARITHMETIC", "WRITTEN", "Blas", "cached", "efficiency"]

CPU_CACHE = 2**21
"""Bytes of cache a core has to itself, roughly, on processors of today."""
MULTIPROCESSORS = 132
MIN_EFFICIENCY = 0.002
PLAIN_ARITHMETIC = {"fp32": 0.25, "tf32": 0.03, "16-bit": 0.017}
"""Share of a GPU's rate of matrix products that transforms reach, which are done in fp32 whatever the operands."""
CACHED = {"cpu": 0.25, "cuda": 0.5}
"""What a byte that stays in cache costs beside one that goes through memory."""


def cached(device_type: str, footprint: int) -> float:
    """Cost of moving a byte of a buffer that is written, read and written again, beside one through memory."""
    return CACHED[device_type] if footprint <= _cache_bytes(device_type) // 2 else 1.0


@functools.cache
def _cache_bytes(device_type: str) -> int:
    if device_type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties().L2_cache_size)
    return CPU_CACHE if device_type == "cpu" else 32 * 2**20


def efficiency(device_type: str, rows: int, columns: int, depth: int, batch: int = 1) -> float:
    """Share of peak that ``batch`` products of this shape usually reach.

    What is lost on a CPU are the edges of its small tiles; on a GPU tiles that are not full, and multiprocessors that
    have none (a deep product is cut along its depth for them).
    """
    if device_type == "cpu":
        share = 0.85 * depth / (depth + 16)
        for size in (rows, columns):
            share *= size / (size + 8)
        return max(share, MIN_EFFICIENCY)
    tile, share = 64, 0.85 * depth / (depth + 32)
    tiles = batch * max(1, depth // 1024)
    for size in (rows, columns):
        count = -(-size // tile)
        share *= size / (count * tile)
        tiles *= count
    return max(share * tiles / (tiles + MULTIPROCESSORS / 4) * min(1.0, tiles / MULTIPROCESSORS), MIN_EFFICIENCY)


LOWERED, WRITTEN, LIFTED = 18, 14, 16
"""Bytes of a dense copy in whose time a CPU copies one element out of windows, a product writes one, and one product is
added to the sum that it is lifted into. Measured on two cores, with buffers that no cache of theirs holds."""


@dataclass(frozen=True, slots=True)
class Blas:
    """A CPU's matrix products of ``rows x depth`` and ``depth x columns``: what is lost on thin ones.

    ``half`` has the sizes (rows, columns, depth) at which half of the rate of large products is reached. An element of
    an operand takes ``read`` bytes of a dense copy, beside the arithmetic: both operands are packed first.
    """

    half: tuple[int, int, int]
    read: int

    def efficiency(self, rows: int, columns: int, depth: int) -> float:
        """Share of the rate of large products."""
        share = 1.0
        for size, half in zip((rows, columns, depth), self.half, strict=True):
            share *= size / (size + half)
        return share


MKL = Blas((4, 12, 4), 8)
"""What torch multiplies with on most CPUs."""
