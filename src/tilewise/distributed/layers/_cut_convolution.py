"""The convolution of a cut image. Halos are exchanged while a rank convolves its own part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tilewise.comm.link import Pending
from tilewise.comm.streams import Branch
from tilewise.distributed.parts.exchange import add_back, assemble, send_back, send_boxes, shape_of, view
from tilewise.distributed.parts.layout import Layout
from tilewise.distributed.passes.share import Share, Term
from tilewise.distributed.passes.terms import along, backward_of, forward_of, weight_of

if TYPE_CHECKING:
    from tilewise.distributed.parts.replicated import Parameters
    from tilewise.distributed.shards.shard import Space

__all__ = ["Convolution", "Work"]


class Work:
    """One call of a convolution: its place in the model and the objects that compute it.

    ``what`` names the call in errors. ``parameters`` sums the filter's gradient over the ranks, where the filter is one
    of these parameters as it is; otherwise it is ``None``.
    """

    __slots__ = ("groups", "layout", "link", "parameters", "passes", "share", "what")

    def __init__(
        self, space: Space, what: str, layout: Layout, share: Share, groups: int, parameters: Parameters | None
    ) -> None:
        self.link, self.passes, self.parameters = space.link, space.passes, parameters
        self.what, self.layout, self.share, self.groups = what, layout, share, groups

    def complete(self, dw: torch.Tensor) -> None:
        """Say that the current stream adds nothing more to ``dw``, so that its sum over the ranks may start."""
        if self.parameters is not None:
            self.parameters.complete(dw)

    def biased(self, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Add the bias ``b`` of the channels to ``y`` in place, and return it."""
        return y.add_(b.view(-1, *(1,) * len(self.share.sizes)))

    def needed(self, x: torch.Tensor, boxes: list[torch.Tensor]) -> torch.Tensor:
        """Put together all that this rank needs of the input, from its part ``x`` and the ``boxes`` received."""
        shape = shape_of(x, self.layout.grid.dims, self.share.transfer.need)
        return assemble(self.layout, self.share.transfer, x, boxes, x.new_empty(shape))


class Convolution(torch.autograd.Function):
    """``Convolution.apply(work, x, w, b)`` is this rank's part of a convolution, where ``x`` is its part of the input.

    Backward is the exact adjoint. The gradients of boxes are sent to the ranks that own them and added there (the halo
    reduction of Jin et al. 2018, section 2.2), while this rank computes the gradient of its own part. The filter's
    gradient is this rank's share of the sum. On a GPU the work on halos runs on a stream beside the rank's own passes.
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
    """The result as a sum of terms, and the boxes received."""
    share, side_stream = work.share, Branch(x.device, "halos", urgent=True)
    terms = work.passes.terms(share, work.groups, x, w)
    own_bias = b if share.own is not None and _fills(share.own, share) else None
    (filters, pending), y = side_stream.both(
        lambda: (terms.filters(w, back=False), send_boxes(work.link, work.what, work.layout, share.transfer, x)),
        lambda: _own_term(work, x, w, own_bias),
        beside_first=work.link.early,
    )
    with side_stream.more():
        boxes: list[torch.Tensor] = pending.wait()
        box_results = terms.results(boxes, w)
    side_stream.join()
    if y is None:
        channels = w.shape[1] * work.groups if share.transposed else w.shape[0]
        y = x.new_zeros((x.shape[0], channels, *share.sizes))
    terms.add(y, box_results, filters)
    return y if b is None or own_bias is not None else work.biased(y, b), boxes


def _own_term(work: Work, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's results from its own part alone; ``None`` where they read nothing of it."""
    own_term = work.share.own
    if own_term is None:
        return None
    result = forward_of(work.passes, work.share, own_term, work.groups, x, w, b)
    if _fills(own_term, work.share):
        return result
    y = result.new_zeros((*result.shape[:2], *work.share.sizes))
    along(y, own_term.target).add_(result)
    return y


def _terms_back(
    work: Work, x: torch.Tensor, w: torch.Tensor, boxes: list[torch.Tensor], dy: torch.Tensor, want_x: bool,
    want_w: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """The gradients of ``x`` and ``w`` that are wanted, as sums of terms."""
    share, side_stream = work.share, Branch(x.device, "halos", urgent=True)
    terms = work.passes.terms(share, work.groups, x, w)
    dx: torch.Tensor | None = None
    dw: torch.Tensor | None = None

    def send_box_gradients() -> Pending | None:
        if not want_x:
            return None
        gradients = terms.home(dy, terms.filters(w, back=True), boxes)
        return send_back(work.link, f"the backward of {work.what}", work.layout.grid, share.transfer, gradients, x)

    pending, dw = side_stream.both(
        send_box_gradients, lambda: _own_filter(work, x, w, dy) if want_w else None, beside_first=work.link.early
    )
    if dw is not None:
        with side_stream.more():
            sums = terms.sums(boxes, w, dy)
        side_stream.join()
        terms.add_sums(dw, sums)
        work.complete(dw)
    if pending is not None:
        own_term = share.own
        if own_term is None:
            dx = torch.zeros_like(x)
        else:
            dx = backward_of(work.passes, share, own_term, work.groups, dy, w)
        side_stream.join()
        add_back(work.layout, share.transfer, pending, dx)
    return dx, dw


def _own_filter(work: Work, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """The filter's gradient from this rank's own part alone."""
    own_term = work.share.own
    taps = None if own_term is None else weight_of(work.passes, work.share, own_term, work.groups, x, dy)
    if taps is not None and taps.shape == w.shape:
        return taps
    dw = torch.zeros_like(w)
    if own_term is not None and taps is not None:
        along(dw, own_term.taps).add_(taps)
    return dw


def _assembled(
    work: Work, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The result as one convolution of all boxes put together, and the boxes received."""
    assert work.share.assembled is not None
    boxes = send_boxes(work.link, work.what, work.layout, work.share.transfer, x).wait()
    source = work.needed(x, boxes)
    return forward_of(work.passes, work.share, _whole_term(work, w), work.groups, source, w, b), boxes


def _whole_term(work: Work, w: torch.Tensor) -> Term:
    """The convolution of all boxes put together, as a term."""
    assert work.share.assembled is not None
    whole = tuple((0, size) for size in work.share.sizes)
    return Term(whole, tuple((0, taps) for taps in w.shape[2:]), work.share.assembled)


def _assembled_back(
    work: Work, x: torch.Tensor, w: torch.Tensor, boxes: list[torch.Tensor], dy: torch.Tensor, want_x: bool,
    want_w: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """The gradients of ``x`` and ``w`` that are wanted, from the one convolution of all boxes put together."""
    share, dims = work.share, work.layout.grid.dims
    assert share.assembled is not None
    moves = share.transfer
    origin = [start for start, _ in moves.need]
    dx = dw = pending = whole = None
    if want_x:
        whole = backward_of(work.passes, share, _whole_term(work, w), work.groups, dy, w)
        sent = [view(whole, dims, box, origin) for _, box in moves.receives]
        pending = send_back(work.link, f"the backward of {work.what}", work.layout.grid, moves, sent, x)
    if want_w:
        dw = weight_of(work.passes, share, _whole_term(work, w), work.groups, work.needed(x, boxes), dy)
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
    """Whether ``term`` is added to all of this rank's results."""
    return all((start, stop) == (0, size) for (start, stop), size in zip(term.target, share.sizes, strict=True))
