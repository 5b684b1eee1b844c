"""Protocols of the classes that compute a rank's convolutions, by torch or by plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tilewise.distributed.passes.share import Share
from tilewise.problems.conv.axis import Axis

__all__ = ["Axes", "Passes", "Terms"]

Axes = tuple[Axis, ...]
"""The spatial axes of a convolution, in the order of its dimensions."""


class Passes(Protocol):
    """Computes one rank's convolutions. The axes given are exact: they determine the result's sizes.

    ``x`` is the input (batch, channels, *sizes), ``y`` the result or its gradient, and ``w`` the filter.
    """

    def fprop(
        self, x: torch.Tensor, w: torch.Tensor, axes: Axes, groups: int, b: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The result of the convolution of ``x`` and ``w``, with the bias ``b`` where one is given."""
        ...

    def dgrad(self, y: torch.Tensor, w: torch.Tensor, axes: Axes, groups: int) -> torch.Tensor:
        """The gradient of the input, with the sizes of the axes, from that of the result ``y`` and the filter ``w``."""
        ...

    def wgrad(self, x: torch.Tensor, y: torch.Tensor, axes: Axes, groups: int) -> torch.Tensor:
        """The gradient of the filter, from the input ``x`` and the gradient of the result ``y``."""
        ...

    def terms(self, share: Share, groups: int, x: torch.Tensor, w: torch.Tensor) -> Terms:
        """An object that computes the terms of the boxes of ``share`` for a layer with the input ``x`` on this rank.

        ``w`` is the layer's filter.
        """
        ...


class Terms(Protocol):
    """Computes the terms that the received boxes of one share add to a rank's convolution."""

    def filters(self, w: torch.Tensor, back: bool) -> torch.Tensor:
        """``w`` in the layout that :meth:`add`, or with ``back`` :meth:`home`, reads fastest; its values are equal."""
        ...

    def results(self, boxes: Sequence[torch.Tensor], w: torch.Tensor) -> Any:
        """Whatever of the boxes' terms can be computed before this rank's own results exist, for :meth:`add`."""
        ...

    def add(self, y: torch.Tensor, results: Any, w: torch.Tensor) -> None:
        """Add ``results``, which :meth:`results` returned, to this rank's results ``y``."""
        ...

    def home(self, dy: torch.Tensor, w: torch.Tensor, boxes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of the boxes. Of ``boxes`` themselves only sizes and dtype are read."""
        ...

    def sums(self, boxes: Sequence[torch.Tensor], w: torch.Tensor, dy: torch.Tensor) -> Any:
        """The part of the gradient of the filter ``w`` that comes from the boxes."""
        ...

    def add_sums(self, dw: torch.Tensor, sums: Any) -> None:
        """Add ``sums``, which :meth:`sums` returned, to the filter's gradient ``dw``."""
        ...
