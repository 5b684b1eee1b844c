"""Where maxima lie in the whole plane, and max-unpooling, which puts values back there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tilewise.axis import Axis
from tilewise.distributed.exchange import fetch
from tilewise.distributed.layers.convolution import Ints, each, spatial
from tilewise.distributed.layout import Interval, Layout, input_cuts, transfer
from tilewise.distributed.names import current_layer
from tilewise.distributed.shard import Shard, aligned, handles


def global_indices(flat: torch.Tensor, plane: Sequence[int], axes: Sequence[Axis], out: Layout) -> torch.Tensor:
    """Flat indices in the whole plane, of ``flat`` ones in a rank's ``plane`` of the inputs that its outputs read.

    Along dimensions that are cut, that plane begins with the first window, in padding perhaps. A window of which
    nothing is greater than the padding has its first element in the image, as torch's kernels have it.
    """
    found = torch.zeros_like(flat)
    rest = flat
    places = []
    for size in reversed(plane):
        places.append(rest % size)
        rest = rest.div(size, rounding_mode="floor")
    for i, (axis, place) in enumerate(zip(axes, reversed(places), strict=True)):
        dim = i - len(axes)
        if dim in out.grid.dims:
            place = place + out.own[out.grid.dims.index(dim)][0] * axis.stride - axis.before
            place = torch.where(place < 0, place % axis.dilation, place)
        found = found * axis.size + place
    return found


def _sizes(
    input: Shard, output_size: Sequence[int] | None, axes: Sequence[tuple[int, int, int]], what: str
) -> list[int]:
    """Sizes of the result. Raises ``ValueError`` for an ``output_size`` that no pooling would make this input of."""
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
    def max_unpool(
        input: Any, indices: Any, kernel_size: Ints, stride: Any = None, padding: Ints = 0, output_size: Any = None
    ) -> Shard:
        """Each rank gets all values whose windows meet its part of the result, and puts there what belongs there."""
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
        where = fetch(x.space.link, what, layout, moves, aligned(x, indices, what))
        values = fetch(x.space.link, what, layout, moves, x.local)
        lead = values.shape[:-dims]
        own: list[Interval] = [(0, size) for size in sizes]
        for dim, interval in zip(out.grid.dims, out.own, strict=True):
            own[dim] = interval
        part = [stop - start for start, stop in own]
        places, inside = torch.zeros_like(where), torch.ones_like(where, dtype=torch.bool)
        behind = math.prod(sizes)
        first = {dim: start for dim, (start, _) in zip(layout.grid.dims, moves.need, strict=True)}
        for i, ((start, stop), size) in enumerate(zip(own, sizes, strict=True)):
            behind //= size
            at = where.div(behind, rounding_mode="floor") % size
            window = torch.arange(where.shape[i - dims], dtype=torch.int64, device=where.device) + first.get(
                i - dims, 0
            )
            window = (window * strides[i] - pads[i]).view(-1, *(1,) * (dims - 1 - i))
            # A place elsewhere could be another rank's, which never hears of it.
            torch._assert_async(
                ((at >= window) & (at < window + kernel[i])).all(),
                f"{what}: an index lies outside of its window: output_size of the image that was pooled would do",
            )
            inside &= (at >= start) & (at < stop)
            places = places * (stop - start) + (at - start)
        # What belongs to another rank goes to one place behind the part.
        n = math.prod(part)
        places = places.where(inside, n).flatten(-dims)
        result = values.new_zeros((*lead, n + 1)).scatter(-1, places, values.flatten(-dims))
        return x.like(result[..., :n].reshape(*lead, *part), out)

    return max_unpool


def _windows_on(axis: Axis, start: int, stop: int) -> Interval:
    """The windows that meet elements ``[start, stop)``."""
    found = None if start == stop else axis.writing(start, stop)
    return (0, 0) if found is None else found[:2]


for _dims in (1, 2, 3):
    handles(getattr(F, f"max_unpool{_dims}d"))(_unpool(_dims))
