"""Convolutions and transposed convolutions by parts, with any options of torch's, in 1 to 3 dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise.distributed.layers._double_backward import DoubleConvolution, DoubleWork
from tilewise.distributed.parts.names import current_layer
from tilewise.distributed.passes.share import share_of
from tilewise.distributed.shards.shard import Shard, handles, sharded
from tilewise.nn.layers.geometry import named_padding
from tilewise.nn.layers.overrides import BY_TORCH, function_name
from tilewise.problems.conv.axis import Axis

Ints = int | Sequence[int]


def each(value: Ints, dims: int, what: str) -> tuple[int, ...]:
    """``value`` as one number for each of ``dims`` dimensions. Raises ``ValueError`` for another count of numbers."""
    values = (value,) if isinstance(value, int) else tuple(value)
    values = values * dims if len(values) == 1 else values
    if len(values) != dims:
        raise ValueError(f"{what}={value}: one number, or {dims} of them, would do")
    return values


def spatial(x: Any, dims: int, what: str) -> Shard:
    """``x`` as an image with ``dims`` spatial dimensions.

    Raises ``ValueError`` where it is not a shard, or is cut along another dimension. ``what`` names the layer there.
    """
    shard = sharded(x, what)
    if shard.spatial.grid.dims and min(shard.spatial.grid.dims) < -dims:
        raise ValueError(
            f"{what}: its image has {dims} dimensions and is cut along dimension {min(shard.spatial.grid.dims)}"
        )
    return shard


def _pads(
    padding: str | Ints, dims: int, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], what: str
) -> Sequence[tuple[int, int]]:
    """The padding (before, after) of each dimension; ``padding`` is given as to torch's convolution."""
    if not isinstance(padding, str):
        return [(p, p) for p in each(padding, dims, "padding")]
    pads = named_padding(padding, stride, dilation, kernel)
    if pads is None and padding == "same":
        raise ValueError(f"{what}: padding='same' is for stride 1, not {tuple(stride)}")
    if pads is None:
        raise ValueError(f"{what}: padding={padding!r}: a number, 'same' or 'valid' would do")
    return pads


def _apply(
    what: str, x: Shard, w: torch.Tensor, b: torch.Tensor | None, axes: tuple[Axis, ...], groups: int, transposed: bool
) -> Shard:
    """This rank's part of a convolution over ``axes`` with the filter ``w`` and the bias ``b``."""
    space, part = x.space, x.local
    channels = w.shape[0] if transposed else w.shape[1] * groups
    batched = part.dim() == len(axes) + 2
    part = part if batched else part.unsqueeze(0)
    if part.shape[1] != channels:
        raise ValueError(f"{what}: its input has {part.shape[1]} channels, its weight is for {channels}")
    parameters = space.parameters if space.parameters is not None and space.parameters.holds(w) else None
    w = space.replicated(what, w)
    b = None if b is None else space.replicated(what, b)
    device = part.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        parameters = parameters if w.dtype is dtype else None  # the gradient of a cast filter is not the parameter's
        part, w, b = part.to(dtype), w.to(dtype), None if b is None else b.to(dtype)
    share = share_of(x.spatial, axes, transposed)
    work = DoubleWork(space, what, x.spatial, share, groups, parameters, axes)
    y = DoubleConvolution.apply(work, part, w, b)  # type: ignore[no-untyped-call]
    return x.like(y if batched else y.squeeze(0), share.out)


def _sizes(x: Shard, dims: int) -> tuple[int, ...]:
    """The spatial sizes of the whole image."""
    return x.spatial.whole(x.local.shape)[-dims:]


def _convolution(dims: int) -> Callable[..., Shard]:
    """The counterpart of torch's convolution in ``dims`` dimensions."""

    def conv(
        input: Any,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Ints = 1,
        padding: str | Ints = 0,
        dilation: Ints = 1,
        groups: int = 1,
    ) -> Shard:
        what = current_layer(f"conv{dims}d")
        x = spatial(input, dims, what)
        strides, dilations = each(stride, dims, "stride"), each(dilation, dims, "dilation")
        kernel = weight.shape[2:]
        pads = _pads(padding, dims, kernel, strides, dilations, what)
        axes = tuple(
            Axis(n, k, s, d, before, after)
            for n, k, s, d, (before, after) in zip(_sizes(x, dims), kernel, strides, dilations, pads, strict=True)
        )
        return _apply(what, x, weight, bias, axes, groups, False)

    return conv


def _transposed(dims: int) -> Callable[..., Shard]:
    """The counterpart of torch's transposed convolution in ``dims`` dimensions."""

    def conv_transpose(
        input: Any,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Ints = 1,
        padding: Ints = 0,
        output_padding: Ints = 0,
        groups: int = 1,
        dilation: Ints = 1,
    ) -> Shard:
        what = current_layer(f"conv_transpose{dims}d")
        x = spatial(input, dims, what)
        strides, dilations = each(stride, dims, "stride"), each(dilation, dims, "dilation")
        pads, extra = each(padding, dims, "padding"), each(output_padding, dims, "output_padding")
        axes = []
        for n, k, s, d, p, e in zip(_sizes(x, dims), weight.shape[2:], strides, dilations, pads, extra, strict=True):
            if e >= max(s, d):
                raise ValueError(f"{what}: output_padding={e}: less than stride {s} or dilation {d} would do")
            # Negative padding after: no window of the convolution reads the outputs that output_padding adds.
            axes.append(Axis((n - 1) * s - 2 * p + (k - 1) * d + 1 + e, k, s, d, p, p - e))
        return _apply(what, x, weight, bias, tuple(axes), groups, True)

    return conv_transpose


# BY_TORCH has torch's own functions, even where tilewise.enable() has replaced them before this is imported.
for _dims in (1, 2, 3):
    handles(BY_TORCH[function_name(_dims, False)])(_convolution(_dims))
    handles(BY_TORCH[function_name(_dims, True)])(_transposed(_dims))
