"""``unfold``, which makes a matrix with a column for each patch of an image, and ``fold``, which sums patches up.

The image must be cut in rows alone. Then the matrix is cut between whole rows of patches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F

from tilewise.distributed.layers.convolution import Ints, each, spatial
from tilewise.distributed.layers.views import moved
from tilewise.distributed.parts.exchange import bring_home
from tilewise.distributed.parts.layout import Cuts, Layout, input_cuts, transfer
from tilewise.distributed.parts.names import current_layer
from tilewise.distributed.shards.halo import window, windows
from tilewise.distributed.shards.shard import Shard, handles, recut, sharded
from tilewise.problems.conv.axis import Axis


def _axes(sizes: Sequence[int], kernel_size: Ints, dilation: Ints, padding: Ints, stride: Ints) -> tuple[Axis, Axis]:
    """The axes of the patches along rows and columns of an image of ``sizes``."""
    kernel, strides = each(kernel_size, 2, "kernel_size"), each(stride, 2, "stride")
    pads, dilations = each(padding, 2, "padding"), each(dilation, 2, "dilation")
    rows, columns = (Axis(*options) for options in zip(sizes, kernel, strides, dilations, pads, pads, strict=True))
    return rows, columns


@handles(F.unfold)
def _unfold(input: Any, kernel_size: Ints, dilation: Ints = 1, padding: Ints = 0, stride: Ints = 1) -> Shard:
    """The columns of this rank's patches: a row of patches belongs to the rank that holds its centre."""
    what = current_layer("unfold")
    x = spatial(input, 2, what)
    if x.spatial.grid.dims != (-2,):
        raise ValueError(f"{what}: its image is not cut in rows alone, as by dims=('h',): gather() first would do")
    rows, columns = _axes(x.shape[-2:], kernel_size, dilation, padding, stride)
    source, out = windows(x, {-2: rows}, what)
    layout = replace(out, cuts=(tuple(cut * columns.out for cut in out.cuts[0]),))
    layout = moved(layout, [source.dim() - 2], source.dim() - 1)
    kernel, strides = (rows.kernel, columns.kernel), (rows.stride, columns.stride)
    if not source.numel():
        channels = source.shape[-3] * rows.kernel * columns.kernel
        return x.like(source.flatten()[:0].view(*source.shape[:-3], channels, 0), layout)
    return x.like(F.unfold(source, kernel, (rows.dilation, columns.dilation), (0, columns.before), strides), layout)


@handles(F.fold)
def _fold(
    input: Any, output_size: Ints, kernel_size: Ints, dilation: Ints = 1, padding: Ints = 0, stride: Ints = 1
) -> Shard:
    """Sum this rank's patches, and add the sums in rows of other ranks there, by the adjoint of unfold's exchange."""
    what = current_layer("fold")
    x = sharded(input, what)
    if x.spatial.grid.dims != (-1,):
        raise ValueError(f"{what}: its patches are not cut along the last dimension alone: gather() first would do")
    sizes = each(output_size, 2, "output_size")
    rows, columns = _axes(sizes, kernel_size, dilation, padding, stride)
    if x.shape[-1] != rows.out * columns.out or x.shape[-2] % (rows.kernel * columns.kernel):
        raise ValueError(
            f"{what}: {tuple(x.shape)} are not patches of {rows.kernel}x{columns.kernel} of an image of {sizes}: "
            f"{rows.out * columns.out} would do"
        )
    starts: Cuts = tuple(round(cut / columns.out) for cut in x.spatial.cuts[0])
    x = recut(x, {-1: tuple(start * columns.out for start in starts)}, what)
    layout = Layout(replace(x.spatial.grid, dims=(-2,)), (input_cuts(starts, rows),))
    needs = [window(rows, start, stop) for start, stop in itertools.pairwise(starts)]
    moves = transfer(layout, (tuple(need for need, _ in needs),))
    (start, stop), (before, after) = needs[layout.grid.coords[0]]
    part = x.local
    channels = part.shape[-2] // (rows.kernel * columns.kernel)
    shape = [*part.shape[:-2], channels, stop - start + before + after, columns.size]
    if part.shape[-1]:
        kernel, dilations = (rows.kernel, columns.kernel), (rows.dilation, columns.dilation)
        folded = F.fold(
            part, (shape[-2], shape[-1]), kernel, dilations, (0, columns.before), (rows.stride, columns.stride)
        )
    else:
        folded = part.flatten()[:0].view(shape)
    own_shape = [*shape[:-2], *layout.part(shape)[-2:]]
    return x.like(bring_home(x.space.link, what, layout, moves, ((before, after),), own_shape, folded), layout)
