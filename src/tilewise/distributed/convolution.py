"""A convolution of a cut image: the exchange of halos, hidden behind the convolution of what a rank has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tilewise.comm.link import Pending
from tilewise.comm.streams import Branch
from tilewise.distributed.exchange import add_back, assemble, send_back, send_boxes, shape_of, view
from tilewise.distributed.layout import Layout
from tilewise.distributed.share import Share, Term
from tilewise.distributed.terms import along, backward_of, forward_of, weight_of

if TYPE_CHECKING:
    from tilewise.distributed.replicated import Parameters
    from tilewise.distributed.shard import Space

__all__ = ["Convolution", "Work"]


class Work:
    """What one call of a convolution is about: where it is in the model and what computes it.

    ``parameters`` are those whose gradient the filter's is, as it leaves the convolution; ``None``: it is none of one.
    """

    __slots__ = ("groups", "layout", "link", "parameters", "passes", "share", "what")

    def __init__(
        self, space: Space, what: str, layout: Layout, share: Share, groups: int, parameters: Parameters | None
    ) -> None:
        self.link, self.passes, self.parameters = space.link, space.passes, parameters
        self.what, self.layout, self.share, self.groups = what, layout, share, groups

    def complete(self, dw: torch.Tensor) -> None:
        """Say that the current stream adds nothing more to ``dw``, so that its sum need not wait for what follows."""
        if self.parameters is not None:
            self.parameters.complete(dw)

    def biased(self, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """``y`` with the bias of its channels added in place."""
        return y.add_(b.view(-1, *(1,) * len(self.share.sizes)))

    def needed(self, x: torch.Tensor, boxes: list[torch.Tensor]) -> torch.Tensor:
        """All that this rank needs of the input, put together."""
        shape = shape_of(x, self.layout.grid.dims, self.share.transfer.need)
        return assemble(self.layout, self.share.transfer, x, boxes, x.new_empty(shape))


class Convolution(torch.autograd.Function):
    """``Convolution.apply(work, x, w, b)``: this rank's part of a convolution, of its part ``x`` of the input.

    Backward is the exact adjoint: the gradients of the boxes go home while this rank's own are computed, and are added
    there (the halo reduction of Jin et al. 2018, section 2.2). The filter's gradient is this rank's share of the sum.
    On a GPU what has to do with halos is a branch beside the rank's own passes.
    """

    @staticmethod
    def forward(ctx: Any, work: Work, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        ctx.work, ctx.has_bias = work, b is not None
        with work.link.telling(work.what):
            run = _by_terms if work.share.assembled is None else _assembled
            y, boxes = run(work, x, w, b)
        ctx.save_for_backward(x, w, *boxes)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        work: Work = ctx.work
        x, w, *boxes = ctx.saved_tensors
        _, want_x, want_w, want_b = ctx.needs_input_grad
        with work.link.telling(f"the backward of {work.what}"):
            run = _assembled_back if work.share.assembled else _terms_back
            dx, dw = run(work, x, w, boxes, dy, want_x, want_w)
            db = dy.sum((0, *range(2, dy.dim()))) if want_b else None
        return None, dx, dw, db


def _by_terms(
    work: Work, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    share, beside = work.share, Branch(x.device, "halos", urgent=True)
    terms = work.passes.terms(share, work.groups, x, w)
    own_bias = b if share.own is not None and _fills(share.own, share) else None
    (filters, pending), y = beside.both(
        lambda: (terms.filters(w, back=False), send_boxes(work.link, work.what, work.layout, share.transfer, x)),
        lambda: _own(work, x, w, own_bias),
        beside_first=work.link.early,
    )
    with beside.more():
        boxes: list[torch.Tensor] = pending.wait()
        found = terms.results(boxes, w)
    beside.join()
    if y is None:
        channels = w.shape[1] * work.groups if share.transposed else w.shape[0]
        y = x.new_zeros((x.shape[0], channels, *share.sizes))
    terms.add(y, found, filters)
    return y if b is None or own_bias is not None else work.biased(y, b), boxes


def _own(work: Work, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor | None:
    """What this rank's own part adds to its results; ``None``: nothing."""
    own = work.share.own
    if own is None:
        return None
    part = forward_of(work.passes, work.share, own, work.groups, x, w, b)
    if _fills(own, work.share):
        return part
    y = _zeros(work, part)
    along(y, own.target).add_(part)
    return y


def _terms_back(
    work: Work, x: torch.Tensor, w: torch.Tensor, boxes: list[torch.Tensor], dy: torch.Tensor, want_x: bool,
    want_w: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    share, beside = work.share, Branch(x.device, "halos", urgent=True)
    terms = work.passes.terms(share, work.groups, x, w)
    dx: torch.Tensor | None = None
    dw: torch.Tensor | None = None

    def sent_home() -> Pending | None:
        if not want_x:
            return None
        home = terms.home(dy, terms.filters(w, back=True), boxes)
        return send_back(work.link, f"the backward of {work.what}", work.layout.grid, share.transfer, home, x)

    pending, dw = beside.both(
        sent_home, lambda: _own_weight(work, x, w, dy) if want_w else None, beside_first=work.link.early
    )
    if dw is not None:
        with beside.more():
            sums = terms.sums(boxes, w, dy)
        beside.join()
        terms.add_sums(dw, sums)
        work.complete(dw)
    if pending is not None:
        own = share.own
        dx = torch.zeros_like(x) if own is None else backward_of(work.passes, share, own, work.groups, dy, w)
        beside.join()
        add_back(work.layout, share.transfer, pending, dx)
    return dx, dw


def _own_weight(work: Work, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """What this rank's own part adds to the filter's gradient."""
    own = work.share.own
    part = None if own is None else weight_of(work.passes, work.share, own, work.groups, x, dy)
    if part is not None and part.shape == w.shape:
        return part
    dw = torch.zeros_like(w)
    if own is not None and part is not None:
        along(dw, own.taps).add_(part)
    return dw


def _assembled(
    work: Work, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    assert work.share.assembled is not None
    boxes = send_boxes(work.link, work.what, work.layout, work.share.transfer, x).wait()
    return forward_of(work.passes, work.share, _all(work, w), work.groups, work.needed(x, boxes), w, b), boxes


def _all(work: Work, w: torch.Tensor) -> Term:
    """The one convolution of everything that is needed."""
    assert work.share.assembled is not None
    whole = tuple((0, size) for size in work.share.sizes)
    return Term(whole, tuple((0, taps) for taps in w.shape[2:]), work.share.assembled)


def _assembled_back(
    work: Work, x: torch.Tensor, w: torch.Tensor, boxes: list[torch.Tensor], dy: torch.Tensor, want_x: bool,
    want_w: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    share, dims = work.share, work.layout.grid.dims
    assert share.assembled is not None
    moves = share.transfer
    origin = [start for start, _ in moves.need]
    dx = dw = pending = whole = None
    if want_x:
        whole = backward_of(work.passes, share, _all(work, w), work.groups, dy, w)
        home = [view(whole, dims, box, origin) for _, box in moves.receives]
        pending = send_back(work.link, f"the backward of {work.what}", work.layout.grid, moves, home, x)
    if want_w:
        dw = weight_of(work.passes, share, _all(work, w), work.groups, work.needed(x, boxes), dy)
        work.complete(dw)
    if pending is not None and whole is not None:
        dx = torch.zeros_like(x)
        if moves.own is not None:
            view(dx, dims, moves.own, [start for start, _ in work.layout.own]).copy_(
                view(whole, dims, moves.own, origin)
            )
        add_back(work.layout, moves, pending, dx)
    return dx, dw


def _fills(term: Term, share: Share) -> bool:
    return all((start, stop) == (0, size) for (start, stop), size in zip(term.target, share.sizes, strict=True))


def _zeros(work: Work, like: torch.Tensor) -> torch.Tensor:
    return like.new_zeros((*like.shape[:2], *work.share.sizes))
