"""Gradients of gradients: where a backward is not itself differentiable, the same by pieces that are.

With ``create_graph=True`` a layer's forward is computed again by functions of torch and exchanges, each of which can be
differentiated any number of times, and its gradients are taken through those. All ranks make the same graph, whatever
their parts, so that they meet in each exchange of its backward too.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewise.axis import Axis
from tilewise.distributed.convolution import Convolution, Work
from tilewise.distributed.exchange import fetch
from tilewise.distributed.layout import Layout
from tilewise.distributed.partials import partials
from tilewise.distributed.passes import TorchPasses
from tilewise.distributed.replicated import Parameters
from tilewise.distributed.shard import Space
from tilewise.distributed.share import Share, Term, share_of
from tilewise.distributed.terms import forward_of

__all__ = ["DoubleConvolution", "DoubleWork"]


class DoubleWork(Work):
    """Of one call of a convolution over ``axes``, which are those of the whole one; see :func:`share_of`."""

    __slots__ = ("axes",)

    def __init__(
        self, space: Space, what: str, layout: Layout, share: Share, groups: int, parameters: Parameters | None,
        axes: tuple[Axis, ...],
    ) -> None:  # fmt: skip
        super().__init__(space, what, layout, share, groups, parameters)
        self.axes = axes


class DoubleConvolution(Convolution):
    """A convolution whose gradients have gradients: ``DoubleConvolution.apply(work, x, w, b)``."""

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            found: tuple[Any, ...] = Convolution.backward(ctx, dy)
            return found
        work: DoubleWork = ctx.work
        x, w = ctx.saved_tensors[:2]
        _, want_x, want_w, want_b = ctx.needs_input_grad
        with work.link.telling(f"the backward of {work.what}"):
            dx, dw = partials(lambda x, w: _by_pieces(work, x, w), (x, w), (want_x, want_w), dy)
        return None, dx, dw, dy.sum((0, *range(2, dy.dim()))) if want_b else None


def _by_pieces(work: DoubleWork, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """This rank's part, without the bias: all boxes put together and convolved whole."""
    share = share_of(work.layout, work.axes, work.share.transposed, "assembled")
    source = fetch(work.link, work.what, work.layout, share.transfer, x)
    if share.assembled is None:
        return _none(work, share, source, w)
    whole = tuple((0, size) for size in share.sizes)
    term = Term(whole, tuple((0, taps) for taps in w.shape[2:]), share.assembled)
    return forward_of(TorchPasses(), share, term, work.groups, source, w)


def _none(work: DoubleWork, share: Share, source: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Results where nothing meets anything: in the graph of other ranks, by a convolution of no images."""
    ones, zeros, dilation = [1] * len(work.axes), [0] * len(work.axes), [axis.dilation for axis in work.axes]
    image = source.flatten()[:0].view(0, source.shape[1], *(ones if share.transposed else [a.reach for a in work.axes]))
    of_none = torch.convolution(image, w, None, ones, zeros, dilation, share.transposed, zeros, work.groups)
    return source.new_zeros((source.shape[0], of_none.shape[1], *share.sizes)) + of_none.sum()
