"""What the boxes that a rank receives add to its part of a convolution, forwards and backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tilewise.distributed.exchange import view
from tilewise.distributed.layout import Box
from tilewise.distributed.share import Share, Term

if TYPE_CHECKING:
    from tilewise.distributed.passes import Passes

__all__ = ["LoopedTerms", "Terms", "along", "backward_of", "forward_of", "weight_of"]


class Terms(Protocol):
    """The terms of one share's boxes."""

    def filters(self, w: torch.Tensor, back: bool) -> torch.Tensor:
        """``w`` as :meth:`add`, or with ``back`` :meth:`home`, takes it best: the same values, maybe in other order."""
        ...

    def results(self, boxes: Sequence[torch.Tensor], w: torch.Tensor) -> Any:
        """What can be computed before this rank's own results are there."""
        ...

    def add(self, y: torch.Tensor, found: Any, w: torch.Tensor) -> None:
        """Add to this rank's results what :meth:`results` gave."""
        ...

    def home(self, dy: torch.Tensor, w: torch.Tensor, boxes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of ``boxes``, of which no more is read than sizes and type."""
        ...

    def sums(self, boxes: Sequence[torch.Tensor], w: torch.Tensor, dy: torch.Tensor) -> Any:
        """What the boxes add to the gradient of the filter ``w``."""
        ...

    def add_sums(self, dw: torch.Tensor, found: Any) -> None:
        """Add :meth:`sums` to the filter's gradient."""
        ...


def along(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements of ``box`` along the spatial dimensions."""
    return view(tensor, range(2, tensor.dim()), box)


def forward_of(
    passes: Passes, share: Share, term: Term, groups: int, source: torch.Tensor, w: torch.Tensor,
    b: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A term's result of ``source``, by its taps of ``w``."""
    taps = along(w, term.taps)
    if not share.transposed:
        return passes.fprop(source, taps, term.axes, groups, b)
    y = passes.dgrad(source, taps, term.axes, groups)
    return y if b is None else y.add_(b.view(-1, *(1,) * len(share.sizes)))


def backward_of(
    passes: Passes, share: Share, term: Term, groups: int, dy: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    """The gradient of a term's source."""
    run = passes.fprop if share.transposed else passes.dgrad
    return run(along(dy, term.target), along(w, term.taps), term.axes, groups)


def weight_of(
    passes: Passes, share: Share, term: Term, groups: int, source: torch.Tensor, dy: torch.Tensor
) -> torch.Tensor:
    """What a term adds to its taps of the filter's gradient."""
    target = along(dy, term.target)
    x, y = (target, source) if share.transposed else (source, target)
    return passes.wgrad(x, y, term.axes, groups)


class LoopedTerms:
    """Each term by ``passes``, one after the other.

    Boxes are put into the order in which they come while problems are recorded for planning, whatever brings them now.
    """

    def __init__(self, passes: Passes, share: Share, groups: int) -> None:
        self._passes, self._share, self._groups = passes, share, groups

    def filters(self, w: torch.Tensor, back: bool) -> torch.Tensor:
        """``w`` itself."""
        return w

    def results(self, boxes: Sequence[torch.Tensor], w: torch.Tensor) -> list[torch.Tensor | None]:
        """Each term's own."""
        passes, share = self._passes, self._share
        return [
            None if term is None else forward_of(passes, share, term, self._groups, box.contiguous(), w)
            for term, box in zip(share.boxes, boxes, strict=True)
        ]

    def add(self, y: torch.Tensor, found: list[torch.Tensor | None], w: torch.Tensor) -> None:
        """Add each to its place."""
        for term, part in zip(self._share.boxes, found, strict=True):
            if term is not None and part is not None:
                along(y, term.target).add_(part)

    def home(self, dy: torch.Tensor, w: torch.Tensor, boxes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each box's by itself."""
        passes, share = self._passes, self._share
        return [
            torch.zeros_like(box) if term is None else backward_of(passes, share, term, self._groups, dy, w)
            for term, box in zip(share.boxes, boxes, strict=True)
        ]

    def sums(self, boxes: Sequence[torch.Tensor], w: torch.Tensor, dy: torch.Tensor) -> torch.Tensor | None:
        """Their sum, of the filter's shape; ``None``: nothing."""
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

    def add_sums(self, dw: torch.Tensor, found: torch.Tensor | None) -> None:
        """Add it."""
        if found is not None:
            dw.add_(found)
