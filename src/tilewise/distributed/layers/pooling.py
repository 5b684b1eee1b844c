"""Pooling over windows, which need halos, and adaptive pooling of whole images, whose result every rank gets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tilewise.distributed.layers.convolution import Ints, each, spatial
from tilewise.distributed.layers.unpooling import global_indices
from tilewise.distributed.parts.layout import Layout
from tilewise.distributed.parts.names import current_layer
from tilewise.distributed.parts.replicated import sum_over_ranks
from tilewise.distributed.shards.halo import windows
from tilewise.distributed.shards.shard import Shard, handles
from tilewise.problems.conv.axis import Axis

MAX = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
MAX_WITH_INDICES = (F.max_pool1d_with_indices, F.max_pool2d_with_indices, F.max_pool3d_with_indices)
AVERAGE = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
ADAPTIVE_MAX = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)
ADAPTIVE_AVERAGE = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
LP = (F.lp_pool1d, F.lp_pool2d, F.lp_pool3d)


def _axes(
    x: Shard, kernel: Sequence[int], stride: Any, padding: Ints, dilation: Ints, ceil_mode: bool, what: str
) -> tuple[Axis, ...]:
    """The axes of a pooling of the whole image.

    With ``ceil_mode`` the last window may reach beyond the padding, but not begin there.
    """
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
    """The pooling of this rank's windows, and the layout of the outputs.

    ``pool`` computes it from the inputs of these windows and the padding of each dimension: 0 along dimensions that are
    cut, where padding of the value ``fill`` is added before.
    """
    dims = len(axes)
    source, out = windows(x, {i - dims: axis for i, axis in enumerate(axes)}, what, fill)
    pads = [0 if i - dims in x.spatial.grid.dims else axis.before for i, axis in enumerate(axes)]
    if source.numel() == 0:
        sizes = out.part([*source.shape[:-dims], *(axis.out for axis in axes)])
        return source.flatten()[:0].view(sizes), out
    return pool(source, pads), out


def _max(dims: int, with_indices: bool = False) -> Callable[..., Any]:
    """The counterpart of torch's max pooling in ``dims`` dimensions."""

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
        indices_and_sizes: list[tuple[torch.Tensor, torch.Size]] = []

        def pool(source: torch.Tensor, pads: list[int]) -> torch.Tensor:
            maxima: torch.Tensor
            if not with_indices:
                maxima = MAX[dims - 1](source, kernel, strides, pads, dilations, ceil_mode)
                return maxima
            maxima, flat = MAX_WITH_INDICES[dims - 1](source, kernel, strides, pads, dilations, ceil_mode)
            indices_and_sizes.append((flat, source.shape[-dims:]))
            return maxima

        y, out = _pooled(x, axes, lowest, what, pool)
        if not with_indices:
            return x.like(y, out)
        if indices_and_sizes:
            indices = global_indices(*indices_and_sizes[0], axes, out)
        else:
            indices = y.new_empty(y.shape, dtype=torch.int64)
        return x.like(y, out), x.like(indices, out)

    return max_pool


def _average(dims: int) -> Callable[..., Shard]:
    """The counterpart of torch's average pooling in ``dims`` dimensions."""

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

        def pool(source: torch.Tensor, pads: list[int]) -> torch.Tensor:
            size, stride = list(kernel), [axis.stride for axis in axes]
            if dims == 1:  # F.avg_pool1d has no divisor_override, so that 2-D pooling stands in for it
                source, size, stride, pads = source.unsqueeze(-2), [1, *size], [1, *stride], [0, *pads]
            function: Any = AVERAGE[max(dims, 2) - 1]
            averages: torch.Tensor = function(source, size, stride, pads, ceil_mode, divisor_override=divisor)
            return averages.squeeze(-2) if dims == 1 else averages

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
    """The divisor of the sum over each window: its elements, without those beyond the padding in ceil mode."""
    low, high = (-axis.before, axis.size + axis.before) if include_pad else (0, axis.size)
    starts = (out * axis.stride - axis.before for out in range(axis.out))
    return [min(start + axis.kernel, high) - max(start, low) for start in starts]


def _product(values: Any) -> int:
    product = 1
    for value in values:
        product *= value
    return product


def _lp(dims: int) -> Callable[..., Shard]:
    """The counterpart of torch's power-average pooling in ``dims`` dimensions."""
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
    """The number of outputs of an adaptive pooling along each dimension."""
    wanted = [output_size] * dims if output_size is None or isinstance(output_size, int) else list(output_size)
    wanted = wanted * dims if len(wanted) == 1 else wanted
    return [size if bins is None else bins for bins, size in zip(wanted, x.shape[-dims:], strict=True)]


def _averaged(part: torch.Tensor, dim: int, size: int, bins: int, own: tuple[int, int]) -> torch.Tensor:
    """The terms that a part adds to each of ``bins`` averages of ``size`` elements along ``dim``, at least in fp32.

    The part has the elements ``own`` along ``dim``. The terms are plain sums, because the graph of a sum's gradient
    does not lead back to the part. The one of torch's function does, but only on ranks whose parts are not empty: ranks
    with different graphs would wait for each other in a backward.
    """
    wide, terms = torch.promote_types(part.dtype, torch.float32), []
    for i in range(bins):
        first, last = i * size // bins, -(-(i + 1) * size // bins)
        start, stop = (min(max(edge, own[0]), own[1]) - own[0] for edge in (first, last))
        terms.append(part.narrow(dim, start, stop - start).sum(dim, keepdim=True, dtype=wide) / (last - first))
    return torch.cat(terms, dim)


def _adaptive_average(dims: int) -> Callable[..., torch.Tensor]:
    """The counterpart of torch's adaptive average pooling in ``dims`` dimensions."""

    def adaptive_avg_pool(input: Any, output_size: Any) -> torch.Tensor:
        """Sum the ranks' terms of every average. The result, which is small, is whole on each rank."""
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
    """The counterpart of torch's adaptive max pooling in ``dims`` dimensions."""

    def adaptive_max_pool(input: Any, output_size: Any, return_indices: bool = False) -> torch.Tensor:
        """Pool the gathered maxima of the ranks where cut dimensions have one output, else the gathered image."""
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
            # The pooling of an empty batch gives this rank the graph that the others have.
            zero = function(part.flatten()[:0].view(0, 1, *bins), bins).sum()
            part = part.flatten()[:0].view(*part.shape[:-dims], *empty) + zero
        cuts_of_maxima = {}
        for dim, cuts in zip(layout.grid.dims, layout.cuts, strict=True):
            counts = (int(start < stop) for start, stop in itertools.pairwise(cuts))
            cuts_of_maxima[dim] = tuple(itertools.accumulate(counts, initial=0))
        return function(x.like(part, layout.with_cuts(cuts_of_maxima)).gather(), bins)

    return adaptive_max_pool


for _dims in (1, 2, 3):
    handles(MAX[_dims - 1], getattr(torch, f"max_pool{_dims}d"))(_max(_dims))
    handles(MAX_WITH_INDICES[_dims - 1])(_max(_dims, with_indices=True))
    handles(AVERAGE[_dims - 1])(_average(_dims))
    handles(LP[_dims - 1])(_lp(_dims))
    handles(ADAPTIVE_AVERAGE[_dims - 1])(_adaptive_average(_dims))
    handles(ADAPTIVE_MAX[_dims - 1])(_adaptive_max(_dims))
handles(torch.adaptive_max_pool1d)(_adaptive_max(1))
