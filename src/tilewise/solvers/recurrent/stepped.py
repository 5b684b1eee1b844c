"""Recurrent layers step by step with torch's plain operators, forward and backward by the cells' equations.

It takes every layer. Kernels that run all steps at once are tested against it.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from tilewise.plan import Config
from tilewise.problems.recurrent.packing import Packing, dense_packing
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers.base import Cost, SolverUnavailable
from tilewise.solvers.common.replays import Replays
from tilewise.solvers.recurrent._layers import Layer, StackedLayers
from tilewise.solvers.recurrent._recurrence import Recurrence, Saved
from tilewise.solvers.recurrent._recurrent import RecurrentSolver, block_of, is_on_host, recurrent_cost, rows_at_a_time
from tilewise.solvers.recurrent._replayed import Replayed, bytes_of_graphs

OPERATORS = {"rnn_tanh": 3, "rnn_relu": 3, "gru": 11, "lstm": 12}
"""Operators of a step of each cell, roughly."""
REPLAYED = 4
"""Operators of a replay that take as long as one that is launched by itself, roughly."""
Product = Callable[[Tensor, Tensor], Tensor]


class Stepped(RecurrentSolver):
    """The input's products for all steps at once, then one product and a few operators a step.

    On a GPU launching all these takes the host longer than they run. With ``steps`` ``replayed`` they are recorded as
    CUDA graphs once for each size, and a call replays them: the same kernels, so that results have the same bits. The
    graphs' memory counts. Within a capture of the program's own the steps are launched as part of it.
    """

    name, version = "stepped", 2
    by_blocks = projects = moves_to_host = True

    def configs(self, p: RecurrentProblem) -> Iterable[Config]:
        """On a GPU replays of graphs, and launches one by one."""
        if p.device_type == "cuda":
            yield Config(steps="replayed")
        yield Config()

    def hidden_workspace(self, p: RecurrentProblem, c: Config) -> int:
        """What all layers have, and what graphs hold."""
        graphs = bytes_of_graphs(p, rows_at_a_time(p, c)) if "steps" in c else 0
        return super().hidden_workspace(p, c) + graphs

    def cost(self, p: RecurrentProblem, c: Config) -> Cost:
        """The products, and every operator of every step, of which a replayed one takes less than a launch."""
        times = 1 if p.task == "inference" else 3
        launches = times * p.time * p.layers * p.directions * OPERATORS[p.cell]
        return recurrent_cost(p, c, launches // REPLAYED if "steps" in c else launches, 0.7)

    def layer(self, p: RecurrentProblem, c: Config) -> Layer:
        """Layers around torch's operators. Raises ``SolverUnavailable`` for replays on a CPU."""
        if "steps" not in c:
            return StackedLayers(
                p, recurrence(p), packed=functools.partial(recurrence, p), block=block_of(c), on_host=is_on_host(c)
            )
        if p.device_type != "cuda":
            raise SolverUnavailable(f"{c} is no config of {p.key}: CUDA graphs need a GPU")
        return replayed_layers(p, block_of(c), Replays(), on_host=is_on_host(c))


def replayed_layers(p: RecurrentProblem, block: int, replays: Replays, *, on_host: bool = False) -> StackedLayers:
    """Layers whose steps are replayed, ``block`` of them at a time, or all where that is 0."""

    def packed(packing: Packing) -> Replayed:
        return Replayed(recurrence(p, packing), replays, 0, packing)

    return StackedLayers(
        p, Replayed(recurrence(p), replays, block or p.time), packed=packed, block=block, on_host=on_host
    )


def recurrence(p: RecurrentProblem, packing: Packing | None = None) -> Recurrence:
    """The steps of one layer of ``p`` in one direction, of a batch with this ``packing``; ``None``: all have all."""
    kinds: dict[str, type[_Plain | _Gru | _Lstm]] = {"gru": _Gru, "lstm": _Lstm}
    return kinds.get(p.cell, _Plain)(p.cell, p.device_type == "cuda", packing)


def _widened(on_gpu: bool, weight: Tensor) -> tuple[Tensor, Product]:
    """A weight, and a function that multiplies by it with sums and results in fp32.

    GPUs multiply 16-bit numbers as they are; on a CPU they are widened, which loses nothing.
    """
    if weight.dtype is torch.float32 or not on_gpu:
        return weight.float(), lambda a, w: torch.mm(a.float(), w)
    return weight, lambda a, w: torch.mm(a.to(w.dtype), w, out_dtype=torch.float32)


def _by(on_gpu: bool, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that multiplies by a weight as that of :func:`_widened`."""
    wide, product = _widened(on_gpu, weight)
    return lambda a: product(a, wide)


@dataclass(frozen=True)
class _Steps(abc.ABC):
    """What the cells have in common."""

    cell: str
    on_gpu: bool
    packing: Packing | None

    def forward(
        self,
        gx: Tensor,
        u: Tensor,
        own: Tensor | None,
        h0: Tensor,
        c0: Tensor | None,
        y: Tensor,
        /,
        *,
        reverse: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """As :meth:`Recurrence.forward`."""
        return self._of(y).run(_rows(gx), u, own, h0, c0, _rows(y), reverse=reverse, keep=keep)

    def backward(
        self,
        saved: Saved,
        u: Tensor,
        own: Tensor | None,
        h0: Tensor,
        c0: Tensor | None,
        y: Tensor,
        dy: Tensor,
        dhn: Tensor | None,
        dcn: Tensor | None,
        /,
        *,
        reverse: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """As :meth:`Recurrence.backward`."""
        flat = dy.reshape(-1, dy.shape[-1])
        found = self._of(y).run_back(saved, u, own, h0, c0, _rows(y), flat, dhn, dcn, reverse=reverse)
        dgates, of_own, dh, dc = found
        leading = y.shape[:-1]
        if self.cell == "gru" and of_own is not None:
            of_own = of_own.view(*leading, -1)
        return dgates.view(*leading, -1), of_own, dh, dc

    @abc.abstractmethod
    def run(
        self,
        gx: Tensor,
        u: Tensor,
        own: Tensor | None,
        h0: Tensor,
        c0: Tensor | None,
        y: Tensor,
        /,
        *,
        reverse: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """As :meth:`forward`, with the rows of all steps behind one another."""

    @abc.abstractmethod
    def run_back(
        self,
        saved: Saved,
        u: Tensor,
        own: Tensor | None,
        h0: Tensor,
        c0: Tensor | None,
        y: Tensor,
        dy: Tensor,
        dhn: Tensor | None,
        dcn: Tensor | None,
        /,
        *,
        reverse: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """As :meth:`backward`, with the rows of all steps behind one another."""

    def _of(self, y: Tensor) -> Self:
        """This, for the steps and sequences of ``y``."""
        return self if self.packing is not None else replace(self, packing=dense_packing(*y.shape[:2]))

    def order(self, *, reverse: bool) -> Iterable[tuple[slice, int]]:
        """The rows of each step and their number, in the order in which a forward runs."""
        assert self.packing is not None
        return ((slice(row, row + count), count) for row, count in self.packing.order(reverse=reverse))

    def back(self, *, reverse: bool) -> Iterable[tuple[slice, int, slice]]:
        """As :meth:`order`, in the order of a backward, and the rows of the step before, of which there may be none."""
        assert self.packing is not None
        steps = [slice(row, row + count) for row, count in self.packing.order(reverse=not reverse)]
        for rows, earlier in zip(steps, [*steps[1:], slice(0, 0)], strict=True):
            count = rows.stop - rows.start
            yield rows, count, slice(earlier.start, min(earlier.stop, earlier.start + count))


def _rows(tensor: Tensor) -> Tensor:
    """The rows of all steps, as a view."""
    return tensor.view(-1, tensor.shape[-1])


def _before(states: Tensor, first: Tensor, count: int, earlier: slice) -> Tensor:
    """The states with which ``count`` sequences began a step: those of ``earlier`` rows, then first ones."""
    begun = earlier.stop - earlier.start
    if begun == count:
        return states[earlier]
    return torch.cat((states[earlier].float(), first[begun:count].float())) if begun else first[:count].float()


def _carried(new: Tensor, old: Tensor) -> Tensor:
    """A state after a step in which the first sequences took part."""
    return new if len(new) == len(old) else torch.cat((new, old[len(new) :]))


class _Plain(_Steps):
    """``h' = tanh(gx + U h)``, or relu."""

    def run(
        self,
        gx: Tensor,
        u: Tensor,
        bias_n: Tensor | None,
        h0: Tensor,
        c0: Tensor | None,
        y: Tensor,
        /,
        *,
        reverse: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """As :meth:`_Steps.forward`, on rows. Saved are the states before they are rounded, where that differs."""
        turned, product = _widened(self.on_gpu, u.T)
        states = gx.new_empty(gx.shape, dtype=torch.float32) if keep and gx.dtype is not torch.float32 else None
        act, h = torch.tanh if self.cell == "rnn_tanh" else torch.relu, h0
        for rows, count in self.order(reverse=reverse):
            state = act(product(h[:count], turned) + gx[rows])
            y[rows] = state
            h = _carried(y[rows], h)
            if states is not None:
                states[rows] = state
        return h.clone(), None, states

    def run_back(
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
        /,
        *,
        reverse: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """As :meth:`_Steps.backward`, on rows."""
        weight, product = _widened(self.on_gpu, u)
        states = y if saved is None else saved
        dgates = y.new_empty(y.shape)
        dh = _start(dhn, h0)
        for rows, count, _ in self.back(reverse=reverse):
            d, h = dh[:count] + dy[rows], states[rows]
            dgates[rows] = d * (1 - h * h) if self.cell == "rnn_tanh" else d * (h > 0)
            dh = _carried(product(dgates[rows], weight), dh)
        return dgates, None, dh.to(h0.dtype), None


class _Gru(_Steps):
    """``h' = (1 - z) n + z h`` with ``n = tanh(gx_n + r (U_n h + b_n))``."""

    def run(
        self,
        gx: Tensor,
        u: Tensor,
        bias_n: Tensor | None,
        h0: Tensor,
        c0: Tensor | None,
        y: Tensor,
        /,
        *,
        reverse: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """As :meth:`_Steps.forward`, on rows. Saved are r, z, n and U_n h + b_n, side by side in fp32."""
        turned, product = _widened(self.on_gpu, u.T)
        hidden = y.shape[-1]
        saved = gx.new_empty((len(y), 4 * hidden), dtype=torch.float32) if keep else None
        h = h0
        for rows, count in self.order(reverse=reverse):
            of_h = product(h[:count], turned)
            from_h = of_h[:, 2 * hidden :] if bias_n is None else of_h[:, 2 * hidden :] + bias_n
            rz = torch.sigmoid(of_h[:, : 2 * hidden] + gx[rows, : 2 * hidden])
            r, z = rz.chunk(2, 1)
            n = torch.tanh(r * from_h + gx[rows, 2 * hidden :])
            if saved is not None:
                torch.cat((rz, n, from_h), 1, out=saved[rows])
            y[rows] = n + z * (h[:count] - n)
            h = _carried(y[rows], h)
        return h.clone(), None, saved

    def run_back(
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
        /,
        *,
        reverse: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """As :meth:`_Steps.backward`, on rows."""
        weight, product = _widened(self.on_gpu, u)
        hidden = y.shape[-1]
        dgates = y.new_empty((len(y), 3 * hidden))
        dstates = y.new_empty((len(y), hidden))
        dh = _start(dhn, h0)
        for rows, count, earlier in self.back(reverse=reverse):
            d = dh[:count] + dy[rows]
            r, z, n, from_h = saved[rows].chunk(4, 1)
            before = _before(y, h0, count, earlier)
            dn = d * (1 - z) * (1 - n * n)
            dr = dn * from_h * r * (1 - r)
            dz = d * (before - n) * z * (1 - z)
            dstates[rows] = dn * r
            dgates[rows] = torch.cat((dr, dz, dn), 1)
            of_h = product(torch.cat((dgates[rows, : 2 * hidden], dstates[rows]), 1), weight)
            dh = _carried(d * z + of_h, dh)
        return dgates, dstates, dh.to(h0.dtype), None


class _Lstm(_Steps):
    """``c' = f c + i g`` and ``h' = o tanh(c')``, or with a projection ``h' = W_hr (o tanh(c'))``."""

    def run(
        self,
        gx: Tensor,
        u: Tensor,
        w_hr: Tensor | None,
        h0: Tensor,
        c0: Tensor | None,
        y: Tensor,
        /,
        *,
        reverse: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """As :meth:`_Steps.forward`, on rows. Saved are the gates and c after each step, in fp32."""
        assert c0 is not None
        turned, product = _widened(self.on_gpu, u.T)
        project = None if w_hr is None else _by(self.on_gpu, w_hr.T)
        gates = gx.new_empty(gx.shape, dtype=torch.float32) if keep else None
        cells = y.new_empty((len(y), c0.shape[-1]), dtype=torch.float32) if keep else None
        h, c = h0, c0.float()
        for rows, count in self.order(reverse=reverse):
            i, f, g, o = (product(h[:count], turned) + gx[rows]).chunk(4, 1)
            i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
            c = _carried(f * c[:count] + i * g, c)
            m = o * torch.tanh(c[:count])
            y[rows] = m if project is None else project(m)
            h = _carried(y[rows], h)
            if gates is not None and cells is not None:
                torch.cat((i, f, g, o), 1, out=gates[rows])
                cells[rows] = c[:count]
        return h.clone(), c.to(c0.dtype), (gates, cells)

    def run_back(
        self,
        saved: Saved,
        u: Tensor,
        w_hr: Tensor | None,
        h0: Tensor,
        c0: Tensor | None,
        y: Tensor,
        dy: Tensor,
        dhn: Tensor | None,
        dcn: Tensor | None,
        /,
        *,
        reverse: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """As :meth:`_Steps.backward`, on rows."""
        assert c0 is not None
        gates, cells = saved
        weight, product = _widened(self.on_gpu, u)
        dgates = y.new_empty(gates.shape)
        project = None if w_hr is None else _by(self.on_gpu, w_hr)
        of_states = None if w_hr is None else y.new_empty(y.shape, dtype=torch.float32)
        dh, dc = _start(dhn, h0), _start(dcn, c0)
        for rows, count, earlier in self.back(reverse=reverse):
            d = dh[:count] + dy[rows]
            if of_states is not None and project is not None:
                of_states[rows] = d
                d = project(d)
            i, f, g, o = gates[rows].chunk(4, 1)
            turned = torch.tanh(cells[rows])
            of_c = dc[:count] + d * o * (1 - turned * turned)
            di, df = of_c * g * i * (1 - i), of_c * _before(cells, c0, count, earlier) * f * (1 - f)
            dg, do = of_c * i * (1 - g * g), d * turned * o * (1 - o)
            dgates[rows] = torch.cat((di, df, dg, do), 1)
            dc = _carried(of_c * f, dc)
            dh = _carried(product(dgates[rows], weight), dh)
        of_w = None
        if of_states is not None:
            of_w = torch.mm(of_states.T, gates.chunk(4, 1)[3] * torch.tanh(cells))
        return dgates, of_w, dh.to(h0.dtype), dc.to(c0.dtype)


def _start(gradient: Tensor | None, state: Tensor) -> Tensor:
    """The gradient of a last state in fp32, zeros where there is none."""
    return torch.zeros_like(state, dtype=torch.float32) if gradient is None else gradient.float()
