"""The layers and directions around recurrences: their order, dropout between layers, and all gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewise.machine.device import is_capturing
from tilewise.machine.torch_state import fp32_precision
from tilewise.problems.recurrent.packing import Packing
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers.recurrent._direction import Direction, KeptSteps, Linear, spans_of
from tilewise.solvers.recurrent._host_copies import HostCopies
from tilewise.solvers.recurrent._recurrence import Recurrence

__all__ = ["Layer", "Outputs", "StackedLayers"]

Outputs = tuple[Tensor, Tensor, Tensor | None, Any]


class Layer(Protocol):
    """A recurrent layer with forward and backward apart, as a torch module needs them."""

    def forward(
        self,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        weights: Sequence[Tensor],
        *,
        dropout: float = 0.0,
        packing: Packing | None = None,
        keep: bool,
    ) -> Outputs:
        """y, hn, cn (``None`` unless the cell is an LSTM), and what ``backward`` takes, which follows where ``keep``.

        ``dropout`` is the share of each layer's output that the next one does not see. A packed batch has a
        ``packing`` and rows in place of steps and sequences. It may have other lengths than the problem, and as many
        sequences.
        """

    def backward(
        self,
        saved: Any,
        weights: Sequence[Tensor],
        dy: Tensor | None,
        dhn: Tensor | None,
        dcn: Tensor | None,
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """The gradients of x, h0, c0 and each weight, ``None`` for those that ``needs``, in the same order, leaves out.

        The gradient of c0 has its place for every cell. Gradients of results may be ``None`` for zero.
        """


@dataclass
class _Kept:
    """What backward needs: first states, and of each layer its input, output, dropout and steps."""

    h0: Tensor
    c0: Tensor | None
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    noises: list[Tensor | None] = field(default_factory=list)
    steps: list[KeptSteps] = field(default_factory=list)


@dataclass(frozen=True)
class StackedLayers:
    """All layers and directions of ``p``, each of which runs its steps by ``recurrence``.

    ``linear`` computes the products with the inputs' weights, as ``torch.nn.functional.linear`` does. ``packed`` makes
    the recurrence of a packed batch; without it such a batch runs in parts in which no sequence ends. ``block`` steps
    run at a time, 0 for all: see :mod:`._direction`. With ``on_host`` what blocks keep is moved to the host, but in a
    capture, which cannot: there their steps are computed again.
    """

    p: RecurrentProblem
    recurrence: Recurrence
    linear: Linear = torch._C._nn.linear
    packed: Callable[[Packing], Recurrence] | None = None
    block: int = 0
    on_host: bool = False

    def forward(
        self,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        weights: Sequence[Tensor],
        *,
        dropout: float = 0.0,
        packing: Packing | None = None,
        keep: bool,
    ) -> Outputs:
        """As :meth:`Layer.forward`. Tensors are contiguous; dropout draws from torch's generator."""
        p, kept = self.p, _Kept(h0, c0)
        spans = spans_of(len(x), len(h0[0]), packing, self.block, level=self.packed is None)
        moves = self.on_host and keep and not is_capturing(x.device)
        copies = HostCopies(x.device) if moves else None
        states: list[Tensor] = []
        cells: list[Tensor] = []
        with self._precision():
            for layer in range(p.layers):
                noise = None
                if layer and dropout:
                    noise = torch.nn.functional.dropout(torch.ones_like(x), dropout)
                    x = x * noise
                y = x.new_empty((*x.shape[:-1], p.directions * p.width))
                for direction, half in enumerate(y.chunk(p.directions, -1)):
                    index = layer * p.directions + direction
                    c = None if c0 is None else c0[index]
                    hn, cn, steps = self._direction(index).forward(
                        x,
                        h0[index],
                        c,
                        self._weights(weights, index),
                        half,
                        spans,
                        keep=keep,
                        again=self.block > 0 and not moves,
                        copies=copies,
                    )
                    states.append(hn)
                    if cn is not None:
                        cells.append(cn)
                    kept.steps.append(steps)
                if keep:
                    kept.inputs.append(x)
                    kept.outputs.append(y)
                    kept.noises.append(noise)
                x = y
        return x, torch.stack(states), torch.stack(cells) if cells else None, kept if keep else None

    def backward(
        self,
        saved: Any,
        weights: Sequence[Tensor],
        dy: Tensor | None,
        dhn: Tensor | None,
        dcn: Tensor | None,
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """As :meth:`Layer.backward`."""
        p, kept = self.p, saved
        gradients: list[Tensor | None] = [None] * len(weights)
        dh0 = torch.empty_like(kept.h0)
        dc0 = None if kept.c0 is None else torch.empty_like(kept.c0)
        dout = torch.zeros_like(kept.outputs[-1]) if dy is None else dy
        with self._precision():
            for layer in range(p.layers - 1, -1, -1):
                dx: Tensor | None = None
                halves = kept.outputs[layer].chunk(p.directions, -1)
                for direction, dhalf in enumerate(dout.chunk(p.directions, -1)):
                    index = layer * p.directions + direction
                    places = slice(index * self._count, (index + 1) * self._count)
                    last_h, last_c = (None if end is None else end[index] for end in (dhn, dcn))
                    needed = layer > 0 or needs[0], *needs[3:][places]
                    dx, dh, dc, gradients[places] = self._direction(index).backward(
                        kept.steps[index], kept.inputs[layer], kept.h0[index],
                        None if kept.c0 is None else kept.c0[index], weights[places], halves[direction], dhalf, last_h,
                        last_c, dx, needed,
                    )  # fmt: skip
                    dh0[index].copy_(dh)
                    if dc0 is not None and dc is not None:
                        dc0[index].copy_(dc)
                if layer:
                    assert dx is not None
                    noise = kept.noises[layer]
                    dout = dx if noise is None else dx * noise
        return dx, dh0 if needs[1] else None, dc0 if needs[2] else None, *gradients

    def _direction(self, index: int) -> Direction:
        """The direction of a layer with this number."""
        p = self.p
        gru, projected, reverse = p.cell == "gru", p.projection > 0, index % p.directions == 1
        return Direction(p.hidden, gru, projected, reverse, self._recurrence, self.linear)

    def _recurrence(self, packing: Packing | None) -> Recurrence:
        """What runs the steps of a batch, or of a part of it."""
        return self.recurrence if packing is None or self.packed is None else self.packed(packing)

    @property
    def _count(self) -> int:
        """Weights of one direction of one layer."""
        return (4 if self.p.biases else 2) + (self.p.projection > 0)

    def _weights(self, weights: Sequence[Tensor], index: int) -> Sequence[Tensor]:
        """The weights of one direction of one layer."""
        return weights[index * self._count : (index + 1) * self._count]

    def _precision(self) -> AbstractContextManager[None]:
        """A context with the problem's precision of matrix products."""
        p = self.p
        return fp32_precision(p.device_type, "matmul", p.precision if p.device_type == "cuda" else "ieee")
