"""Losses of cut images, which are not gathered: each rank computes the term of its part, and the terms are summed.

Means are over the whole image, however unequal the parts: terms and divisors are summed in one message.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import _reduction

from tilewise.distributed.parts.exchange import view
from tilewise.distributed.parts.names import current_layer
from tilewise.distributed.parts.replicated import sum_over_ranks
from tilewise.distributed.shards.shard import Shard, aligned, handles, operand, space_of

Tensor = torch.Tensor
ELEMENTWISE = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "poisson_nll_loss soft_margin_loss"
)
DIVIDED_BY_WEIGHTS = ("mse_loss", "l1_loss")
"""Losses whose mean is divided by the sum of their weights."""


def _part(like: Shard, value: Tensor, what: str) -> Tensor:
    """The part of ``value`` at the place of this rank's part of ``like``.

    ``value`` is a shard, or a whole tensor of the sizes of ``like``.
    """
    if isinstance(value, Shard):
        return aligned(like, value, what)
    return view(like.space.replicated(what, value), like.spatial.grid.dims, like.spatial.own)


def _mode(reduction: str, size_average: bool | None, reduce: bool | None, allowed: tuple[str, ...], what: str) -> str:
    """The reduction that torch's arguments ask for. Raises ``ValueError`` where it is not one of ``allowed``."""
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    if reduction not in allowed:
        raise ValueError(f"{what}: reduction={reduction!r}: one of {', '.join(allowed)} would do")
    return reduction


def _reduced(
    like: Shard, what: str, mode: str, loss: Callable[[str], Tensor], divisor: Callable[[], Tensor] | float
) -> Tensor:
    """The sum or the mean of all parts' losses, or with ``mode`` "none" the losses of single elements.

    ``loss`` computes a part's loss for a reduction. A mean is the sum divided by ``divisor``; where that is a function,
    it returns the part's share of the divisor. Sums over parts are in float64. In 16-bit types a part's sum is taken in
    float64, too, as its own type might not hold it.
    """
    if mode == "none":
        return like.like(loss("none"))
    is_16_bit = like.dtype in (torch.float16, torch.bfloat16)
    term = loss("none" if is_16_bit else "sum")
    dtype, total = term.dtype, term.sum(dtype=torch.float64)
    if mode == "sum":
        return sum_over_ranks(like.space.link, what, total).to(dtype)
    if callable(divisor):
        sums = sum_over_ranks(like.space.link, what, torch.stack([total, divisor().to(total)]))
        return (sums[0] / sums[1]).to(dtype)
    return (sum_over_ranks(like.space.link, what, total) / divisor).to(dtype)


def _weight_of_l1_loss() -> Tensor | None:
    """The weight that ``F.l1_loss`` was called with: torch 2.13 does not pass it to the functions that stand for it."""
    frame = sys._getframe(1)
    while frame.f_code is not F.l1_loss.__code__:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return frame.f_locals.get("weight")


def _elementwise(name: str) -> None:
    """Register a counterpart of the loss of single elements called ``name``."""
    function = getattr(F, name)
    allowed = ("none", "mean", "sum", *(("batchmean",) if name == "kl_div" else ()))

    @handles(function)
    def compute(
        input: Tensor,
        target: Tensor,
        *,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        **options: Any,
    ) -> Tensor:
        what = current_layer(name)
        if name == "l1_loss" and (l1_weight := _weight_of_l1_loss()) is not None:
            options["weight"] = l1_weight
        mode = _mode(reduction, size_average, reduce, allowed, what)
        like = space_of(input, target, *options.values())
        if input.shape != target.shape or input.shape != like.shape:
            raise ValueError(f"{what}: target of {tuple(target.shape)}: {tuple(input.shape)}, the input's, would do")
        x, y = _part(like, input, what), _part(like, target, what)
        for option, value in options.items():
            if isinstance(value, Tensor):
                options[option] = _part(like, value, what) if value.shape == like.shape else operand(like, value, what)
        weight = options.get("weight")
        divisor: Callable[[], Tensor] | float = like.shape[0] if mode == "batchmean" else like.numel()
        if weight is not None and name in DIVIDED_BY_WEIGHTS:
            divisor = lambda: weight.sum(dtype=torch.float64)  # noqa: E731
        return _reduced(like, what, mode, lambda reduction: function(x, y, reduction=reduction, **options), divisor)


for _name in ELEMENTWISE.split():
    _elementwise(_name)


def _of_classes(function: Callable[..., Tensor], name: str) -> None:
    """Register a counterpart of ``function``, a loss of classes called ``name``."""

    @handles(function)
    def compute(
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        **options: Any,
    ) -> Tensor:
        """The loss of logits or log-probabilities (N, C, ...) for classes (N, ...) or probabilities (N, C, ...).

        The image may be cut along dimensions after the classes.
        """
        what = current_layer(name)
        mode = _mode(reduction, size_average, reduce, ("none", "mean", "sum"), what)
        like = space_of(input, target)
        shape = tuple(input.shape)
        if input.dim() < 3 or len(shape) + min(like.spatial.grid.dims) < 2:
            raise ValueError(f"{what}: an image (N, classes, ...) of {shape} that is cut behind the classes would do")
        classes = (shape[0], *shape[2:])
        probabilities = name == "cross_entropy" and tuple(target.shape) == shape
        if not probabilities and tuple(target.shape) != classes:
            raise ValueError(f"{what}: target of {tuple(target.shape)}: {classes}, for an input of {shape}, would do")
        x, y = _part(like, input, what), _part(like, target, what)
        weight = None if weight is None else like.space.replicated(what, weight)

        def loss(reduction: str) -> Tensor:
            return function(x, y, weight, ignore_index=ignore_index, reduction=reduction, **options)

        def divisor() -> Tensor:
            counted = y != ignore_index
            if weight is None:
                return counted.sum()
            return torch.where(counted, weight.detach()[y.where(counted, 0)], 0).sum(dtype=torch.float64)

        return _reduced(like, what, mode, loss, float(torch.Size(classes).numel()) if probabilities else divisor)


_of_classes(F.cross_entropy, "cross_entropy")
_of_classes(F.nll_loss, "nll_loss")
