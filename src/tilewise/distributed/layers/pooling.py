"""Pooling: windows with their halos, and averages and maxima of whole images, which every rank gets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tilewise.axis import Axis
from tilewise.distributed.halo import windows
from tilewise.distributed.layers.convolution import Ints, each, spatial
from tilewise.distributed.layers.unpooling import global_indices
from tilewise.distributed.layout import Layout
from tilewise.distributed.names import current_layer
from tilewise.distributed.replicated import sum_over_ranks
from tilewise.distributed.shard import Shard, handles

MAX = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
MAX_WITH_INDICES = (F.max_pool1d_with_indices, F.max_pool2d_with_indices, F.max_pool3d_with_indices)
AVERAGE = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
ADAPTIVE_MAX = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)
ADAPTIVE_AVERAGE = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
LP = (F.lp_pool1d, F.lp_pool2d, F.lp_pool3d)


def _axes(
    x: Shard, kernel: Sequence[int], stride: Any, padding: Ints, dilation: Ints, ceil_mode: bool, what: str
) -> tuple[Axis, ...]:
    """The whole pooling's axes; in ``ceil_mode`` the last window may reach behind the padding, but not begin there."""
    dims = len(kernel)
    strides = tuple(kernel) if stride is None or stride == [] else each(stride, dims, "stride")
    pads, dilations = each(padding, dims, "padding"), each(dilation, dims, "dilation")
    axes = []
    for n, k, s, p, d in zip(x.shape[-dims:], kernel, strides, pads, dilations, strict=True):
        if 2 * p > (k - 1) * d + 1:
            raise ValueError(f"{what}: padding={p}: at most half of kernel_size={k} would do")
        after = p
        if ceil_mode:
            reach = (k - 1) * d + 1
            out = -(-(n + 2 * p - reach) // s) + 1
            out -= (out - 1) * s >= n + p
            after = (out - 1) * s + reach - n - p
        axes.append(Axis(n, k, s, d, p, after))
    return tuple(axes)


def _pooled(
    x: Shard, axes: tuple[Axis, ...], fill: float, what: str, pool: Callable[[torch.Tensor, list[int]], torch.Tensor]
) -> tuple[torch.Tensor, Layout]:
    """``pool`` of this rank's windows with the padding that is left to do, along dimensions that are not cut."""
    dims = len(axes)
    source, out = windows(x, {i - dims: axis for i, axis in enumerate(axes)}, what, fill)
    pads = [0 if i - dims in x.spatial.grid.dims else axis.before for i, axis in enumerate(axes)]
    if source.numel() == 0:
        sizes = out.part([*source.shape[:-dims], *(axis.out for axis in axes)])
        return source.flatten()[:0].view(sizes), out
    return pool(source, pads), out


def _max(dims: int, with_indices: bool = False) -> Callable[..., Any]:
    def max_pool(
        input: Any,
        kernel_size: Ints,
        stride: Any = None,
        padding: Ints = 0,
        dilation: Ints = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        what = current_layer(f"max_pool{dims}d")
        x = spatial(input, dims, what)
        kernel = each(kernel_size, dims, "kernel_size")
        axes = _axes(x, kernel, stride, padding, dilation, ceil_mode, what)
        strides, dilations = [a.stride for a in axes], [a.dilation for a in axes]
        lowest = -float("inf") if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
        planes: list[tuple[torch.Tensor, torch.Size]] = []

        def pool(t: torch.Tensor, pads: list[int]) -> torch.Tensor:
            if not with_indices:
                plain: torch.Tensor = MAX[dims - 1](t, kernel, strides, pads, dilations, ceil_mode)
                return plain
            found, flat = MAX_WITH_INDICES[dims - 1](t, kernel, strides, pads, dilations, ceil_mode)
            planes.append((flat, t.shape[-dims:]))
            return found

        y, out = _pooled(x, axes, lowest, what, pool)
        if not with_indices:
            return x.like(y, out)
        indices = global_indices(*planes[0], axes, out) if planes else y.new_empty(y.shape, dtype=torch.int64)
        return x.like(y, out), x.like(indices, out)

    return max_pool


def _average(dims: int) -> Callable[..., Shard]:
    def avg_pool(
        input: Any,
        kernel_size: Ints,
        stride: Any = None,
        padding: Ints = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Shard:
        what = current_layer(f"avg_pool{dims}d")
        x = spatial(input, dims, what)
        kernel = each(kernel_size, dims, "kernel_size")
        axes = _axes(x, kernel, stride, padding, 1, ceil_mode, what)
        counts = None if divisor_override else [_counts(a, count_include_pad) for a in axes]
        divisor = divisor_override or 1
        if counts is not None and all(len(set(line)) == 1 for line in counts):
            divisor, counts = _product(line[0] for line in counts), None

        def pool(t: torch.Tensor, pads: list[int]) -> torch.Tensor:
            flat, size, stride, sides = t, list(kernel), [a.stride for a in axes], pads
            if dims == 1:  # of the three, the one without a divisor of one's own
                flat, size, stride, sides = t.unsqueeze(-2), [1, *size], [1, *stride], [0, *sides]
            function: Any = AVERAGE[max(dims, 2) - 1]
            found: torch.Tensor = function(flat, size, stride, sides, ceil_mode, divisor_override=divisor)
            return found.squeeze(-2) if dims == 1 else found

        y, out = _pooled(x, axes, 0.0, what, pool)
        if counts is not None and y.numel():
            for i, line in enumerate(counts):
                cuts = out.cut_of(i - dims)
                if cuts is not None:
                    coord = out.grid.coords[out.grid.dims.index(i - dims)]
                    line = line[cuts[coord] : cuts[coord + 1]]
                y = y / y.new_tensor(line).view(-1, *(1,) * (dims - 1 - i))
        return x.like(y, out)

    return avg_pool


def _counts(axis: Axis, include_pad: bool) -> list[int]:
    """By how many elements the sum over each window is divided; padding that ceil mode adds never counts."""
    low, high = (-axis.before, axis.size + axis.before) if include_pad else (0, axis.size)
    starts = (out * axis.stride - axis.before for out in range(axis.out))
    return [min(start + axis.kernel, high) - max(start, low) for start in starts]


def _product(values: Any) -> int:
    total = 1
    for value in values:
        total *= value
    return total


def _lp(dims: int) -> Callable[..., Shard]:
    average = _average(dims)

    def lp_pool(input: Any, norm_type: float, kernel_size: Ints, stride: Any = None, ceil_mode: bool = False) -> Any:
        if norm_type in (float("inf"), -float("inf")):
            sign = 1 if norm_type > 0 else -1
            return sign * _max(dims)(sign * input.abs(), kernel_size, stride, ceil_mode=ceil_mode)
        total = average(input.pow(norm_type), kernel_size, stride, ceil_mode=ceil_mode)
        elements = _product(each(kernel_size, dims, "kernel_size"))
        return (total.sign() * total.abs().relu() * elements).pow(1 / norm_type)

    return lp_pool


def _bins(x: Shard, output_size: Any, dims: int) -> list[int]:
    wanted = [output_size] * dims if output_size is None or isinstance(output_size, int) else list(output_size)
    wanted = wanted * dims if len(wanted) == 1 else wanted
    return [size if bins is None else bins for bins, size in zip(wanted, x.shape[-dims:], strict=True)]


def _averaged(part: torch.Tensor, dim: int, size: int, bins: int, own: tuple[int, int]) -> torch.Tensor:
    """What the elements ``own`` of ``size`` along ``dim`` bring to each of ``bins`` averages, in fp32 at least.

    By sums, in whose gradients' graph the part itself is not: that of torch's function leads back to it, on some ranks
    and not on those whose parts are empty, and ranks that go different ways in a backward wait for each other.
    """
    wide, found = torch.promote_types(part.dtype, torch.float32), []
    for i in range(bins):
        first, last = i * size // bins, -(-(i + 1) * size // bins)
        start, stop = (min(max(edge, own[0]), own[1]) - own[0] for edge in (first, last))
        found.append(part.narrow(dim, start, stop - start).sum(dim, keepdim=True, dtype=wide) / (last - first))
    return torch.cat(found, dim)


def _adaptive_average(dims: int) -> Callable[..., torch.Tensor]:
    def adaptive_avg_pool(input: Any, output_size: Any) -> torch.Tensor:
        """Every rank's term of every bin, summed over ranks: the result is small, and whole on each."""
        what = current_layer(f"adaptive_avg_pool{dims}d")
        x = spatial(input, dims, what)
        bins, part = _bins(x, output_size, dims), x.local
        own = dict(zip(x.spatial.grid.dims, x.spatial.own, strict=True))
        for dim in range(-dims, 0):
            size = x.shape[dim]
            if dim in own or bins[dim] != size:
                part = _averaged(part, dim, size, bins[dim], own.get(dim, (0, size)))
        return sum_over_ranks(x.space.link, what, part).to(x.dtype)

    return adaptive_avg_pool


def _adaptive_max(dims: int) -> Callable[..., torch.Tensor]:
    def adaptive_max_pool(input: Any, output_size: Any, return_indices: bool = False) -> torch.Tensor:
        """The maximum of the ranks' maxima for one bin, else of the whole image, which every rank then gets."""
        what = current_layer(f"adaptive_max_pool{dims}d")
        x = spatial(input, dims, what)
        bins, part, layout = _bins(x, output_size, dims), x.local, x.spatial
        function = ADAPTIVE_MAX[dims - 1]
        if any(bins[dim] != 1 for dim in layout.grid.dims):
            return function(x.gather(), bins)
        if part.numel():
            part = function(part, bins)
        else:
            empty = [0 if i - dims in layout.grid.dims else n for i, n in enumerate(bins)]
            # The maximum of no images is in the graphs of all ranks.
            of_none = function(part.flatten()[:0].view(0, 1, *bins), bins).sum()
            part = part.flatten()[:0].view(*part.shape[:-dims], *empty) + of_none
        found = {}
        for dim, cuts in zip(layout.grid.dims, layout.cuts, strict=True):
            filled = (int(a < b) for a, b in itertools.pairwise(cuts))
            found[dim] = tuple(itertools.accumulate(filled, initial=0))
        return function(x.like(part, layout.with_cuts(found)).gather(), bins)

    return adaptive_max_pool


for _dims in (1, 2, 3):
    handles(MAX[_dims - 1], getattr(torch, f"max_pool{_dims}d"))(_max(_dims))
    handles(MAX_WITH_INDICES[_dims - 1])(_max(_dims, with_indices=True))
    handles(AVERAGE[_dims - 1])(_average(_dims))
    handles(LP[_dims - 1])(_lp(_dims))
    handles(ADAPTIVE_AVERAGE[_dims - 1])(_adaptive_average(_dims))
    handles(ADAPTIVE_MAX[_dims - 1])(_adaptive_max(_dims))
handles(torch.adaptive_max_pool1d)(_adaptive_max(1))
