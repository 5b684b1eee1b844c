"""The layers around clusters of blocks: all directions or all layers in one launch, the input's products before it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewise.machine.torch_state import fp32_precision
from tilewise.problems.recurrent.packing import Packing
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers.recurrent._cluster_recurrence import ClusterKept, ClusterRecurrence
from tilewise.solvers.recurrent._direction import Direction, Span
from tilewise.solvers.recurrent._layers import Outputs

__all__ = ["ClusterLayers"]


class _Products(Direction):
    """The products around the steps of a direction."""

    def input_part(self, x: Tensor, weights: Sequence[Tensor], out: Tensor) -> Tensor | None:
        """Write what the input gives each gate to ``out`` (T, N, G*H), and return the bias of a GRU's n gate."""
        w, (b_x, b_n) = weights[0], self.biases(weights)
        rows, to = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        if b_x is None:
            torch.mm(rows, w.T, out=to)
        else:
            torch.addmm(b_x, rows, w.T, out=to)
        return b_n

    def biases(self, weights: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """What is added to the product with the input, and what to that of a GRU's n gate with the state."""
        *_, biases, of_n = self._parted(weights)
        return self._bias_x(biases), of_n

    def gradients(
        self, x: Tensor, y: Tensor, h0: Tensor, weights: Sequence[Tensor], changes: Tensor, own: Tensor | None,
        dx: Tensor | None, needs: Sequence[bool],
    ) -> tuple[Tensor | None, list[Tensor | None]]:  # fmt: skip
        """The gradients of x, added to ``dx`` where there is one, and of the weights, from those of the gates."""
        time, batch, _ = x.shape
        sums: list[Tensor | None] = [None] * len(weights)
        span, flat = Span(slice(0, time), (time, batch), batch), changes.reshape(-1, changes.shape[-1])
        self._add_weight_gradients(span, x, y, h0, flat, own, needs[1:], sums)
        found = [t if t is None else t.to(weight.dtype) for t, weight in zip(sums, weights, strict=True)]
        if not needs[0]:
            return None, found
        w = weights[0]
        if dx is None:
            return (flat @ w).view(x.shape), found
        return torch.addmm(dx.view(-1, w.shape[1]), flat, w).view(x.shape), found


@dataclass
class _Kept:
    """What backward needs: first states, and of each layer its input, output, dropout and steps.

    Of layers that ran at once there are the input of the first one, the output of the last one, and all steps.
    """

    h0: Tensor
    c0: Tensor | None
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    noises: list[Tensor | None] = field(default_factory=list)
    steps: list[ClusterKept] = field(default_factory=list)

    def add(self, x: Tensor, y: Tensor, noise: Tensor | None, steps: ClusterKept) -> None:
        """Keep the next layer, or all."""
        self.inputs.append(x)
        self.outputs.append(y)
        self.noises.append(noise)
        self.steps.append(steps)


@dataclass(frozen=True)
class ClusterLayers:
    """All layers of ``p`` one after the other, of each both directions at once by ``recurrence``.

    With ``wave`` all layers run at once forward, each a few steps behind the one below it, but with dropout between
    them.
    """

    p: RecurrentProblem
    recurrence: ClusterRecurrence
    wave: bool = False

    def forward(
        self, x: Tensor, h0: Tensor, c0: Tensor | None, weights: Sequence[Tensor], *, dropout: float = 0.0,
        packing: Packing | None = None, keep: bool,
    ) -> Outputs:  # fmt: skip
        """As :meth:`~tilewise.solvers.recurrent._layers.Layer.forward`. Raises ``ValueError`` for a packed batch."""
        if packing is not None:
            raise ValueError(f"packing={packing!r}: clusters take sequences of one length only")
        kept = _Kept(h0, c0)
        with self._precision():
            run = self._all_layers if self.wave and not dropout else self._each_layer
            y, hn, cn = run(x, kept, weights, dropout, keep)
        return y, hn, cn, kept if keep else None

    def _each_layer(
        self, x: Tensor, kept: _Kept, weights: Sequence[Tensor], dropout: float, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One layer after the other: y, hn and cn."""
        states, cells = list[Tensor](), list[Tensor]()
        for layer in range(self.p.layers):
            noise = None
            if layer and dropout:
                noise = torch.nn.functional.dropout(torch.ones_like(x), dropout)
                x = x * noise
            y, hn, cn, steps = self._layer(layer, x, kept, weights, keep)
            states.append(hn)
            cells += [] if cn is None else [cn]
            if steps is not None:
                kept.add(x, y, noise, steps)
            x = y
        return x, _joined(states), _joined(cells) if cells else None

    def _layer(
        self, layer: int, x: Tensor, kept: _Kept, weights: Sequence[Tensor], keep: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, ClusterKept | None]:
        """One layer: y, hn, cn, and what is kept. All else is released before the next one has its own."""
        p = self.p
        y = x.new_empty((*x.shape[:-1], p.directions * p.hidden))
        gx = x.new_empty((p.directions, *x.shape[:-1], p.gates * p.hidden))
        own = [self._weights(weights, layer, direction) for direction in range(p.directions)]
        biases = [self._direction(i).input_part(x, own[i], gx[i]) for i in range(p.directions)]
        part = slice(layer * p.directions, (layer + 1) * p.directions)
        c0 = None if kept.c0 is None else kept.c0[part]
        us = [each[1] for each in own]
        hn, cn, steps = self.recurrence.forward(gx, us, biases, kept.h0[part], c0, y, keep=keep)
        return y, hn, cn, steps if keep else None

    def _all_layers(
        self, x: Tensor, kept: _Kept, weights: Sequence[Tensor], dropout: float, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """All layers at once: y, hn and cn."""
        p = self.p
        y = x.new_empty((*x.shape[:-1], p.hidden))
        gx = x.new_empty((p.layers, *x.shape[:-1], p.gates * p.hidden))
        own = [self._weights(weights, layer, 0) for layer in range(p.layers)]
        first, shifts = self._direction(0).input_part(x, own[0], gx[0]), [self._direction(0).biases(w) for w in own[1:]]
        hn, cn, steps = self.recurrence.wave(
            gx, [w[1] for w in own], [w[0] for w in own[1:]], [first, *(of_h for _, of_h in shifts)],
            [of_x for of_x, _ in shifts], kept.h0, kept.c0, y, keep=keep,
        )  # fmt: skip
        if keep:
            kept.add(x, y, None, steps)
        return y, hn, cn

    def backward(
        self, saved: Any, weights: Sequence[Tensor], dy: Tensor | None, dhn: Tensor | None, dcn: Tensor | None,
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """As :meth:`~tilewise.solvers.recurrent._layers.Layer.backward`."""
        kept, gradients = saved, list[Tensor | None]([None] * len(weights))
        dout = torch.zeros_like(kept.outputs[-1]) if dy is None else dy
        with self._precision():
            run = self._each_layer_back if len(kept.steps) == self.p.layers else self._all_layers_back
            dx, dh0, dc0 = run(kept, weights, dout, dhn, dcn, needs, gradients)
        return dx, dh0 if needs[1] else None, dc0 if needs[2] else None, *gradients

    def _each_layer_back(
        self, kept: _Kept, weights: Sequence[Tensor], dout: Tensor, dhn: Tensor | None, dcn: Tensor | None,
        needs: Sequence[bool], gradients: list[Tensor | None],
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:  # fmt: skip
        """One layer after the other: the gradients of x, h0 and c0. Those of the weights are put into ``gradients``."""
        dx, firsts, first_cells = None, list[Tensor](), list[Tensor]()
        for layer in range(self.p.layers - 1, -1, -1):
            dx, dh, dc = self._layer_back(layer, kept, weights, dout, dhn, dcn, needs, gradients)
            firsts.insert(0, dh)
            first_cells[:0] = [] if dc is None else [dc]
            noise = kept.noises[layer]
            if layer:
                assert dx is not None
                dout = dx if noise is None else dx * noise
        return dx, _joined(firsts), _joined(first_cells) if first_cells else None

    def _layer_back(
        self, layer: int, kept: _Kept, weights: Sequence[Tensor], dout: Tensor, dhn: Tensor | None, dcn: Tensor | None,
        needs: Sequence[bool], gradients: list[Tensor | None],
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:  # fmt: skip
        """One layer of :meth:`_each_layer_back`. All else is released before the next one has its own."""
        p, dx = self.p, None
        part = slice(layer * p.directions, (layer + 1) * p.directions)
        own = [self._weights(weights, layer, direction) for direction in range(p.directions)]
        h0 = kept.h0[part]
        c0, last, last_cell = (None if t is None else t[part] for t in (kept.c0, dhn, dcn))
        changes, by_weights, dh, dc = self.recurrence.backward(
            kept.steps[layer], [each[1] for each in own], h0, c0, dout, last, last_cell
        )
        for i, half in enumerate(kept.outputs[layer].chunk(p.directions, -1)):
            places, needed = self._needed(layer, i, needs)
            of_u = None if by_weights is None else by_weights[i]
            dx, gradients[places] = self._direction(i).gradients(
                kept.inputs[layer], half, h0[i], own[i], changes[i], of_u, dx, needed
            )
        return dx, dh, dc

    def _all_layers_back(
        self, kept: _Kept, weights: Sequence[Tensor], dout: Tensor, dhn: Tensor | None, dcn: Tensor | None,
        needs: Sequence[bool], gradients: list[Tensor | None],
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:  # fmt: skip
        """All layers at once, as :meth:`_each_layer_back`."""
        (steps,), (x,), (y,) = kept.steps, kept.inputs, kept.outputs
        own = [self._weights(weights, layer, 0) for layer in range(self.p.layers)]
        changes, by_weights, dh0, dc0 = self.recurrence.wave_backward(
            steps, y, [w[1] for w in own], [w[0] for w in own[1:]], kept.h0, kept.c0, dout, dhn, dcn
        )
        dx, outputs = None, [*steps.states, y]
        for layer, below in enumerate((x, *steps.states)):
            places, needed = self._needed(layer, 0, needs)
            of_u = None if by_weights is None else by_weights[layer]
            needed = needed[0] and not layer, *needed[1:]  # the other layers' inputs have theirs
            found, gradients[places] = self._direction(0).gradients(
                below, outputs[layer], kept.h0[layer], own[layer], changes[layer], of_u, None, needed
            )
            dx = dx if layer else found
        return dx, dh0, dc0

    def _needed(self, layer: int, direction: int, needs: Sequence[bool]) -> tuple[slice, tuple[bool, ...]]:
        """The places of a direction's weights, and whether the gradients of its input and of each are needed."""
        first = (layer * self.p.directions + direction) * self._count
        places = slice(first, first + self._count)
        return places, (layer > 0 or needs[0], *needs[3:][places])

    def _direction(self, number: int) -> _Products:
        """What computes the products of a direction; its steps are not run by it."""
        return _Products(self.p.hidden, self.p.cell == "gru", False, number == 1, _none, torch._C._nn.linear)

    @property
    def _count(self) -> int:
        """Weights of one direction of one layer."""
        return 4 if self.p.biases else 2

    def _weights(self, weights: Sequence[Tensor], layer: int, direction: int) -> Sequence[Tensor]:
        """The weights of one direction of one layer."""
        first = (layer * self.p.directions + direction) * self._count
        return weights[first : first + self._count]

    def _precision(self) -> AbstractContextManager[None]:
        """A context with the problem's precision of matrix products."""
        p = self.p
        return fp32_precision(p.device_type, "matmul", p.precision if p.device_type == "cuda" else "ieee")


def _none(packing: Packing | None) -> Any:
    """In place of what runs steps. Raises ``RuntimeError``: clusters run all directions at once."""
    raise RuntimeError(f"packing={packing!r}: a direction of clusters runs no steps by itself")


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts of each layer as one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
