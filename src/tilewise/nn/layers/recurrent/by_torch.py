"""Recurrent layers and their gradients by torch's operators, for gradients of gradients and layers without plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.machine import random_states
from tilewise.machine.device import is_capturing
from tilewise.nn.layers.recurrent.autocast import OPERATORS

__all__ = ["ByTorch", "Dropped", "Gradients", "gradients_in"]

Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """What is dropped between layers: the share, and the generator's state before, from which it is drawn again."""

    share: float
    device: torch.device
    state: Tensor | None

    @classmethod
    def now(cls, share: float, device: torch.device) -> Dropped:
        """What is dropped from now on. While a CUDA graph is captured, the generator has no state to be read."""
        if not share or is_capturing(device):
            return cls(share, device, None)
        return cls(share, device, random_states.state_of(device))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Meanwhile the generator draws what it drew. Raises ``RuntimeError`` where its state is not known."""
        if not self.share:
            yield
            return
        if self.state is None:
            raise RuntimeError(
                "a recurrent layer with dropout that was compiled or captured in a CUDA graph has no gradients of "
                "gradients; tilewise.restore(model) lets torch compute it"
            )
        with random_states.with_state(self.state, self.device):
            yield


@dataclass(frozen=True, slots=True)
class ByTorch:
    """A recurrent layer as torch's operator computes it, of any sizes. ``tensors`` are x, h0, c0 and the weights.

    ``sizes`` are the rows of each step of a packed batch.
    """

    cell: str
    biases: bool
    layers: int
    directions: int
    sizes: Tensor | None = None

    def results(self, tensors: Sequence[Tensor | None], dropout: float) -> list[Tensor]:
        """y, hn and cn; layer by layer where something is dropped between them, so that it can be dropped again."""
        x, h0, c0, *weights = tensors
        layers, count = (1 if dropout else self.layers), len(weights) // self.layers
        last: list[list[Tensor]] = []
        for first in range(0, self.layers, layers):
            if first:
                x = x * torch.nn.functional.dropout(torch.ones_like(x), dropout)  # type: ignore[operator, arg-type]
            rows = slice(first * self.directions, (first + layers) * self.directions)
            state: Any = [None if t is None else t[rows] for t in (h0, c0)]
            state = state[0] if c0 is None else tuple(state)
            own = weights[first * count : (first + layers) * count]
            options = own, self.biases, layers, 0.0, torch.is_grad_enabled(), self.directions == 2
            if self.sizes is None:
                x, *ends = OPERATORS[self.cell](x, state, *options, False)
            else:
                x, *ends = OPERATORS[self.cell](x, self.sizes, state, *options)
            last.append(ends)
        assert x is not None
        return [x, *(ends[0] if len(ends) == 1 else torch.cat(ends) for ends in zip(*last, strict=True))]

    def gradients(
        self,
        tensors: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None],
        needs: Sequence[bool],
        dropped: Dropped,
    ) -> Gradients:
        """The gradients that are needed of ``tensors``, from those of the results, of which ``None`` are zero.

        The forward is computed again. Where autograd is on, gradients have gradients themselves.
        """
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            # Views: a tensor that stands in several places has a gradient for each.
            leaves = [None if t is None else (t.view_as(t) if again else t.detach()) for t in tensors]
            if not again:
                leaves = [t if t is None else t.requires_grad_(n) for t, n in zip(leaves, needs, strict=True)]
            with dropped.again():
                results = self.results(leaves, dropped.share)
            return gradients_in(leaves, results, gradients, needs, create_graph=again)


def gradients_in(
    leaves: Sequence[Tensor | None],
    results: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool],
    **options: bool,
) -> Gradients:
    """autograd's gradients that are needed of ``leaves``, from those of ``results``, of which ``None`` are zero."""
    wanted = [leaf for leaf, needed in zip(leaves, needs, strict=True) if needed and leaf is not None]
    pairs = [(r, d) for r, d in zip(results, gradients, strict=True) if d is not None]
    ends, starts = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(ends, wanted, starts, allow_unused=True, **options))
    return tuple(next(found) if needed else None for needed in needs)
