"""A recurrent layer in float64, by its equations, and its gradients by theirs.

What does not depend on the step before is one product for all steps: autograd over single steps takes ten times as
long, mostly for the gradients of the weights, and a check must not take much longer than what it checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.machine.turns import pause
from tilewise.problems.recurrent.packing import Packing, packing_of
from tilewise.problems.recurrent.tensors import GATES, Recurrent, operands_of, results_of, shapes_of, weights_of

__all__ = ["reference"]

REFERENCE_BYTES = 1 << 30
"""Bytes that may be kept for the backward, roughly. More sequences than fit are computed in parts of the batch."""
EVERY = 64
"""Steps between two moments at which the program's own work may go on."""


def reference(p: Recurrent, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """All results of ``p`` in float64, in the order of its roles."""
    named = dict(zip(operands_of(p), operands, strict=True))
    by_row, weights, shapes = ("x", "y", "dx", "dy"), weights_of(p), shapes_of(p)
    packing = packing_of(p)
    kept = 8 * p.time * p.layers * p.directions * p.hidden * (2 * GATES[p.cell] + 3 + (p.projection > 0))
    size = max(1, REFERENCE_BYTES // kept) if p.task == "training" else p.batch
    found: dict[str, Tensor] = {}
    for start in range(0, p.batch, size):
        length = min(size, p.batch - start)
        within, rows = packing.part(start, length)
        rows = rows.to(operands[0].device)
        part = {}
        for role, t in named.items():
            part[role] = t.detach()
            if role in by_row:
                part[role] = t.view(-1, t.shape[-1])[rows]
            elif role not in weights:
                part[role] = t.narrow(1, start, length)
        for role, result in zip(results_of(p), _part(p, within, part), strict=True):
            if role not in found:
                found[role] = result.new_zeros(shapes[role])
            if role in by_row:
                found[role].view(-1, result.shape[-1])[rows] = result
            elif role[1:] in weights:  # a sum over the batch
                found[role] += result
            else:
                found[role].narrow(1, start, length).copy_(result)
    return tuple(found[role] for role in results_of(p))


@dataclass(frozen=True)
class _Direction:
    """One direction of one layer: its tensors in float64, and what its steps leave for the backward.

    ``gates`` (rows, gates * hidden) are the gates' values. ``states`` and ``cells`` (rows, hidden) are h and c after
    each step, ``part`` is what a GRU's n gate gets from h. The last two are empty for other cells. ``w_hr`` (width,
    hidden) projects what the gates leave, and ``of_states`` are the gradients of h; both are empty where there is no
    projection.
    """

    cell: str
    end: str
    packing: Packing
    w: Tensor
    u: Tensor
    b_x: Tensor
    b_h: Tensor
    x: Tensor
    h0: Tensor
    c0: Tensor
    gates: Tensor
    states: Tensor
    cells: Tensor
    part: Tensor
    w_hr: Tensor
    of_states: Tensor

    @classmethod
    def of(cls, p: Recurrent, packing: Packing, named: dict[str, Tensor], index: int, x: Tensor) -> _Direction:
        """The direction with this number, of which ``x`` is the input. Nothing is computed yet."""
        layer, direction = divmod(index, p.directions)
        end = f"_l{layer}" + "_reverse" * direction
        w, u = named[f"w_ih{end}"], named[f"w_hh{end}"]
        b_x, b_h = (named[f"b_{name}{end}"] if p.biases else w.new_zeros(len(w)) for name in ("ih", "hh"))
        h0 = named["h0"][index]
        states = x.new_empty(len(x), u.shape[1])
        cells = x.new_empty(len(x), p.hidden) if p.cell == "lstm" else x.new_empty(0)
        part = torch.empty_like(states) if p.cell == "gru" else x.new_empty(0)
        c0 = named["c0"][index] if p.cell == "lstm" else h0
        gates = x.new_empty(len(x), len(w))
        w_hr = named[f"w_hr{end}"] if p.projection else x.new_empty(0)
        of_states = torch.empty_like(states) if p.projection else x.new_empty(0)
        return cls(p.cell, end, packing, w, u, b_x, b_h, x, h0, c0, gates, states, cells, part, w_hr, of_states)

    @property
    def reverse(self) -> bool:
        """Whether it runs backwards in time."""
        return self.end.endswith("_reverse")

    def before(self, states: Tensor, first: Tensor) -> Tensor:
        """The state that each row began with."""
        rows = self.packing.rows_before(reverse=self.reverse)
        return torch.cat((first, states))[rows.to(states.device)]

    def run(self) -> tuple[Tensor, Tensor]:
        """Compute all steps, by the equations of torch's manual; return the last h and c.

        Sequences that have ended keep their state. Those that have not begun have their first one.
        """
        from_x = torch.addmm(self.b_x, self.x, self.w.T)
        turned, last, last_c = self.u.T.contiguous(), self.h0.clone(), self.c0.clone()
        for row, count in _pausing(self.packing.order(reverse=self.reverse)):
            rows, h = slice(row, row + count), last[:count]
            from_h = torch.addmm(self.b_h, h, turned)
            if self.cell == "lstm":
                i, f, g, o = (from_x[rows] + from_h).chunk(4, 1)
                i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
                c = f * last_c[:count] + i * g
                h = o * torch.tanh(c)
                h = h @ self.w_hr.T if len(self.w_hr) else h
                self.cells[rows] = last_c[:count] = c
                torch.cat((i, f, g, o), 1, out=self.gates[rows])
            elif self.cell == "gru":
                (xr, xz, xn), (hr, hz, hn) = from_x[rows].chunk(3, 1), from_h.chunk(3, 1)
                r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
                n = torch.tanh(xn + r * hn)
                h = (1 - z) * n + z * h
                self.part[rows] = hn
                torch.cat((r, z, n), 1, out=self.gates[rows])
            else:
                h = (torch.tanh if self.cell == "rnn_tanh" else torch.relu)(from_x[rows] + from_h)
            self.states[rows] = last[:count] = h
        return last, last_c

    def run_back(self, dy: Tensor, dh: Tensor, dc: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The gradients of what x and h give the gates, and of the first h and c, by those of ``y`` and the last ones.

        The gradient of what a gate reads is its value's times the slope: s (1 - s) of a sigmoid s, 1 - n^2 of a tanh n.
        """
        of_x = torch.empty_like(self.gates)
        of_h = torch.empty_like(self.gates) if self.cell == "gru" else of_x
        before = self.before(self.cells, self.c0) if self.cell == "lstm" else self.before(self.states, self.h0)
        dh, dc = dh.clone(), None if dc is None else dc.clone()
        for row, count in _pausing(self.packing.order(reverse=not self.reverse)):
            rows = slice(row, row + count)
            d = dh[:count] + dy[rows]
            if self.cell == "lstm":
                assert dc is not None
                i, f, g, o = self.gates[rows].chunk(4, 1)
                turned = torch.tanh(self.cells[rows])
                if len(self.w_hr):
                    self.of_states[rows] = d
                    d = d @ self.w_hr
                of_c = dc[:count] + d * o * (1 - turned * turned)
                slopes = (of_c * g * i * (1 - i), of_c * before[rows] * f * (1 - f), of_c * i * (1 - g * g))
                torch.cat((*slopes, d * turned * o * (1 - o)), 1, out=of_x[rows])
                dc[:count], direct = of_c * f, None
            elif self.cell == "gru":
                r, z, n = self.gates[rows].chunk(3, 1)
                dn = d * (1 - z) * (1 - n * n)
                drz = (dn * self.part[rows] * r * (1 - r), d * (before[rows] - n) * z * (1 - z))
                torch.cat((*drz, dn), 1, out=of_x[rows])
                torch.cat((*drz, dn * r), 1, out=of_h[rows])
                direct = d * z
            else:
                h = self.states[rows]
                of_x[rows] = d * (1 - h * h) if self.cell == "rnn_tanh" else d * (h > 0)
                direct = None
            dh[:count] = of_h[rows] @ self.u if direct is None else torch.addmm(direct, of_h[rows], self.u)
        return of_x, of_h, dh, dc

    def weight_gradients(self, of_x: Tensor, of_h: Tensor) -> dict[str, Tensor]:
        """The gradients of the weights, biases too where there are none."""
        before = self.before(self.states, self.h0)
        products = of_x.T @ self.x, of_h.T @ before
        sums = of_x.sum(0), of_h.sum(0)
        names = ("w_ih", "w_hh", "b_ih", "b_hh")
        found = {f"{name}{self.end}": t for name, t in zip(names, (*products, *sums), strict=True)}
        if len(self.w_hr):
            found[f"w_hr{self.end}"] = self.of_states.T @ (self.gates.chunk(4, 1)[3] * torch.tanh(self.cells))
        return found


def _pausing(steps: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The steps, with moments between at which the program's own work may go on."""
    for number, step in enumerate(steps):
        if number % EVERY == 0:
            pause()
        yield step


@torch.no_grad()
def _part(p: Recurrent, packing: Packing, operands: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The results for some sequences of the batch, x and y as rows."""
    named = {role: t.to(torch.float64) for role, t in operands.items()}
    x, last, run = named["x"], list[tuple[Tensor, Tensor]](), list[_Direction]()
    for layer in range(p.layers):
        halves = []
        for direction in range(p.directions):
            each = _Direction.of(p, packing, named, layer * p.directions + direction, x)
            last.append(each.run())
            halves.append(each.states)
            if p.task == "training":
                run.append(each)
        x = torch.cat(halves, 1)
    states = [torch.stack(column) for column in zip(*last, strict=True)]
    results = (x, *(states if p.cell == "lstm" else states[:1]))
    return results if p.task == "inference" else (*results, *_gradients(p, named, run))


def _gradients(p: Recurrent, named: dict[str, Tensor], run: list[_Direction]) -> Iterator[Tensor]:
    """The gradients of all operands, in their order, from the directions that were ``run``."""
    dy, found = named["dy"], dict[str, Tensor]()
    firsts: list[tuple[Tensor, Tensor | None]] = []
    for layer in reversed(range(p.layers)):
        below: list[Tensor] = []
        for direction in reversed(range(p.directions)):
            index = layer * p.directions + direction
            each, half = run[index], dy.chunk(p.directions, 1)[direction]
            dc = named["dcn"][index] if p.cell == "lstm" else None
            of_x, of_h, dh0, dc0 = each.run_back(half, named["dhn"][index], dc)
            firsts.insert(0, (dh0, dc0))
            found |= each.weight_gradients(of_x, of_h)
            below.append(of_x @ each.w)
        dy = sum(below[1:], below[0])
    yield dy
    for column in itertools.islice(zip(*firsts, strict=True), 2 if p.cell == "lstm" else 1):
        yield torch.stack(column)
    for role in weights_of(p):
        yield found[role]
