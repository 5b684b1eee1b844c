"""``nn.SyncBatchNorm``, whose statistics are over the ranks of a process group and count each element once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tilewise.distributed.layers.normalization import check_count, image
from tilewise.distributed.norms.normalization import Normalize, Over
from tilewise.distributed.norms.sums import Tracking
from tilewise.distributed.parts.names import current_layer
from tilewise.distributed.shards.shard import Shard, Space, space_around
from tilewise.distributed.shards.synchronized import link_over


def _forward(layer: nn.SyncBatchNorm, x: torch.Tensor, space: Space) -> torch.Tensor:
    """The layer's forward in training.

    ``x`` is a shard, or a tensor that each of the image's ranks has whole, which counts once. The ranks' batches may
    differ in size, since counts are summed with the other statistics.
    """
    what = current_layer("sync_batch_norm")
    layer._check_input_dim(x)
    part = image(x, what).local if isinstance(x, Shard) else x
    with space.link.telling(what):
        link = link_over(space, what, layer.process_group, part.device)
    tracked, momentum = layer.track_running_stats, layer.momentum or 0.0
    if tracked:
        assert layer.num_batches_tracked is not None
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            momentum = 1.0 / layer.num_batches_tracked.item()
    running = (layer.running_mean, layer.running_var) if tracked else (None, None)
    if link is space.link and not isinstance(x, Shard):
        return F.batch_norm(x, *running, layer.weight, layer.bias, True, momentum, layer.eps)
    if link is space.link:
        check_count(x, x.numel() // max(x.shape[1], 1), what)
    if isinstance(x, Shard):
        over = Over(link, what, None, home=space.link, kernels=space.norms)
        weights = [
            None if parameter is None else space.replicated(what, parameter) for parameter in (layer.weight, layer.bias)
        ]
    else:
        over = Over(link, what, None, home=space.link, copies=space.link.size)
        weights = [layer.weight, layer.bias]
    y = Normalize.apply(over, layer.eps, Tracking(*running, momentum), part, *weights)  # type: ignore[no-untyped-call]
    return x.like(y) if isinstance(x, Shard) else y


def _extended(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The forward ``plain`` of the layer, extended to modules of a split model in training.

    The method itself is replaced, as the layer calls no function of torch that could be handled.
    """

    @functools.wraps(plain)
    def forward(self: nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
        space = space_around(self, input) if self.training else None
        if space is None:
            result: torch.Tensor = plain(self, input)
            return result
        return _forward(self, input, space)

    return forward


nn.SyncBatchNorm.forward = _extended(nn.SyncBatchNorm.forward)  # type: ignore[method-assign]
