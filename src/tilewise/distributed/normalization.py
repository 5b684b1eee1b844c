"""Normalization by statistics of a whole image of which each rank holds a part: one sum over ranks each way."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tilewise.comm.link import Link
from tilewise.distributed.norm_parts import dense, order_of
from tilewise.distributed.norm_sums import NormSums, Tracking
from tilewise.distributed.partials import partials
from tilewise.distributed.replicated import sum_gradient, sum_over_ranks
from tilewise.problem import DTYPE_NAMES

__all__ = ["Normalize", "Over", "Seen"]

Seen = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | int], None]
Place = tuple[tuple[int, ...], tuple[slice, ...]]


@dataclass(frozen=True, slots=True)
class Over:
    """What statistics are taken over.

    ``count`` is how many elements of the whole image one mean is of, ``None`` where that is to be summed over the ranks
    as well; ``merge`` how many channels in a row share it. Where ranks hold the means of different rows, ``place`` has
    the shape of all rows and where this rank's are. Where ``link`` has more ranks than share an image, ``home`` has
    those that do; ``copies`` is how many ranks have the same elements, which count once. ``kernels`` compute sums by
    channel where they can, torch's operators otherwise.
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
        """What computes the sums of parts such as ``x``; the same on all ranks."""
        if self.merge > 1 or self.place is not None or self.copies > 1:
            return None
        if self.link.noted is not None:
            self.link.noted.norms.append((list(x.shape), DTYPE_NAMES.get(x.dtype, "fp64"), not x.is_contiguous()))
        return self.kernels if self.kernels is not None and self.kernels.takes(self.link, x) else None

    def telling(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Have all ranks hear of an error, whichever of them they wait for; see :meth:`Link.telling`."""
        if self.home is None or self.home is self.link:
            return self.link.telling(what)
        stack = contextlib.ExitStack()
        stack.enter_context(self.home.telling(what))
        stack.enter_context(self.link.telling(what))
        return stack


def _total(over: Over, add: Callable[[torch.Tensor], torch.Tensor], terms: torch.Tensor) -> torch.Tensor:
    """The sums of the ranks' ``terms`` (terms, rows), in one message, by ``add``; ``terms`` may be overwritten."""
    if over.copies > 1:
        terms = terms / over.copies
    if over.place is None:
        return add(terms)
    shape, where = over.place
    every = terms.new_zeros((len(terms), *shape))
    mine = (slice(None), *where)
    every[mine] = terms.view(every[mine].shape)
    return add(every)[mine].reshape(terms.shape)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _sums(x: torch.Tensor) -> torch.Tensor:
    """Sums of the elements and of their squares, by channel: (2, channels) in float64.

    They are made of means and variances, which lose no digits, and float64 has enough for means of 1e5 deviations.
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
    """Elements less their mean, over their deviation, with a weight and a bias a channel: (batch, channels, ...).

    ``seen`` is told means and variances, of each row of channels that share them, and what ``over`` counts; within
    forward, as a checkpoint that computes it again may go no further. Backward is the exact adjoint for the whole
    image; gradients of weight and bias are this rank's shares.
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
            w, b = (None if t is None else t.to(_wide(x.dtype)) for t in (weight, bias))
            counted: torch.Tensor | None
            if kernels is None:
                rows, counted = _rows(over, x, eps, seen)
                y = F.batch_norm(x, rows[0], rows[1], w, b, False, 0.0, eps) if x.numel() else x.clone()
            else:
                assert seen is None or isinstance(seen, Tracking)
                part = dense(x)
                rows, counted = kernels.forward(over.what, part, over.count, eps, seen)
                y = kernels.parts.elements(part, rows, w, b)
        ctx.over, ctx.eps, ctx.kernels = over, eps, kernels
        ctx.dtypes = [None if t is None else t.dtype for t in (weight, bias)]
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
        # As kernels on GPUs want it.
        dy, want = dy.contiguous(memory_format=order_of(x)), ctx.needs_input_grad[3]
        with over.telling(what):
            if ctx.kernels is None:
                shares, dx = _gradients(over, what, x, dy, w, rows, counted, ctx.eps, want)
            else:
                shares, means = ctx.kernels.backward(what, x, dy, rows, counted, over.count, want)
                dx = ctx.kernels.parts.gradient(dy, x, rows, means, w) if want else None
        db, dw = (None if t is None else s.to(t) for s, t in zip(shares, reversed(ctx.dtypes), strict=True))
        return None, None, None, dx, dw, db


def _rows(over: Over, x: torch.Tensor, eps: float, seen: Seen | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Means and variances by channel, (2, channels), and where they were summed up counts, (1, channels)."""
    sums = _sums(x).view(2, -1, over.merge).sum(2)
    add = functools.partial(over.link.sum, over.what)
    count: torch.Tensor | int
    counted = None
    if over.count is None:
        own = sums.new_full((1, sums.shape[1]), x.numel() // x.shape[1])
        found = _total(over, add, torch.cat([sums, own]))
        means, count, counted = found[:2] / found[2], found[2], found[2:]
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
    """What backward gives, in a graph: see :mod:`tilewise.distributed.double_backward`."""
    over: Over = ctx.over
    x, weight, rows, counted = ctx.saved_tensors
    count: Any = over.count if over.count is not None else counted[-1]
    dims = [0, *range(2, x.dim())]
    shape = (1, -1, *(1,) * (x.dim() - 2))

    def mean(t: torch.Tensor) -> torch.Tensor:
        terms = t.sum(dims).view(1, -1, over.merge).sum(2)
        every = _total(over, functools.partial(_everyones, over, what), terms)[0]
        by_channel: torch.Tensor = (every / count).to(t.dtype).repeat_interleave(over.merge)
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


def _everyones(over: Over, what: str, terms: torch.Tensor) -> torch.Tensor:
    """The sums of the ranks' terms, as they meet parts again."""
    return sum_gradient(over.link, what, sum_over_ranks(over.link, what, terms))


def _gradient_sums(
    dy: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, rstd: torch.Tensor, eps: float
) -> torch.Tensor:
    """This part's sums of ``dy`` and of ``dy`` times the normalized elements, by channel: (2, channels)."""
    if x.numel() == 0:
        return torch.zeros_like(rows)
    if x.is_cuda:
        found = torch.batch_norm_backward_reduce(dy, x, rows[0], rstd, None, True, False, False)
        return torch.stack([found[0], found[1] * rstd])
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
    """``rstd * (w*dy - mean(w*dy) - xhat * mean(w*dy*xhat))``; ``means`` are without ``w`` where rows are channels."""
    if x.numel() == 0:
        return torch.zeros_like(x)
    if x.is_cuda and merge == 1:
        one = torch.ones(1, dtype=torch.int32, device=x.device)
        return torch.batch_norm_backward_elemt(dy, x, mean, rstd, w, means[0], means[1] / rstd, one)
    if merge == 1 and w is not None:
        means = means * w
    shape = (1, -1, *(1,) * (x.dim() - 2))
    scale = (rstd if w is None else rstd * w).view(shape)
    # In this order means far from zero cost no digits.
    dx = (x.to(mean.dtype) - mean.view(shape)).mul_((-rstd * rstd * means[1]).view(shape))
    return dx.sub_((rstd * means[0]).view(shape)).addcmul_(dy.to(mean.dtype), scale).to(x.dtype)
