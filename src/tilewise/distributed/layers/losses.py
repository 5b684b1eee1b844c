"""Losses of images that no rank ever gathers: each rank finds its part's term, and the terms are added up.

Means are over the whole image, however unequal the parts: terms and what they are divided by travel in one message.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import _reduction

from tilewise.distributed.exchange import view
from tilewise.distributed.names import current_layer
from tilewise.distributed.replicated import sum_over_ranks
from tilewise.distributed.shard import Shard, aligned, handles, operand, space_of

Tensor = torch.Tensor
ELEMENTWISE = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "poisson_nll_loss soft_margin_loss"
)
DIVIDED_BY_WEIGHTS = ("mse_loss", "l1_loss")


def _part(like: Shard, value: Tensor, what: str) -> Tensor:
    """The part of ``value``, a shard or a tensor as large as the whole of ``like``, that lies where ``like``'s does."""
    if isinstance(value, Shard):
        return aligned(like, value, what)
    return view(like.space.replicated(what, value), like.spatial.grid.dims, like.spatial.own)


def _mode(reduction: str, size_average: bool | None, reduce: bool | None, allowed: tuple[str, ...], what: str) -> str:
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    if reduction not in allowed:
        raise ValueError(f"{what}: reduction={reduction!r}: one of {', '.join(allowed)} would do")
    return reduction


def _reduced(
    like: Shard, what: str, mode: str, loss: Callable[[str], Tensor], divisor: Callable[[], Tensor] | float
) -> Tensor:
    """The sum of all parts' ``loss``, or their mean: divided by ``divisor``, a part's share of it where it is a call.

    Sums are in float64, like the loss itself where a sum in its own type would not fit that: in 16 bits.
    """
    if mode == "none":
        return like.like(loss("none"))
    short = like.dtype in (torch.float16, torch.bfloat16)
    term = loss("none" if short else "sum")
    dtype, total = term.dtype, term.sum(dtype=torch.float64)
    if mode == "sum":
        return sum_over_ranks(like.space.link, what, total).to(dtype)
    if callable(divisor):
        both = sum_over_ranks(like.space.link, what, torch.stack([total, divisor().to(total)]))
        return (both[0] / both[1]).to(dtype)
    return (sum_over_ranks(like.space.link, what, total) / divisor).to(dtype)


def _forgotten_weight() -> Tensor | None:
    """The weight that was given to ``F.l1_loss``, which torch 2.13's does not pass on to what computes it."""
    frame = sys._getframe(1)
    while frame.f_code is not F.l1_loss.__code__:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return frame.f_locals.get("weight")


def _elementwise(name: str) -> None:
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
        if name == "l1_loss" and (forgotten := _forgotten_weight()) is not None:
            options["weight"] = forgotten
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
        return _reduced(like, what, mode, lambda how: function(x, y, reduction=how, **options), divisor)


for _name in ELEMENTWISE.split():
    _elementwise(_name)


def _of_classes(function: Callable[..., Tensor], name: str) -> None:
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
        """Of logits or log-probabilities (N, C, ...) cut behind the classes, and classes (N, ...) or probabilities."""
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

        def loss(how: str) -> Tensor:
            return function(x, y, weight, ignore_index=ignore_index, reduction=how, **options)

        def divisor() -> Tensor:
            counted = y != ignore_index
            if weight is None:
                return counted.sum()
            return torch.where(counted, weight.detach()[y.where(counted, 0)], 0).sum(dtype=torch.float64)

        return _reduced(like, what, mode, loss, float(torch.Size(classes).numel()) if probabilities else divisor)


_of_classes(F.cross_entropy, "cross_entropy")
_of_classes(F.nll_loss, "nll_loss")
