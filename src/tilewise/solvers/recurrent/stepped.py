"""Recurrent layers step by step with torch's plain operators, forward and backward by the cells' equations.

It takes every layer. Kernels that run all steps at once are tested against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.plan import Config
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers.base import Cost
from tilewise.solvers.recurrent._layers import Layer, StackedLayers
from tilewise.solvers.recurrent._recurrence import Recurrence, Saved
from tilewise.solvers.recurrent._recurrent import RecurrentSolver, recurrent_cost

OPERATORS = {"rnn_tanh": 3, "rnn_relu": 3, "gru": 11, "lstm": 12}
"""Operators of a step of each cell, roughly."""
Product = Callable[[Tensor, Tensor], Tensor]


class Stepped(RecurrentSolver):
    """The input's products for all steps at once, then one product and a few operators a step."""

    name, version = "stepped", 1

    def cost(self, p: RecurrentProblem, c: Config) -> Cost:
        """The products, and every operator of every step."""
        times = 1 if p.task == "inference" else 3
        return recurrent_cost(p, times * p.time * p.layers * p.directions * OPERATORS[p.cell], 0.7)

    def layer(self, p: RecurrentProblem, c: Config) -> Layer:
        """Layers around torch's operators."""
        return StackedLayers(p, recurrence(p))


def recurrence(p: RecurrentProblem) -> Recurrence:
    """The steps of one layer of ``p`` in one direction."""
    kinds: dict[str, type[_Plain | _Gru | _Lstm]] = {"gru": _Gru, "lstm": _Lstm}
    return kinds.get(p.cell, _Plain)(p.cell, p.device_type == "cuda")


def _widened(on_gpu: bool, weight: Tensor) -> tuple[Tensor, Product]:
    """A weight, and a function that multiplies by it with sums and results in fp32.

    GPUs multiply 16-bit numbers as they are; on a CPU they are widened, which loses nothing.
    """
    if weight.dtype is torch.float32 or not on_gpu:
        return weight.float(), lambda a, w: torch.mm(a.float(), w)
    return weight, lambda a, w: torch.mm(a.to(w.dtype), w, out_dtype=torch.float32)


@dataclass(frozen=True)
class _Steps:
    """What the cells have in common."""

    cell: str
    on_gpu: bool

    def order(self, steps: int, reverse: bool) -> Iterable[int]:
        """The steps in the order in which the forward runs."""
        return range(steps - 1, -1, -1) if reverse else range(steps)


class _Plain(_Steps):
    """``h' = tanh(gx + U h)``, or relu."""

    def forward(
        self,
        gx: Tensor,
        u: Tensor,
        bias_n: Tensor | None,
        h0: Tensor,
        c0: Tensor | None,
        y: Tensor,
        *,
        reverse: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """As :meth:`Recurrence.forward`. Saved are the states before they are rounded, where that differs."""
        turned, product = _widened(self.on_gpu, u.T)
        states = gx.new_empty(gx.shape, dtype=torch.float32) if keep and gx.dtype is not torch.float32 else None
        act, h = torch.tanh if self.cell == "rnn_tanh" else torch.relu, h0
        for t in self.order(len(gx), reverse):
            state = act(product(h, turned) + gx[t])
            y[t] = state
            h = y[t]
            if states is not None:
                states[t] = state
        return h.clone(), None, states

    def backward(
        self,
        saved: Saved,
        u: Tensor,
        bias_n: Tensor | None,
        h0: Tensor,
        c0: Tensor | None,
        y: Tensor,
        dy: Tensor,
        dhn: Tensor | None,
        dcn: Tensor | None,
        *,
        reverse: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """As :meth:`Recurrence.backward`."""
        weight, product = _widened(self.on_gpu, u)
        states = y if saved is None else saved
        dgates = y.new_empty(y.shape)
        dh = _start(dhn, h0)
        for t in self.order(len(y), not reverse):
            dh, h = dh + dy[t], states[t]
            dgates[t] = dh * (1 - h * h) if self.cell == "rnn_tanh" else dh * (h > 0)
            dh = product(dgates[t], weight)
        return dgates, None, dh.to(h0.dtype), None


class _Gru(_Steps):
    """``h' = (1 - z) n + z h`` with ``n = tanh(gx_n + r (U_n h + b_n))``."""

    def forward(
        self,
        gx: Tensor,
        u: Tensor,
        bias_n: Tensor | None,
        h0: Tensor,
        c0: Tensor | None,
        y: Tensor,
        *,
        reverse: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """As :meth:`Recurrence.forward`. Saved are r, z, n and U_n h + b_n, side by side in fp32."""
        turned, product = _widened(self.on_gpu, u.T)
        steps, n_batch, hidden = y.shape
        saved = gx.new_empty((steps, n_batch, 4 * hidden), dtype=torch.float32) if keep else None
        h = h0
        for t in self.order(steps, reverse):
            of_h = product(h, turned)
            from_h = of_h[:, 2 * hidden :] if bias_n is None else of_h[:, 2 * hidden :] + bias_n
            rz = torch.sigmoid(of_h[:, : 2 * hidden] + gx[t, :, : 2 * hidden])
            r, z = rz.chunk(2, 1)
            n = torch.tanh(r * from_h + gx[t, :, 2 * hidden :])
            if saved is not None:
                torch.cat((rz, n, from_h), 1, out=saved[t])
            y[t] = n + z * (h - n)
            h = y[t]
        return h.clone(), None, saved

    def backward(
        self,
        saved: Saved,
        u: Tensor,
        bias_n: Tensor | None,
        h0: Tensor,
        c0: Tensor | None,
        y: Tensor,
        dy: Tensor,
        dhn: Tensor | None,
        dcn: Tensor | None,
        *,
        reverse: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """As :meth:`Recurrence.backward`."""
        weight, product = _widened(self.on_gpu, u)
        steps, n_batch, hidden = y.shape
        dgates = y.new_empty((steps, n_batch, 3 * hidden))
        dstates = y.new_empty((steps, n_batch, hidden))
        dh = _start(dhn, h0)
        for t in self.order(steps, not reverse):
            dh = dh + dy[t]
            r, z, n, from_h = saved[t].chunk(4, 1)
            before = _before(y, h0, t, reverse)
            dn = dh * (1 - z) * (1 - n * n)
            dr = dn * from_h * r * (1 - r)
            dz = dh * (before - n) * z * (1 - z)
            dstates[t] = dn * r
            dgates[t] = torch.cat((dr, dz, dn), 1)
            dh = dh * z + product(torch.cat((dgates[t, :, : 2 * hidden], dstates[t]), 1), weight)
        return dgates, dstates, dh.to(h0.dtype), None


class _Lstm(_Steps):
    """``c' = f c + i g`` and ``h' = o tanh(c')``."""

    def forward(
        self,
        gx: Tensor,
        u: Tensor,
        bias_n: Tensor | None,
        h0: Tensor,
        c0: Tensor | None,
        y: Tensor,
        *,
        reverse: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """As :meth:`Recurrence.forward`. Saved are the gates and c after each step, in fp32."""
        assert c0 is not None
        turned, product = _widened(self.on_gpu, u.T)
        gates = gx.new_empty(gx.shape, dtype=torch.float32) if keep else None
        cells = y.new_empty(y.shape, dtype=torch.float32) if keep else None
        h, c = h0, c0.float()
        for t in self.order(len(gx), reverse):
            i, f, g, o = (product(h, turned) + gx[t]).chunk(4, 1)
            i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
            c = f * c + i * g
            y[t] = o * torch.tanh(c)
            h = y[t]
            if gates is not None and cells is not None:
                torch.cat((i, f, g, o), 1, out=gates[t])
                cells[t] = c
        return h.clone(), c.to(c0.dtype), (gates, cells)

    def backward(
        self,
        saved: Saved,
        u: Tensor,
        bias_n: Tensor | None,
        h0: Tensor,
        c0: Tensor | None,
        y: Tensor,
        dy: Tensor,
        dhn: Tensor | None,
        dcn: Tensor | None,
        *,
        reverse: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """As :meth:`Recurrence.backward`."""
        assert c0 is not None
        gates, cells = saved
        weight, product = _widened(self.on_gpu, u)
        dgates = y.new_empty(gates.shape)
        dh, dc = _start(dhn, h0), _start(dcn, c0)
        for t in self.order(len(y), not reverse):
            dh = dh + dy[t]
            i, f, g, o = gates[t].chunk(4, 1)
            turned = torch.tanh(cells[t])
            dc = dc + dh * o * (1 - turned * turned)
            di, df = dc * g * i * (1 - i), dc * _before(cells, c0, t, reverse) * f * (1 - f)
            dg, do = dc * i * (1 - g * g), dh * turned * o * (1 - o)
            dgates[t] = torch.cat((di, df, dg, do), 1)
            dc = dc * f
            dh = product(dgates[t], weight)
        return dgates, None, dh.to(h0.dtype), dc.to(c0.dtype)


def _start(gradient: Tensor | None, state: Tensor) -> Tensor:
    """The gradient of a last state in fp32, zeros where there is none."""
    return torch.zeros_like(state, dtype=torch.float32) if gradient is None else gradient.float()


def _before(states: Tensor, first: Tensor, t: int, reverse: bool) -> Tensor:
    """The state that step ``t`` began with."""
    earlier = t + 1 if reverse else t - 1
    return states[earlier] if 0 <= earlier < len(states) else first.float()
