"""Pixel and channel shuffles, which move elements between channels and positions of one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tilewise.distributed.layers.convolution import spatial
from tilewise.distributed.layers.shapes import free
from tilewise.distributed.parts.names import current_layer
from tilewise.distributed.shards.shard import Shard, handles, recut


@handles(F.pixel_shuffle)
def _pixel_shuffle(input: Any, upscale_factor: int) -> Shard:
    what = current_layer("pixel_shuffle")
    x, r = spatial(input, 2, what), upscale_factor
    if r < 1 or x.shape[-3] % (r * r):
        raise ValueError(f"{what}: upscale_factor={r}: its square would divide {x.shape[-3]} channels")
    part, layout = x.local, x.spatial
    out = layout.with_cuts(
        {dim: tuple(cut * r for cut in cuts) for dim, cuts in zip(layout.grid.dims, layout.cuts, strict=True)}
    )
    if part.numel():
        return x.like(F.pixel_shuffle(part, r), out)
    # Torch's function and its backward do not change the sizes of an empty part.
    *batch, channels, h, w = part.shape
    return x.like(part.reshape(*batch, channels // (r * r), h * r, w * r), out)


@handles(F.pixel_unshuffle)
def _pixel_unshuffle(input: Any, downscale_factor: int) -> Shard:
    """Each block of elements must lie on one rank: an image that is cut elsewhere is first cut between blocks."""
    what = current_layer("pixel_unshuffle")
    x, r = spatial(input, 2, what), downscale_factor
    if r < 1 or any(size % r for size in x.shape[-2:]):
        raise ValueError(f"{what}: downscale_factor={r}: a divisor of {tuple(x.shape[-2:])} would do")
    cuts = dict(zip(x.spatial.grid.dims, x.spatial.cuts, strict=True))
    blocks = {dim: tuple((cut + r // 2) // r for cut in points) for dim, points in cuts.items()}
    x = recut(x, {dim: tuple(point * r for point in points) for dim, points in blocks.items()}, what)
    *batch, channels, h, w = x.local.shape
    blocked = x.local.reshape(*batch, channels, h // r, r, w // r, r)
    n = len(batch)
    order = [*range(n + 1), n + 2, n + 4, n + 1, n + 3]
    unshuffled = blocked.permute(order).reshape(*batch, channels * r * r, h // r, w // r)
    return x.like(unshuffled, x.spatial.with_cuts(blocks))


@handles(torch.channel_shuffle)
def _channel_shuffle(input: Any, groups: int) -> Shard:
    what = current_layer("channel_shuffle")
    x: Shard = input
    free(x, 1, what)
    if groups < 1 or x.shape[1] % groups:
        raise ValueError(f"{what}: groups={groups}: a divisor of its {x.shape[1]} channels would do")
    part = x.local
    split = part.reshape(part.shape[0], groups, part.shape[1] // groups, *part.shape[2:])
    return x.like(split.transpose(1, 2).reshape(part.shape))
