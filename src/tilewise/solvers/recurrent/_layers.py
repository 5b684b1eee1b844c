"""The layers and directions around recurrences: their order, dropout between layers, and all gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
    """What backward needs: first states, and of each layer its input, output, dropout and steps.

    ``zero`` says that first states are zeros which nobody gave: they add nothing to gradients and have none themselves.
    Those of one direction (batch, hidden) then serve for all, and for c as well.
    """

    h0: Tensor
    c0: Tensor | None
    zero: bool
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
        h0: Tensor | None,
        c0: Tensor | None,
        weights: Sequence[Tensor],
        *,
        dropout: float = 0.0,
        packing: Packing | None = None,
        keep: bool,
    ) -> Outputs:
        """As :meth:`Layer.forward`. Tensors are contiguous; dropout draws from torch's generator.

        Without ``h0`` all first states are zeros, which makes the layer and its backward shorter.
        """
        p, kept = self.p, self._firsts(x, h0, c0, packing)
        first_h, first_c = self._each(kept)
        spans = spans_of(x.shape[0], first_h[0].shape[0], packing, self.block, level=self.packed is None)
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
                for direction, half in enumerate(_halves(y, p.directions)):
                    index = layer * p.directions + direction
                    hn, cn, steps = self._directions[direction].forward(
                        x, first_h[index], first_c[index], self._weights(weights, index), half, spans,
                        keep=keep, again=self.block > 0 and not moves, copies=copies,
                    )  # fmt: skip
                    states.append(hn)
                    if cn is not None:
                        cells.append(cn)
                    kept.steps.append(steps)
                if keep:
                    kept.inputs.append(x)
                    kept.outputs.append(y)
                    kept.noises.append(noise)
                x = y
        return x, _stacked(states), _stacked(cells) if cells else None, kept if keep else None

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
        (first_h, first_c), ends = self._each(kept), p.layers * p.directions
        of_h, of_c = list[Tensor | None]([None] * ends), list[Tensor | None]([None] * ends)
        dout = torch.zeros_like(kept.outputs[-1]) if dy is None else dy
        with self._precision():
            for layer in range(p.layers - 1, -1, -1):
                dx: Tensor | None = None
                halves = _halves(kept.outputs[layer], p.directions)
                for direction, dhalf in enumerate(_halves(dout, p.directions)):
                    index = layer * p.directions + direction
                    places = slice(index * self._count, (index + 1) * self._count)
                    last_h, last_c = (None if end is None else end[index] for end in (dhn, dcn))
                    needed = layer > 0 or needs[0], *needs[3:][places]
                    dx, of_h[index], of_c[index], gradients[places] = self._directions[direction].backward(
                        kept.steps[index], kept.inputs[layer], first_h[index], first_c[index], weights[places],
                        halves[direction], dhalf, last_h, last_c, dx, needed, zero=kept.zero,
                    )  # fmt: skip
                if layer:
                    assert dx is not None
                    noise = kept.noises[layer]
                    dout = dx if noise is None else dx * noise
        dh0, dc0 = (
            _stacked([d for d in of if d is not None]) if needed and of[0] is not None else None
            for of, needed in ((of_h, needs[1]), (of_c, needs[2]))
        )
        return dx, dh0, dc0, *gradients

    def _firsts(self, x: Tensor, h0: Tensor | None, c0: Tensor | None, packing: Packing | None) -> _Kept:
        """The first states, with no layer's steps yet."""
        if h0 is not None:
            return _Kept(h0, c0, zero=False)
        p, batch = self.p, x.shape[1] if packing is None else packing.batch
        zeros = x.new_zeros((batch, p.width))
        cells = zeros if p.width == p.hidden else x.new_zeros((batch, p.hidden))
        return _Kept(zeros, cells if p.cell == "lstm" else None, zero=True)

    def _each(self, kept: _Kept) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """The first h of each direction, and the first c, ``None`` for cells without one."""
        count = self.p.layers * self.p.directions
        if kept.zero:
            return [kept.h0] * count, [kept.c0] * count
        return kept.h0.unbind(), [None] * count if kept.c0 is None else kept.c0.unbind()

    @functools.cached_property
    def _directions(self) -> tuple[Direction, ...]:
        """The directions, forward in time and then back."""
        p = self.p
        gru, projected = p.cell == "gru", p.projection > 0
        return tuple(
            Direction(p.hidden, gru, projected, reverse, self._recurrence, self.linear)
            for reverse in (False, True)[: p.directions]
        )

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
        if p.dtype != "fp32":
            return nullcontext()
        return fp32_precision(p.device_type, "matmul", p.precision if p.device_type == "cuda" else "ieee")


def _halves(tensor: Tensor, directions: int) -> Sequence[Tensor]:
    """The part of each direction along the last dimension."""
    return (tensor,) if directions == 1 else tensor.chunk(directions, -1)


def _stacked(states: list[Tensor]) -> Tensor:
    """States of all directions in one tensor, which has the memory of a single one.

    It is no view for autograd, so that a caller may change it in place.
    """
    if len(states) > 1 or not states[0].is_contiguous():
        return torch.stack(states)
    whole: Tensor = torch.ops.aten._unsafe_view.default(states[0], (1, *states[0].shape))
    return whole
