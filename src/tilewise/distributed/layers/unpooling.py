"""The positions of maxima in the whole image, and max-unpooling, which puts values back at them.

A plane is one channel of one image, with all its spatial dimensions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tilewise.distributed.layers.convolution import Ints, each, spatial
from tilewise.distributed.parts.exchange import fetch
from tilewise.distributed.parts.layout import Interval, Layout, input_cuts, transfer
from tilewise.distributed.parts.names import current_layer
from tilewise.distributed.shards.shard import Shard, aligned, handles
from tilewise.problems.conv.axis import Axis


def global_indices(flat: torch.Tensor, plane: Sequence[int], axes: Sequence[Axis], out: Layout) -> torch.Tensor:
    """Flat indices in the whole plane, from the indices ``flat`` in the inputs that this rank's outputs read.

    These inputs have the sizes ``plane``. Along dimensions that are cut they begin with the first window, which may lie
    in padding. Where nothing in a window is greater than the padding, the index is that of its first element in the
    image, as in torch's kernels. ``out`` is the layout of the outputs.
    """
    indices = torch.zeros_like(flat)
    remainder = flat
    positions = []
    for size in reversed(plane):
        positions.append(remainder % size)
        remainder = remainder.div(size, rounding_mode="floor")
    for i, (axis, position) in enumerate(zip(axes, reversed(positions), strict=True)):
        dim = i - len(axes)
        if dim in out.grid.dims:
            position = position + out.own[out.grid.dims.index(dim)][0] * axis.stride - axis.before
            position = torch.where(position < 0, position % axis.dilation, position)
        indices = indices * axis.size + position
    return indices


def _sizes(
    input: Shard, output_size: Sequence[int] | None, axes: Sequence[tuple[int, int, int]], what: str
) -> list[int]:
    """The sizes of the result. Raises ``ValueError`` for an ``output_size`` whose pooling has not the input's sizes.

    ``axes`` has kernel, stride and padding of each axis.
    """
    usual = [(n - 1) * s + k - 2 * p for n, (k, s, p) in zip(input.shape[-len(axes) :], axes, strict=True)]
    if output_size is None:
        return usual
    given = list(output_size)[-len(axes) :]
    if len(output_size) not in (len(axes), len(axes) + 2) or any(
        abs(g - u) >= s for g, u, (_, s, _) in zip(given, usual, axes, strict=True)
    ):
        raise ValueError(
            f"{what}: output_size={tuple(output_size)}: {tuple(usual)}, or less than a stride off, would do"
        )
    return given


def _unpool(dims: int) -> Callable[..., Shard]:
    """The counterpart of torch's max-unpooling in ``dims`` dimensions."""

    def max_unpool(
        input: Any, indices: Any, kernel_size: Ints, stride: Any = None, padding: Ints = 0, output_size: Any = None
    ) -> Shard:
        """Each rank receives all values whose windows overlap its part of the result, and places those it needs."""
        what = current_layer(f"max_unpool{dims}d")
        x = spatial(input, dims, what)
        kernel, pads = each(kernel_size, dims, "kernel_size"), each(padding, dims, "padding")
        strides = kernel if stride is None or stride == [] else each(stride, dims, "stride")
        sizes = _sizes(x, output_size, list(zip(kernel, strides, pads, strict=True)), what)
        axes = {
            i - dims: Axis(size, k, s, 1, p, (n - 1) * s + k - size - p)
            for i, (size, n, k, s, p) in enumerate(zip(sizes, x.shape[-dims:], kernel, strides, pads, strict=True))
        }
        layout = x.spatial
        out = layout.with_cuts(
            {dim: input_cuts(cuts, axes[dim]) for dim, cuts in zip(layout.grid.dims, layout.cuts, strict=True)}
        )
        needs: list[tuple[Interval, ...]] = [
            tuple(_windows_on(axes[dim], start, stop) for start, stop in itertools.pairwise(cuts))
            for dim, cuts in zip(out.grid.dims, out.cuts, strict=True)
        ]
        moves = transfer(layout, tuple(needs))
        if not isinstance(indices, Shard):
            raise ValueError(f"{what}: indices are a whole tensor: those of max_pool{dims}d on a cut image would do")
        fetched_indices = fetch(x.space.link, what, layout, moves, aligned(x, indices, what))
        values = fetch(x.space.link, what, layout, moves, x.local)
        leading = values.shape[:-dims]
        intervals: list[Interval] = [(0, size) for size in sizes]
        for dim, interval in zip(out.grid.dims, out.own, strict=True):
            intervals[dim] = interval
        part = [stop - start for start, stop in intervals]
        places = torch.zeros_like(fetched_indices)
        inside = torch.ones_like(fetched_indices, dtype=torch.bool)
        stride = math.prod(sizes)
        first = {dim: start for dim, (start, _) in zip(layout.grid.dims, moves.need, strict=True)}
        for i, ((start, stop), size) in enumerate(zip(intervals, sizes, strict=True)):
            stride //= size
            position = fetched_indices.div(stride, rounding_mode="floor") % size
            count = fetched_indices.shape[i - dims]
            window = torch.arange(count, dtype=torch.int64, device=position.device) + first.get(i - dims, 0)
            window = (window * strides[i] - pads[i]).view(-1, *(1,) * (dims - 1 - i))
            # An index outside of its window could belong to a rank that does not receive the value.
            torch._assert_async(
                ((position >= window) & (position < window + kernel[i])).all(),
                f"{what}: an index lies outside of its window: output_size of the image that was pooled would do",
            )
            inside &= (position >= start) & (position < stop)
            places = places * (stop - start) + (position - start)
        # Values that belong to other ranks go to one extra element after the part.
        n = math.prod(part)
        places = places.where(inside, n).flatten(-dims)
        result = values.new_zeros((*leading, n + 1)).scatter(-1, places, values.flatten(-dims))
        return x.like(result[..., :n].reshape(*leading, *part), out)

    return max_unpool


def _windows_on(axis: Axis, start: int, stop: int) -> Interval:
    """The range of windows that overlap the elements ``[start, stop)``."""
    windows = None if start == stop else axis.writing(start, stop)
    return (0, 0) if windows is None else windows[:2]


for _dims in (1, 2, 3):
    handles(getattr(F, f"max_unpool{_dims}d"))(_unpool(_dims))
