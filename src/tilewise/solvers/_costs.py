"""What estimates need to know of products and caches."""

from __future__ import annotations

import functools

import torch

__all__ = ["PLAIN_ARITHMETIC", "cached", "efficiency"]

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
