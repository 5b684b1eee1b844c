"""Interpolation by any ratio.

Torch's own function computes it where every input has the same number of outputs over it. Otherwise outputs are sums of
inputs by weights.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tilewise.distributed.layers.convolution import spatial
from tilewise.distributed.parts.exchange import fetch
from tilewise.distributed.parts.layout import Interval, Layout, transfer
from tilewise.distributed.parts.names import current_layer
from tilewise.distributed.parts.resampling import Resampling, resampled_cuts, taps
from tilewise.distributed.shards.shard import Shard, handles

Needs = tuple[tuple[Interval, ...], ...]
"""The interval of inputs that each rank needs, for each dimension that is cut."""
Numbers = tuple[float, ...] | float | None


@functools.lru_cache(maxsize=1024)
def _axes(
    shape: tuple[int, ...],
    size: Numbers,
    factors: Numbers,
    mode: str,
    align_corners: bool | None,
    recompute: bool | None,
    antialias: bool,
    device: str,
) -> tuple[Resampling, ...]:
    """The axes of an interpolation of an image of ``shape``; raises torch's errors for wrong arguments."""
    empty = torch.empty((0, 1, *shape[2:]), dtype=torch.float32, device="cpu")  # interpolating it takes no time
    options: dict[str, Any] = {"size": size, "scale_factor": factors, "mode": mode, "align_corners": align_corners}
    out = F.interpolate(empty, recompute_scale_factor=recompute, antialias=antialias, **options).shape[2:]
    dims = len(shape) - 2
    if antialias and out == shape[2:]:
        return tuple(Resampling(n, n, "nearest", dims=dims, device=device) for n in out)  # torch copies the image
    scales: Sequence[float | None] = [None] * dims
    if factors is not None and not recompute and mode != "area":
        scales = factors if isinstance(factors, tuple) else [factors] * dims
    return tuple(
        Resampling(n, m, mode, None if s is None else float(s), bool(align_corners), antialias, dims, device)
        for n, m, s in zip(shape[2:], out, scales, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """The layout of the outputs, the inputs that ranks need, and whether torch's own function computes them."""

    out: Layout
    needs: Needs
    by_torch: bool


@functools.lru_cache(maxsize=1024)
def _plan(layout: Layout, axes: tuple[Resampling, ...]) -> _Plan:
    """How an image cut as ``layout`` says is interpolated along ``axes``."""
    cut = [axes[dim] for dim in layout.grid.dims]
    out = layout.with_cuts(
        {
            dim: resampled_cuts(cuts, axis.out)
            for dim, cuts, axis in zip(layout.grid.dims, layout.cuts, cut, strict=True)
        }
    )
    by_torch = all(axis.factor for axis in axes)
    needs = tuple(
        tuple(
            _need(axis, outs, ins, by_torch)
            for outs, ins in zip(itertools.pairwise(points), itertools.pairwise(cuts), strict=True)
        )
        for axis, points, cuts in zip(cut, out.cuts, layout.cuts, strict=True)
    )
    return _Plan(out, needs, by_torch)


def _need(axis: Resampling, outs: Interval, ins: Interval, by_torch: bool) -> Interval:
    """The inputs of which the outputs ``outs`` are made, for a rank that holds the inputs ``ins``."""
    (first, last), (start, stop) = outs, ins
    if first == last:
        return start, start
    if by_torch:
        return max(start - axis.reach, 0), min(stop + axis.reach, axis.size)
    index = taps(axis).index[first:last]
    return int(index.min()), int(index.max()) + 1


@functools.lru_cache(maxsize=1024)
def _local_taps(
    axis: Resampling, outs: Interval, origin: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """The indices, counted from ``origin``, and the weights of the outputs ``outs``: a tensor of each for each tap."""
    all_taps = taps(axis)
    index = (all_taps.index[slice(*outs)] - origin).to(device)
    weight = None if all_taps.weight is None else all_taps.weight[slice(*outs)].to(device, dtype)
    return list(index.T.contiguous()), None if weight is None else list(weight.T.contiguous())


def _along(part: torch.Tensor, dim: int, axis: Resampling, outs: Interval, origin: int) -> torch.Tensor:
    """The outputs ``outs`` along ``dim``, as sums of elements of ``part``, whose first has the index ``origin``."""
    if axis.factor == 1 and part.shape[dim] == outs[1] - outs[0]:
        return part
    index, weight = _local_taps(axis, outs, origin, part.dtype, part.device)
    if weight is None:
        return part.index_select(dim, index[0])
    shape = (-1, *(1,) * (-1 - dim))
    total = part.index_select(dim, index[0]) * weight[0].view(shape)
    for i, w in zip(index[1:], weight[1:], strict=True):
        total = total.addcmul(part.index_select(dim, i), w.view(shape))
    return total


def _interpolated(x: Shard, axes: tuple[Resampling, ...], what: str) -> Shard:
    """This rank's part of the image ``x`` interpolated along ``axes``."""
    layout, part = x.spatial, x.local
    plan = _plan(layout, axes)
    if plan.needs != tuple(tuple(itertools.pairwise(cuts)) for cuts in layout.cuts):
        part = fetch(x.space.link, what, layout, transfer(layout, plan.needs), part)
    coords = layout.grid.coords
    by_dim = dict(zip(layout.grid.dims, zip(plan.out.own, layout.own, plan.needs, coords, strict=True), strict=True))
    if part.numel() == 0:
        sizes = plan.out.part([*part.shape[: -len(axes)], *(axis.out for axis in axes)])
        return x.like(part.reshape(sizes), plan.out)
    if plan.by_torch:
        align = None if axes[0].mode.startswith("nearest") else False
        result = F.interpolate(part, None, [axis.factor for axis in axes], axes[0].mode, align)
        for dim, (_, (start, stop), needs, coord) in by_dim.items():
            factor = axes[dim].factor
            result = result.narrow(dim, (start - needs[coord][0]) * factor, (stop - start) * factor)
        return x.like(result, plan.out)
    dtype = part.dtype
    if dtype in (torch.float16, torch.bfloat16) and not axes[0].mode.startswith("nearest"):
        part = part.float()
    for i, axis in enumerate(axes):
        dim = i - len(axes)
        if dim in by_dim:
            outs, _, needs, coord = by_dim[dim]
            part = _along(part, dim, axis, outs, needs[coord][0])
        else:
            part = _along(part, dim, axis, (0, axis.out), 0)
    return x.like(part.to(dtype), plan.out)


def _hashable(value: Any) -> Any:
    """A tuple in place of a list, so that it can be a key."""
    return tuple(value) if isinstance(value, (list, tuple)) else value


@handles(F.interpolate, F.upsample)
def _interpolate(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Shard:
    what = current_layer("interpolate")
    x = spatial(input, input.dim() - 2, what)
    size, factors = _hashable(size), _hashable(scale_factor)
    device = x.local.device.type
    axes = _axes(tuple(x.shape), size, factors, mode, align_corners, recompute_scale_factor, antialias, device)
    return _interpolated(x, axes, what)


@handles(F.upsample_nearest)
def _upsample_nearest(input: Any, size: Any = None, scale_factor: Any = None) -> Shard:
    return _interpolate(input, size, scale_factor)


@handles(F.upsample_bilinear)
def _upsample_bilinear(input: Any, size: Any = None, scale_factor: Any = None) -> Shard:
    return _interpolate(input, size, scale_factor, "bilinear", True)
