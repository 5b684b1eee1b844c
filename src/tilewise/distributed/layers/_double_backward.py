"""Gradients of gradients, for a convolution whose fast backward cannot be differentiated.

With ``create_graph=True`` the layer's forward is computed again by functions of torch and exchanges, each of which can
be differentiated any number of times, and the gradients are taken through those. All ranks make the same graph,
whatever their parts, so that all take part in each exchange of its backward too.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewise.distributed.layers._cut_convolution import Convolution, Work
from tilewise.distributed.parts.exchange import fetch
from tilewise.distributed.parts.layout import Layout
from tilewise.distributed.parts.partials import partials
from tilewise.distributed.parts.replicated import Parameters
from tilewise.distributed.passes.share import Share, Term, share_of
from tilewise.distributed.passes.terms import forward_of
from tilewise.distributed.passes.torch_passes import TorchPasses
from tilewise.distributed.shards.shard import Space
from tilewise.problems.conv.axis import Axis

__all__ = ["DoubleConvolution", "DoubleWork"]


class DoubleWork(Work):
    """One call of a convolution, with the ``axes`` of the whole convolution as in :func:`share_of`."""

    __slots__ = ("axes",)

    def __init__(
        self, space: Space, what: str, layout: Layout, share: Share, groups: int, parameters: Parameters | None,
        axes: tuple[Axis, ...],
    ) -> None:  # fmt: skip
        super().__init__(space, what, layout, share, groups, parameters)
        self.axes = axes


class DoubleConvolution(Convolution):
    """``DoubleConvolution.apply(work, x, w, b)`` is a convolution whose gradients have gradients."""

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            gradients: tuple[Any, ...] = Convolution.backward(ctx, dy)
            return gradients
        work: DoubleWork = ctx.work
        x, w = ctx.saved_tensors[:2]
        _, want_x, want_w, want_b = ctx.needs_input_grad
        with work.link.telling(f"the backward of {work.what}"):
            dx, dw = partials(lambda x, w: _by_pieces(work, x, w), (x, w), (want_x, want_w), dy)
        return None, dx, dw, dy.sum((0, *range(2, dy.dim()))) if want_b else None


def _by_pieces(work: DoubleWork, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """This rank's part of the result without the bias, as one convolution of all boxes put together."""
    share = share_of(work.layout, work.axes, work.share.transposed, "assembled")
    source = fetch(work.link, work.what, work.layout, share.transfer, x)
    if share.assembled is None:
        return _zero_results(work, share, source, w)
    whole = tuple((0, size) for size in share.sizes)
    term = Term(whole, tuple((0, taps) for taps in w.shape[2:]), share.assembled)
    return forward_of(TorchPasses(), share, term, work.groups, source, w)


def _zero_results(work: DoubleWork, share: Share, source: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The results of a rank that convolves nothing. A convolution of an empty batch gives them the others' graph."""
    ones, zeros, dilation = [1] * len(work.axes), [0] * len(work.axes), [axis.dilation for axis in work.axes]
    sizes = ones if share.transposed else [axis.reach for axis in work.axes]
    empty = source.flatten()[:0].view(0, source.shape[1], *sizes)
    empty_result = torch.convolution(empty, w, None, ones, zeros, dilation, share.transposed, zeros, work.groups)
    return source.new_zeros((source.shape[0], empty_result.shape[1], *share.sizes)) + empty_result.sum()
