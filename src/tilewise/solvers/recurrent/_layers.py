"""The layers and directions around recurrences: the products of all steps at once, dropout, and all gradients.

What does not depend on the step before is one matrix product for all steps (Appleyard, Kocisky and Blunsom 2016,
"Optimizing performance of recurrent neural networks on GPUs", section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewise.machine.torch_state import fp32_precision
from tilewise.problems.recurrent.packing import Packing
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers.recurrent._recurrence import Recurrence, Saved

__all__ = ["Layer", "Linear", "StackedLayers"]

Outputs = tuple[Tensor, Tensor, Tensor | None, Any]
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


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
    """What backward needs: first states, and of each layer its input, output, dropout and recurrences.

    ``run`` ran the recurrences, of a batch with this ``packing``.
    """

    h0: Tensor
    c0: Tensor | None
    run: Recurrence
    packing: Packing | None
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    noises: list[Tensor | None] = field(default_factory=list)
    recurrences: list[Saved] = field(default_factory=list)


@dataclass(frozen=True)
class StackedLayers:
    """All layers and directions of ``p``, each of which runs its steps by ``recurrence``.

    ``linear`` computes the products with the inputs' weights for all steps, as ``torch.nn.functional.linear`` does.
    ``packed`` makes the recurrence of a packed batch.
    """

    p: RecurrentProblem
    recurrence: Recurrence
    linear: Linear = torch.nn.functional.linear
    packed: Callable[[Packing], Recurrence] | None = None

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
        run = self._recurrence(packing)
        p, kept = self.p, _Kept(h0, c0, run, packing)
        states: list[Tensor] = []
        cells: list[Tensor] = []
        with self._precision():
            for layer in range(p.layers):
                noise = None
                if layer and dropout:
                    noise = torch.nn.functional.dropout(torch.ones_like(x), dropout)
                    x = x * noise
                y = x.new_empty((*x.shape[:-1], p.directions * p.hidden))
                for direction, half in enumerate(y.chunk(p.directions, -1)):
                    index = layer * p.directions + direction
                    w, u, *biases = self._weights(weights, index)
                    b_x, b_n = self._biases(biases)
                    gx = self.linear(x.view(-1, x.shape[-1]), w, b_x).view(*x.shape[:-1], -1)
                    c = None if c0 is None else c0[index]
                    hn, cn, saved = run.forward(gx, u, b_n, h0[index], c, half, reverse=direction == 1, keep=keep)
                    states.append(hn)
                    if cn is not None:
                        cells.append(cn)
                    if keep:
                        kept.recurrences.append(saved)
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
                for direction, dhalf in enumerate(dout.chunk(p.directions, -1)):
                    index = layer * p.directions + direction
                    dgates, dstates = self._steps_back(kept, weights, index, dhalf, dhn, dcn, dh0, dc0)
                    flat = dgates.view(-1, dgates.shape[-1])
                    if layer or needs[0]:
                        w = self._weights(weights, index)[0]
                        dx = self.linear(flat, w.T, None) if dx is None else torch.addmm(dx, flat, w)
                    self._weight_gradients(kept, index, flat, dstates, needs[3:], gradients)
                if layer:
                    assert dx is not None
                    dout = dx.view(*dout.shape[:-1], -1)
                    noise = kept.noises[layer]
                    dout = dout if noise is None else dout * noise
        return (
            None if dx is None else dx.view(*dout.shape[:-1], -1),
            dh0 if needs[1] else None,
            dc0 if needs[2] else None,
            *gradients,
        )

    def _steps_back(
        self,
        kept: _Kept,
        weights: Sequence[Tensor],
        index: int,
        dhalf: Tensor,
        dhn: Tensor | None,
        dcn: Tensor | None,
        dh0: Tensor,
        dc0: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the recurrence of ``index`` backwards: gradients of its gates, and those of a GRU's n gate from h."""
        _, u, *biases = self._weights(weights, index)
        dgates, dstates, dh, dc = kept.run.backward(
            kept.recurrences[index],
            u,
            self._biases_of_n(biases),
            kept.h0[index],
            None if kept.c0 is None else kept.c0[index],
            self._half(kept, index),
            dhalf,
            None if dhn is None else dhn[index],
            None if dcn is None else dcn[index],
            reverse=index % self.p.directions == 1,
        )
        dh0[index].copy_(dh)
        if dc0 is not None and dc is not None:
            dc0[index].copy_(dc)
        return dgates, dstates

    def _weight_gradients(
        self,
        kept: _Kept,
        index: int,
        flat: Tensor,
        dstates: Tensor | None,
        needs: Sequence[bool],
        gradients: list[Tensor | None],
    ) -> None:
        """Set the ``gradients`` of the weights of one recurrence; ``flat`` (T*N, G*H) are those of its gates."""
        first = index * self._count
        needed = list(needs[first : first + self._count])
        if needed[0]:
            x = kept.inputs[index // self.p.directions]
            gradients[first] = flat.T @ x.view(-1, x.shape[-1])
        hidden = self.p.hidden
        parts = [flat] if dstates is None else [flat[:, : 2 * hidden], dstates.view(-1, hidden)]
        """Gradients of what the state gives each gate."""
        if needed[1]:
            products = [self._from_states(kept, index, part) for part in parts]
            gradients[first + 1] = products[0] if len(products) == 1 else torch.cat(products)
        if any(needed[2:]):
            sums = [part.sum(0) for part in parts]
            if needed[2]:
                gradients[first + 2] = sums[0] if dstates is None else flat.sum(0)
            if needed[3]:
                gradients[first + 3] = sums[0].clone() if len(sums) == 1 else torch.cat(sums)

    def _from_states(self, kept: _Kept, index: int, part: Tensor) -> Tensor:
        """The sum over steps of ``part`` (T*N, R), transposed, times the state before the step: (R, H)."""
        reverse, n = index % self.p.directions == 1, self.p.batch
        y = self._half(kept, index)
        if kept.packing is not None:
            rows = kept.packing.rows_before(reverse=reverse).to(y.device)
            return part.T @ torch.cat((kept.h0[index], y))[rows]
        before, at, later = (y[1:], part[-n:], part[:-n]) if reverse else (y[:-1], part[:n], part[n:])
        product = at.T @ kept.h0[index]
        if self.p.time == 1:
            return product
        return torch.addmm(product, later.T, before.reshape(-1, self.p.hidden))

    def _half(self, kept: _Kept, index: int) -> Tensor:
        """The output of one direction of one layer."""
        layer, direction = divmod(index, self.p.directions)
        return kept.outputs[layer].chunk(self.p.directions, -1)[direction]

    def _recurrence(self, packing: Packing | None) -> Recurrence:
        """What runs the steps of a batch. Raises ``ValueError`` where a packed batch cannot be run."""
        if packing is None:
            return self.recurrence
        if self.packed is None:
            raise ValueError("packing: this layer runs all steps of every sequence; None would do")
        return self.packed(packing)

    @property
    def _count(self) -> int:
        """Weights of one direction of one layer."""
        return 4 if self.p.biases else 2

    def _weights(self, weights: Sequence[Tensor], index: int) -> Sequence[Tensor]:
        """The weights of one direction of one layer."""
        return weights[index * self._count : (index + 1) * self._count]

    def _biases(self, biases: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """What is added to the product with the input, and what to that of a GRU's n gate with the state."""
        if not biases:
            return None, None
        of_x, of_h = biases
        if self.p.cell != "gru":
            return of_x + of_h, None
        both = of_x.clone()
        both[: 2 * self.p.hidden] += of_h[: 2 * self.p.hidden]
        return both, self._biases_of_n(biases)

    def _biases_of_n(self, biases: Sequence[Tensor]) -> Tensor | None:
        """The bias of a GRU's n gate that is added to the product with the state."""
        return biases[1][2 * self.p.hidden :] if biases and self.p.cell == "gru" else None

    def _precision(self) -> AbstractContextManager[None]:
        """A context with the problem's precision of matrix products."""
        p = self.p
        return fp32_precision(p.device_type, "matmul", p.precision if p.device_type == "cuda" else "ieee")
