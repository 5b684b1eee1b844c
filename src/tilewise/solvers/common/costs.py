"""Rules of thumb for cost estimates: how fast matrix products run, and what traffic that stays in cache costs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

__all__ = ["LIFTED", "LOWERED", "MKL", "PLAIN_ARITHMETIC", "WRITTEN", "Blas", "cache_bytes", "cached", "efficiency"]

CPU_CACHE = 2**21
"""Bytes of cache that one CPU core has to itself, roughly."""
MULTIPROCESSORS = 132
"""Multiprocessors of the GPU that estimates are made for (an H100)."""
MIN_EFFICIENCY = 0.002
PLAIN_ARITHMETIC = {"fp32": 0.25, "tf32": 0.03, "16-bit": 0.017}
"""Rate of plain fp32 arithmetic, which transforms use whatever the operands, relative to a GPU's matrix products."""
CACHED = {"cpu": 0.25, "cuda": 0.5}
"""Cost per byte of traffic that stays in cache, relative to traffic through memory."""


def cached(device_type: str, footprint: int) -> float:
    """Cost per byte of a buffer that is written, read and reused, relative to a byte that goes through memory.

    ``footprint`` is the buffer's size in bytes. Up to half of the device's cache it counts as cached.
    """
    return CACHED[device_type] if footprint <= cache_bytes(device_type) // 2 else 1.0


@functools.cache
def cache_bytes(device_type: str) -> int:
    """Size in bytes of a GPU's L2 cache, or of one CPU core's own cache."""
    if device_type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties().L2_cache_size)
    return CPU_CACHE if device_type == "cpu" else 32 * 2**20


def efficiency(device_type: str, rows: int, columns: int, depth: int, batch: int = 1) -> float:
    """Share of the device's peak rate that ``batch`` matrix products (rows x depth) @ (depth x columns) reach.

    On a CPU the edges of its small tiles are lost. On a GPU partly filled tiles are lost, and multiprocessors without a
    tile; a deep product is divided along its depth to fill them.
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
"""Time per element on a CPU, in bytes of a contiguous copy that takes as long: ``LOWERED`` to gather an element into
the lowered matrix, ``WRITTEN`` for a product to write one, ``LIFTED`` to add one to the result it is lifted into.
Measured on two cores, with buffers larger than their caches."""


@dataclass(frozen=True, slots=True)
class Blas:
    """A CPU library's rate for matrix products of ``rows x depth`` by ``depth x columns``, relative to large ones.

    ``half`` holds the sizes (rows, columns, depth) at which half of the rate of large products is reached. ``read`` is
    the time to pack one element of an operand, in bytes of a contiguous copy that takes as long.
    """

    half: tuple[int, int, int]
    read: int

    def efficiency(self, rows: int, columns: int, depth: int) -> float:
        """Share of the rate of large products that one of these sizes reaches, between 0 and 1."""
        share = 1.0
        for size, half in zip((rows, columns, depth), self.half, strict=True):
            share *= size / (size + half)
        return share


MKL = Blas((4, 12, 4), 8)
"""The library that torch multiplies with on most CPUs."""
