"""Computes the terms that the boxes which a rank receives add to its part of a convolution, in all three passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.distributed.parts.exchange import view
from tilewise.distributed.parts.layout import Box
from tilewise.distributed.passes.contracts import Passes
from tilewise.distributed.passes.share import Share, Term

__all__ = ["LoopedTerms", "along", "backward_of", "forward_of", "weight_of"]


def along(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A view of the elements of ``tensor`` that ``box`` covers along the spatial dimensions."""
    return view(tensor, range(2, tensor.dim()), box)


def forward_of(
    passes: Passes, share: Share, term: Term, groups: int, source: torch.Tensor, w: torch.Tensor,
    b: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The result of ``term`` for the box ``source`` and the filter ``w``, with the bias ``b`` where one is given."""
    taps = along(w, term.taps)
    if not share.transposed:
        return passes.fprop(source, taps, term.axes, groups, b)
    y = passes.dgrad(source, taps, term.axes, groups)
    return y if b is None else y.add_(b.view(-1, *(1,) * len(share.sizes)))


def backward_of(
    passes: Passes, share: Share, term: Term, groups: int, dy: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    """The gradient of the box that ``term`` reads, from that of this rank's results, ``dy``."""
    run = passes.fprop if share.transposed else passes.dgrad
    return run(along(dy, term.target), along(w, term.taps), term.axes, groups)


def weight_of(
    passes: Passes, share: Share, term: Term, groups: int, source: torch.Tensor, dy: torch.Tensor
) -> torch.Tensor:
    """The gradient of the taps of the filter that ``term`` uses, from the box ``source``."""
    target = along(dy, term.target)
    x, y = (target, source) if share.transposed else (source, target)
    return passes.wgrad(x, y, term.axes, groups)


class LoopedTerms:
    """Computes the terms one after the other by ``passes``.

    Boxes are made contiguous, as they will arrive once layers are planned. So the problems that are recorded for
    planning are those that will be met.
    """

    def __init__(self, passes: Passes, share: Share, groups: int) -> None:
        self._passes, self._share, self._groups = passes, share, groups

    def filters(self, w: torch.Tensor, back: bool) -> torch.Tensor:
        """``w`` itself: these passes take any layout."""
        return w

    def results(self, boxes: Sequence[torch.Tensor], w: torch.Tensor) -> list[torch.Tensor | None]:
        """The result of each term."""
        passes, share = self._passes, self._share
        return [
            None if term is None else forward_of(passes, share, term, self._groups, box.contiguous(), w)
            for term, box in zip(share.boxes, boxes, strict=True)
        ]

    def add(self, y: torch.Tensor, results: list[torch.Tensor | None], w: torch.Tensor) -> None:
        """Add the result of each term to its place in this rank's results."""
        for term, part in zip(self._share.boxes, results, strict=True):
            if term is not None and part is not None:
                along(y, term.target).add_(part)

    def home(self, dy: torch.Tensor, w: torch.Tensor, boxes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradient of each box."""
        passes, share = self._passes, self._share
        return [
            torch.zeros_like(box) if term is None else backward_of(passes, share, term, self._groups, dy, w)
            for term, box in zip(share.boxes, boxes, strict=True)
        ]

    def sums(self, boxes: Sequence[torch.Tensor], w: torch.Tensor, dy: torch.Tensor) -> torch.Tensor | None:
        """The sum of what the terms add to the filter's gradient, in the filter's shape; ``None`` without terms."""
        passes, share = self._passes, self._share
        dw = None
        for term, box in zip(share.boxes, boxes, strict=True):
            if term is None:
                continue
            part = weight_of(passes, share, term, self._groups, box.contiguous(), dy)
            if dw is None and part.shape == w.shape:
                dw = part
                continue
            dw = torch.zeros_like(w) if dw is None else dw
            along(dw, term.taps).add_(part)
        return dw

    def add_sums(self, dw: torch.Tensor, sums: torch.Tensor | None) -> None:
        """Add ``sums``, which :meth:`sums` returned, to the filter's gradient ``dw``."""
        if sums is not None:
            dw.add_(sums)
