"""A convolution of a cut image: the exchange of halos, hidden behind the convolution of what a rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tilewise.axis import Axis
from tilewise.comm.link import Pending
from tilewise.comm.streams import Branch
from tilewise.distributed.exchange import add_back, assemble, send_back, send_boxes, shape_of, view
from tilewise.distributed.layout import Box, Layout
from tilewise.distributed.share import Share, Term

if TYPE_CHECKING:
    from tilewise.distributed.shard import Space

__all__ = ["Convolution", "Work"]


class Work:
    """What one call of a convolution is about: where it is in the model and what computes it."""

    __slots__ = ("groups", "layout", "link", "parameters", "passes", "share", "what")

    def __init__(self, space: Space, what: str, layout: Layout, share: Share, groups: int) -> None:
        self.link, self.passes, self.parameters = space.link, space.passes, space.parameters
        self.what, self.layout, self.share, self.groups = what, layout, share, groups

    def forward(
        self, source: torch.Tensor, w: torch.Tensor, axes: tuple[Axis, ...], b: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The layer's result of ``source``."""
        if not self.share.transposed:
            return self.passes.fprop(source, w, axes, self.groups, b)
        y = self.passes.dgrad(source, w, axes, self.groups)
        return y if b is None else self.biased(y, b)

    def biased(self, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """``y`` with the bias of its channels added in place."""
        return y.add_(b.view(-1, *(1,) * len(self.share.sizes)))

    def backward(self, gradient: torch.Tensor, w: torch.Tensor, axes: tuple[Axis, ...]) -> torch.Tensor:
        """The gradient of the layer's input."""
        run = self.passes.fprop if self.share.transposed else self.passes.dgrad
        return run(gradient, w, axes, self.groups)

    def weight(self, source: torch.Tensor, gradient: torch.Tensor, axes: tuple[Axis, ...]) -> torch.Tensor:
        """The gradient of the filter."""
        x, y = (gradient, source) if self.share.transposed else (source, gradient)
        return self.passes.wgrad(x, y, axes, self.groups)

    def complete(self, dw: torch.Tensor) -> None:
        """Say that the current stream adds nothing more to ``dw``, so that its sum need not wait for what follows."""
        if self.parameters is not None:
            self.parameters.complete(dw)

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
    own_bias = b if share.own is not None and _fills(share.own, share) else None
    pending, y = beside.both(
        lambda: send_boxes(work.link, work.what, work.layout, share.transfer, x),
        lambda: _own(work, x, w, own_bias),
    )
    with beside.more():
        boxes: list[torch.Tensor] = pending.wait()
        parts = [
            None if term is None else work.forward(box, _along(w, term.taps), term.axes)
            for term, box in zip(share.boxes, boxes, strict=True)
        ]
    beside.join()
    if y is None:
        channels = w.shape[1] * work.groups if share.transposed else w.shape[0]
        y = x.new_zeros((x.shape[0], channels, *share.sizes))
    for term, of_box in zip(share.boxes, parts, strict=True):
        if term is not None and of_box is not None:
            _along(y, term.target).add_(of_box)
    return y if b is None or own_bias is not None else work.biased(y, b), boxes


def _own(work: Work, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor | None:
    """What this rank's own part adds to its results; ``None``: nothing."""
    own = work.share.own
    if own is None:
        return None
    part = work.forward(x, _along(w, own.taps), own.axes, b)
    if _fills(own, work.share):
        return part
    y = _zeros(work, part)
    _along(y, own.target).add_(part)
    return y


def _terms_back(
    work: Work, x: torch.Tensor, w: torch.Tensor, boxes: list[torch.Tensor], dy: torch.Tensor, want_x: bool,
    want_w: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    share, beside = work.share, Branch(x.device, "halos", urgent=True)
    dx: torch.Tensor | None = None
    dw: torch.Tensor | None = None

    def of_halos() -> tuple[Pending | None, torch.Tensor | None]:
        pending = None
        if want_x:
            home = [_of_box(work, term, box, w, dy) for term, box in zip(share.boxes, boxes, strict=True)]
            pending = send_back(work.link, f"the backward of {work.what}", work.layout.grid, share.transfer, home, x)
        return pending, _weight_gradient(work, share.boxes, boxes, w, dy) if want_w else None

    (pending, of_boxes), of_own = beside.both(
        of_halos, lambda: _weight_gradient(work, (share.own,), (x,), w, dy) if want_w else None
    )
    if want_w:
        beside.join()
        dw = _together(of_own, of_boxes, w)
        work.complete(dw)
    if pending is not None:
        dx = _of_box(work, share.own, x, w, dy)
        with beside.more():
            arrived = pending.wait()
        beside.join()
        add_back(work.layout, share.transfer, arrived, dx)
    return dx, dw


def _of_box(work: Work, term: Term | None, box: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """The gradient of a box of input."""
    if term is None:
        return torch.zeros_like(box)
    return work.backward(_along(dy, term.target), _along(w, term.taps), term.axes)


def _weight_gradient(
    work: Work, terms: Sequence[Term | None], boxes: Sequence[torch.Tensor], w: torch.Tensor, dy: torch.Tensor
) -> torch.Tensor | None:
    """What these boxes add to the filter's gradient; ``None``: nothing."""
    dw = None
    for term, box in zip(terms, boxes, strict=True):
        if term is None:
            continue
        part = work.weight(box, _along(dy, term.target), term.axes)
        if dw is None and part.shape == w.shape:
            dw = part
            continue
        dw = torch.zeros_like(w) if dw is None else dw
        _along(dw, term.taps).add_(part)
    return dw


def _together(own: torch.Tensor | None, of_boxes: torch.Tensor | None, w: torch.Tensor) -> torch.Tensor:
    if own is None or of_boxes is None:
        found = of_boxes if own is None else own
        return torch.zeros_like(w) if found is None else found
    return own.add_(of_boxes)


def _assembled(
    work: Work, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    assert work.share.assembled is not None
    boxes = send_boxes(work.link, work.what, work.layout, work.share.transfer, x).wait()
    return work.forward(work.needed(x, boxes), w, work.share.assembled, b), boxes


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
        whole = work.backward(dy, w, share.assembled)
        home = [view(whole, dims, box, origin) for _, box in moves.receives]
        pending = send_back(work.link, f"the backward of {work.what}", work.layout.grid, moves, home, x)
    if want_w:
        dw = work.weight(work.needed(x, boxes), dy, share.assembled)
        work.complete(dw)
    if pending is not None and whole is not None:
        dx = torch.zeros_like(x)
        if moves.own is not None:
            view(dx, dims, moves.own, [start for start, _ in work.layout.own]).copy_(
                view(whole, dims, moves.own, origin)
            )
        add_back(work.layout, moves, pending.wait(), dx)
    return dx, dw


def _fills(term: Term, share: Share) -> bool:
    return all((start, stop) == (0, size) for (start, stop), size in zip(term.target, share.sizes, strict=True))


def _zeros(work: Work, like: torch.Tensor) -> torch.Tensor:
    return like.new_zeros((*like.shape[:2], *work.share.sizes))


def _along(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements of ``box`` along the spatial dimensions."""
    return view(tensor, range(2, tensor.dim()), box)
