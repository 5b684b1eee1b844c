"""Normalization by statistics of a whole image of which each rank holds a part.

Forward and backward take one sum over the ranks each.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tilewise.comm.link import Link
from tilewise.distributed.norms.parts import dense, order_of
from tilewise.distributed.norms.sums import NormSums, Tracking
from tilewise.distributed.parts.partials import partials
from tilewise.distributed.parts.replicated import sum_gradient, sum_over_ranks
from tilewise.problems.base import DTYPE_NAMES

__all__ = ["Normalize", "Over", "Seen"]

Seen = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | int], None]
"""A function that is called with means, variances, and the number of elements of each."""
Place = tuple[tuple[int, ...], tuple[slice, ...]]
"""The shape of all ranks' rows of statistics, and where in it this rank's rows are."""


@dataclass(frozen=True, slots=True)
class Over:
    """The ranks and elements over which statistics are taken.

    ``count`` is the number of elements of the whole image for one mean, or ``None`` where counts are summed over the
    ranks as well. ``merge`` consecutive channels share a mean. Where ranks have means of different rows, ``place`` says
    which ones this rank has. Where ``link`` has more ranks than share an image, ``home`` has those that share it.
    ``copies`` is the number of ranks that hold the same elements, which count once. ``kernels`` compute sums by channel
    where they can, and torch's operators otherwise.
    """

    link: Link
    what: str
    count: int | None
    merge: int = 1
    place: Place | None = None
    home: Link | None = None
    copies: int = 1
    kernels: NormSums | None = None

    def by_kernels(self, x: torch.Tensor) -> NormSums | None:
        """The kernels that compute the sums of ``x``, ``None`` for torch's operators; the same on all ranks."""
        if self.merge > 1 or self.place is not None or self.copies > 1:
            return None
        if self.link.noted is not None:
            self.link.noted.norms.append((list(x.shape), DTYPE_NAMES.get(x.dtype, "fp64"), not x.is_contiguous()))
        return self.kernels if self.kernels is not None and self.kernels.takes(self.link, x) else None

    def telling(self, what: str) -> contextlib.AbstractContextManager[object]:
        """A context manager that tells all ranks of an error raised in its block; see :meth:`Link.telling`."""
        if self.home is None or self.home is self.link:
            return self.link.telling(what)
        stack = contextlib.ExitStack()
        stack.enter_context(self.home.telling(what))
        stack.enter_context(self.link.telling(what))
        return stack


def _total(over: Over, add: Callable[[torch.Tensor], torch.Tensor], terms: torch.Tensor) -> torch.Tensor:
    """The sums of the ranks' ``terms`` (terms, rows), in one message.

    ``add`` sums a tensor over the ranks. ``terms`` may be overwritten.
    """
    if over.copies > 1:
        terms = terms / over.copies
    if over.place is None:
        return add(terms)
    shape, where = over.place
    all_rows = terms.new_zeros((len(terms), *shape))
    here = (slice(None), *where)
    all_rows[here] = terms.view(all_rows[here].shape)
    return add(all_rows)[here].reshape(terms.shape)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which statistics of elements of ``dtype`` are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _sums(x: torch.Tensor) -> torch.Tensor:
    """The sums of the elements and of their squares, by channel: (2, channels) in float64.

    They are computed from means and variances, which lose no digits, and float64 has enough digits for means of 1e5
    standard deviations.
    """
    if x.numel() == 0:
        return x.new_zeros((2, x.shape[1]), dtype=torch.float64)
    if x.is_cuda:
        mean, inverse = torch.batch_norm_stats(x, 0.0)
        var = torch.where(inverse > 0, inverse.double().pow(-2), 0.0)
    else:
        var, mean = torch.var_mean(x.to(_wide(x.dtype)), [0, *range(2, x.dim())], correction=0)
        var = var.double()
    mean = mean.double()
    return torch.stack([mean, var + mean * mean]).mul_(x.numel() // x.shape[1])


class Normalize(torch.autograd.Function):
    """Subtracts the mean from elements (batch, channels, ...) and divides them by the standard deviation.

    Each channel then has its weight and bias applied. ``seen`` is called with the means, variances and counts of the
    rows of channels that share them. It is called within forward, since a checkpoint that computes this again may stop
    right after. Backward is the exact adjoint for the whole image. Gradients of weight and bias are this rank's shares.
    """

    @staticmethod
    def forward(
        ctx: Any,
        over: Over,
        eps: float,
        seen: Seen | None,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        kernels = over.by_kernels(x)
        with over.telling(over.what):
            w, b = (None if parameter is None else parameter.to(_wide(x.dtype)) for parameter in (weight, bias))
            counted: torch.Tensor | None
            if kernels is None:
                rows, counted = _rows(over, x, seen)
                y = F.batch_norm(x, rows[0], rows[1], w, b, False, 0.0, eps) if x.numel() else x.clone()
            else:
                assert seen is None or isinstance(seen, Tracking)
                part = dense(x)
                rows, counted = kernels.forward(over.what, part, over.count, eps, seen)
                y = kernels.parts.elements(part, rows, w, b)
        ctx.over, ctx.eps, ctx.kernels = over, eps, kernels
        ctx.dtypes = [None if parameter is None else parameter.dtype for parameter in (weight, bias)]
        ctx.save_for_backward(x, weight, rows, counted)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        over: Over = ctx.over
        what = f"the backward of {over.what}"
        x, weight, rows, counted = ctx.saved_tensors
        if torch.is_grad_enabled():
            with over.telling(what):
                return _differentiable(ctx, what, dy)
        w = None if weight is None else weight.to(rows.dtype)
        if ctx.kernels is not None:
            x = dense(x)
        # Kernels on GPUs need the gradient in the layout of the elements.
        dy, want = dy.contiguous(memory_format=order_of(x)), ctx.needs_input_grad[3]
        with over.telling(what):
            if ctx.kernels is None:
                shares, dx = _gradients(over, what, x, dy, w, rows, counted, ctx.eps, want)
            else:
                shares, means = ctx.kernels.backward(what, x, dy, rows, counted, over.count, want)
                dx = ctx.kernels.parts.gradient(dy, x, rows, means, w) if want else None
        db, dw = (
            None if dtype is None else share.to(dtype)
            for share, dtype in zip(shares, reversed(ctx.dtypes), strict=True)
        )
        return None, None, None, dx, dw, db


def _rows(over: Over, x: torch.Tensor, seen: Seen | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Means and variances by channel, (2, channels), and counts (1, channels) where they are summed over the ranks."""
    sums = _sums(x).view(2, -1, over.merge).sum(2)
    add = functools.partial(over.link.sum, over.what)
    count: torch.Tensor | int
    counted = None
    if over.count is None:
        local_count = sums.new_full((1, sums.shape[1]), x.numel() // x.shape[1])
        totals = _total(over, add, torch.cat([sums, local_count]))
        means, count, counted = totals[:2] / totals[2], totals[2], totals[2:]
    else:
        means, count = _total(over, add, sums) / over.count, over.count
    mean = means[0]
    var = (means[1] - mean * mean).clamp_min_(0)
    if seen is not None:
        seen(mean, var, count)
    return torch.stack([mean, var]).repeat_interleave(over.merge, 1).to(_wide(x.dtype)), counted


def _gradients(
    over: Over, what: str, x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor | None, rows: torch.Tensor,
    counted: torch.Tensor | None, eps: float, want_x: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """This part's shares of the gradients of bias and weight, (2, channels), and the gradient of ``x``."""
    rstd = (rows[1] + eps).rsqrt()
    shares = _gradient_sums(dy, x, rows, rstd, eps)
    if not want_x:
        return shares, None
    weighted = shares * w if over.merge > 1 and w is not None else shares.clone()
    terms = weighted.view(2, -1, over.merge).sum(2) if over.merge > 1 else weighted
    means = _total(over, functools.partial(over.link.sum, what), terms)
    count: Any = over.count if counted is None else counted[0]
    means = (means / count).to(terms.dtype)
    means = means.repeat_interleave(over.merge, 1)
    return shares, _gradient(dy, x, w, rows[0], rstd, means, over.merge)


def _differentiable(ctx: Any, what: str, dy: torch.Tensor) -> tuple[Any, ...]:
    """The results of backward, with a graph of their own.

    :mod:`tilewise.distributed.layers._double_backward` explains why.
    """
    over: Over = ctx.over
    x, weight, rows, counted = ctx.saved_tensors
    count: Any = over.count if over.count is not None else counted[-1]
    dims = [0, *range(2, x.dim())]
    shape = (1, -1, *(1,) * (x.dim() - 2))

    def mean(values: torch.Tensor) -> torch.Tensor:
        terms = values.sum(dims).view(1, -1, over.merge).sum(2)
        totals = _total(over, functools.partial(_differentiable_sum, over, what), terms)[0]
        by_channel: torch.Tensor = (totals / count).to(values.dtype).repeat_interleave(over.merge)
        return by_channel.view(shape)

    def normalized(x: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
        wide = x.to(rows.dtype)
        centred = wide - mean(wide)
        y: torch.Tensor = centred * (mean(centred * centred) + ctx.eps).rsqrt()
        return (y * weight[0].to(y.dtype).view(shape) if weight else y).to(x.dtype)

    want_x, want_w, want_b = ctx.needs_input_grad[3:]
    given = (x,) if weight is None else (x, weight)
    dx, *dw = partials(normalized, given, (want_x, want_w)[: len(given)], dy)
    db = dy.to(rows.dtype).sum(dims).to(ctx.dtypes[1]) if want_b else None
    return None, None, None, dx, dw[0] if dw else None, db


def _differentiable_sum(over: Over, what: str, terms: torch.Tensor) -> torch.Tensor:
    """The sums of the ranks' terms; their gradients are summed over the ranks too, as each uses them for a part."""
    return sum_gradient(over.link, what, sum_over_ranks(over.link, what, terms))


def _gradient_sums(
    dy: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, rstd: torch.Tensor, eps: float
) -> torch.Tensor:
    """This part's sums of ``dy`` and of ``dy`` times the normalized elements, by channel: (2, channels)."""
    if x.numel() == 0:
        return torch.zeros_like(rows)
    if x.is_cuda:
        sums = torch.batch_norm_backward_reduce(dy, x, rows[0], rstd, None, True, False, False)
        return torch.stack([sums[0], sums[1] * rstd])
    _, scaled, plain = torch.ops.aten.native_batch_norm_backward(
        dy, x, torch.ones_like(rstd), rows[0], rows[1], None, None, False, eps, [False, True, True]
    )
    return torch.stack([plain, scaled])


def _gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    means: torch.Tensor,
    merge: int,
) -> torch.Tensor:
    """The gradient of ``x``: ``rstd * (w*dy - mean(w*dy) - xhat * mean(w*dy*xhat))``.

    ``xhat`` stands for the normalized elements. ``means`` has the two means, without the factor ``w`` where ``merge``
    is 1.
    """
    if x.numel() == 0:
        return torch.zeros_like(x)
    if x.is_cuda and merge == 1:
        count = torch.ones(1, dtype=torch.int32, device=x.device)  # means are divided by their count already
        return torch.batch_norm_backward_elemt(dy, x, mean, rstd, w, means[0], means[1] / rstd, count)
    if merge == 1 and w is not None:
        means = means * w
    shape = (1, -1, *(1,) * (x.dim() - 2))
    scale = (rstd if w is None else rstd * w).view(shape)
    # The mean is subtracted first, so that no digits are lost where it is far from zero.
    dx = (x.to(mean.dtype) - mean.view(shape)).mul_((-rstd * rstd * means[1]).view(shape))
    return dx.sub_((rstd * means[0]).view(shape)).addcmul_(dy.to(mean.dtype), scale).to(x.dtype)
