"""What estimates need to know of products and caches."""

from __future__ import annotations

import functools

import torch

__all__ = ["cached", "efficiency"]

CPU_CACHE = 2**21
"""Bytes of cache a core has to itself, roughly, on processors of today."""
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


def efficiency(rows: int, columns: int, depth: int, batch: int = 1) -> float:
    """Share of peak a product of this shape usually reaches: tiles that are not full, and too few of them."""
    tile, share = 64, 0.85
    for size in (rows, columns):
        share *= size / (-(-size // tile) * tile) if size >= tile else max(size / tile, 0.05)
    share *= depth / (depth + 32)
    tiles = -(-rows // tile) * -(-columns // tile) * batch
    return max(share * tiles / (tiles + 32), 0.002)
