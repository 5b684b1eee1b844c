"""Batch, group, instance, layer and other norms, with the statistics of the whole image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tilewise.distributed.layers.shapes import free
from tilewise.distributed.norms.normalization import Normalize, Over, Place, Seen
from tilewise.distributed.norms.sums import Tracking
from tilewise.distributed.parts.names import current_layer
from tilewise.distributed.parts.replicated import sum_over_ranks
from tilewise.distributed.shards.shard import Shard, handles, operand, sharded

Tensor = torch.Tensor


def image(x: Any, what: str) -> Shard:
    """``x`` as an image with batch and channels.

    Raises ``ValueError`` where it is not a shard, or is cut along its batch or channels. ``what`` names the layer.
    """
    shard = sharded(x, what)
    if shard.dim() + min(shard.spatial.grid.dims) < 2:
        raise ValueError(f"{what}: an image of {tuple(shard.shape)} is cut along its batch or channels")
    return shard


def _parameter(x: Shard, what: str, tensor: Tensor | None) -> Tensor | None:
    """A weight or bias, if any, whose gradient is summed over the ranks."""
    return None if tensor is None else x.space.replicated(what, tensor)


def check_count(x: torch.Tensor, count: int, what: str) -> None:
    """Raise ``ValueError`` where ``count``, the number of values for each channel, is less than 2."""
    if count < 2:
        raise ValueError(f"{what}: more than 1 value per channel is needed in training, not an image of {x.shape}")


def _in_autocast(part: Tensor) -> Tensor:
    """``part`` in float32 where torch's group and layer norms would compute in that: on GPUs under autocast."""
    return part.float() if part.is_cuda and torch.is_autocast_enabled("cuda") and part.dtype != torch.float64 else part


@handles(F.batch_norm)
def _batch_norm(
    input: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Shard:
    """Batch norm. In training statistics are of the whole images; running statistics stay the same on all ranks."""
    what = current_layer("batch_norm")
    x = image(input, what)
    w, b = _parameter(x, what, weight), _parameter(x, what, bias)
    if not training:
        return x.like(F.batch_norm(x.local, running_mean, running_var, w, b, False, momentum, eps))
    shape = x.shape
    count = shape.numel() // max(shape[1], 1)
    check_count(x, count, what)
    over = Over(x.space.link, what, count, kernels=x.space.norms)
    seen = Tracking(running_mean, running_var, momentum)
    return x.like(Normalize.apply(over, eps, seen, x.local, w, b))  # type: ignore[no-untyped-call]


def _by_sample(
    x: Shard, part: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, what: str,
    seen: Seen | None = None,
) -> Tensor:  # fmt: skip
    """The norm of each of ``groups`` groups of channels of each sample.

    ``seen`` is called with the means, variances and counts.
    """
    shape, n, channels = x.shape, part.shape[0], part.shape[1]
    over = Over(x.space.link, what, shape.numel() // max(n * groups, 1), channels // groups)
    w, b = _parameter(x, what, weight), _parameter(x, what, bias)
    by_sample = (None if parameter is None else parameter.repeat(n) for parameter in (w, b))
    flat = part.reshape(1, n * channels, *part.shape[2:])
    y: Tensor = Normalize.apply(over, eps, seen, flat, *by_sample)  # type: ignore[no-untyped-call]
    return y.view(part.shape)


@handles(F.group_norm, torch.group_norm)
def _group_norm(
    input: Any,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Shard:
    what = current_layer("group_norm")
    x = image(input, what)
    if num_groups < 1 or x.shape[1] % num_groups:
        raise ValueError(f"{what}: num_groups={num_groups}: a divisor of its {x.shape[1]} channels would do")
    return x.like(_by_sample(x, _in_autocast(x.local), num_groups, weight, bias, eps, what))


@handles(F.instance_norm)
def _instance_norm(
    input: Any,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Shard:
    what = current_layer("instance_norm")
    x = image(input, what)
    if not use_input_stats:
        w, b = _parameter(x, what, weight), _parameter(x, what, bias)
        return x.like(F.batch_norm(x.local, running_mean, running_var, w, b, False, momentum, eps))
    shape = x.shape
    count = math.prod(shape[2:])
    check_count(x, count, what)
    track = Tracking(running_mean, running_var, momentum)

    def seen(mean: Tensor, var: Tensor, count: Tensor | int) -> None:
        track(mean.view(shape[:2]).mean(0), var.view(shape[:2]).mean(0), count)

    return x.like(_by_sample(x, x.local, shape[1], weight, bias, eps, what, seen))


def _normalized(x: Shard, normalized_shape: Any, what: str) -> int:
    """How many of the last dimensions are normalized. Raises ``ValueError`` where their sizes are not these."""
    sizes = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not sizes or tuple(x.shape[-len(sizes) :]) != sizes:
        raise ValueError(f"{what}: normalized_shape={sizes} does not fit an image of {tuple(x.shape)}")
    return len(sizes)


def _place(x: Shard, last: int) -> Place | None:
    """Where this rank's rows of statistics are among all; ``None`` where no dimension before the ``last`` is cut."""
    rows = x.dim() - last
    cut = [dim + x.dim() for dim in x.spatial.grid.dims if dim < -last]
    where = [slice(None)] * rows
    for dim, (start, stop) in zip(x.spatial.grid.dims, x.spatial.own, strict=True):
        if dim + x.dim() in cut:
            where[dim + x.dim()] = slice(start, stop)
    return (tuple(x.shape[:rows]), tuple(where)) if cut else None


def _affine(x: Shard, y: Tensor, weight: Tensor | None, bias: Tensor | None, what: str) -> Tensor:
    """``y`` with the weight and bias of each element applied."""
    if weight is not None:
        y = y * operand(x, weight, what)
    return y if bias is None else y + operand(x, bias, what)


@handles(F.layer_norm, torch.layer_norm)
def _layer_norm(
    input: Any,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Shard:
    """Layer norm. Nothing is exchanged where no normalized dimension is cut, as with channels last."""
    what = current_layer("layer_norm")
    x = sharded(input, what)
    last = _normalized(x, normalized_shape, what)
    if max(x.spatial.grid.dims) < -last:
        w, b = _parameter(x, what, weight), _parameter(x, what, bias)
        return x.like(F.layer_norm(x.local, list(x.shape[-last:]), w, b, eps))
    part = _in_autocast(x.local)
    over = Over(x.space.link, what, math.prod(x.shape[-last:]), place=_place(x, last))
    flat = part.reshape(1, math.prod(part.shape[:-last]), math.prod(part.shape[-last:]))
    y = Normalize.apply(over, eps, None, flat, None, None)  # type: ignore[no-untyped-call]
    return x.like(_affine(x, y.view(part.shape), weight, bias, what))


@handles(F.rms_norm, torch.rms_norm)
def _rms_norm(
    input: Any, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Shard:
    what = current_layer("rms_norm")
    x = sharded(input, what)
    last = _normalized(x, normalized_shape, what)
    if max(x.spatial.grid.dims) < -last:
        return x.like(F.rms_norm(x.local, list(x.shape[-last:]), _parameter(x, what, weight), eps))
    part = x.local
    wide = part if part.dtype == torch.float64 else part.float()
    squares = wide.square().sum(list(range(-last, 0)), keepdim=True)
    place = _place(x, last)
    if place is None:
        squares = x.space.replicated(what, sum_over_ranks(x.space.link, what, squares))
    else:
        shape, where = place
        all_rows = squares.new_zeros((*shape, *(1,) * last))
        all_rows[where] = squares
        squares = x.space.replicated(what, sum_over_ranks(x.space.link, what, all_rows))[where]
    least = torch.finfo(part.dtype).eps if eps is None else eps
    y = (wide * (squares / math.prod(x.shape[-last:]) + least).rsqrt()).to(part.dtype)
    return x.like(_affine(x, y, weight, None, what))


@handles(F.local_response_norm)
def _local_response_norm(input: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Shard:
    """Local response norm, which reads neighbouring channels: these are never cut."""
    x = image(input, current_layer("local_response_norm"))
    return x.like(F.local_response_norm(x.local, size, alpha, beta, k))


@handles(F.normalize)
def _normalize(input: Shard, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Shard:
    """Divide vectors along a dimension that is not cut by their norm."""
    what = current_layer("normalize")
    if out is not None:
        raise ValueError(f"out= of {what}: an image cut across ranks has no place for it")
    return input.like(F.normalize(input.local, p, free(input, dim, what), eps))
