"""LSTMs with a projection by kernels for LSTMs without one.

The state of a projected LSTM is h = W_hr m, where m = o tanh(c) is what a plain LSTM has as its state. A step reads h
by U alone, and U h = (U W_hr) m. So a plain LSTM with the weights U W_hr has the states m of all steps, and h is one
matrix product for all steps behind it. Only the first h is no product of W_hr: what it gives the gates of the first
step is added to what the input gives them, and m begins as zeros.

A step multiplies 4 H x H numbers where two products would read 5 H x P. For that it waits for other threads or
multiprocessors once and not twice, and its kernels are those of plain layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.problems.recurrent.packing import Packing
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers.recurrent._recurrence import Recurrence, Saved

__all__ = ["Folded", "folded_bytes"]


@dataclass(frozen=True)
class Folded:
    """The steps of a projected LSTM by a ``recurrence`` without one, as :class:`Recurrence` says.

    ``packing`` is that of a packed batch that the recurrence takes; ``None`` where all sequences have all steps.
    """

    recurrence: Recurrence
    packing: Packing | None = None

    def forward(
        self, gx: Tensor, u: Tensor, w_hr: Tensor | None, h0: Tensor, c0: Tensor | None, y: Tensor, /,
        *, reverse: bool, keep: bool,
    ) -> tuple[Tensor, Tensor | None, Saved]:  # fmt: skip
        """As :meth:`Recurrence.forward`. Saved are m of all steps, and what the recurrence keeps."""
        assert w_hr is not None
        first, last = self._ends(y, len(h0), reverse=reverse)
        gates = gx.view(-1, gx.shape[-1])
        gates[first] += torch.mm(h0, u.T)
        m = y.new_empty((*y.shape[:-1], w_hr.shape[1]))
        zeros = h0.new_zeros((len(h0), w_hr.shape[1]))
        folded = torch.mm(u, w_hr)
        _, cn, saved = self.recurrence.forward(gx, folded, None, zeros, c0, m, reverse=reverse, keep=keep)
        h = torch.mm(m.view(-1, m.shape[-1]), w_hr.T)
        y.copy_(h.view(y.shape))
        return h[last].clone(), cn, (m, saved)

    def backward(
        self, saved: Saved, u: Tensor, w_hr: Tensor | None, h0: Tensor, c0: Tensor | None, y: Tensor, dy: Tensor,
        dhn: Tensor | None, dcn: Tensor | None, /, *, reverse: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
        """As :meth:`Recurrence.backward`."""
        assert w_hr is not None
        m, kept = saved
        batch, hidden = len(h0), w_hr.shape[1]
        _, last = self._ends(y, batch, reverse=reverse)
        of_y = dy.reshape(-1, dy.shape[-1])
        of_m = torch.mm(of_y, w_hr).view(m.shape)
        of_last = None if dhn is None else torch.mm(dhn, w_hr)
        zeros = h0.new_zeros((batch, hidden))
        dgates, _, _, dc0 = self.recurrence.backward(
            kept, torch.mm(u, w_hr), None, zeros, c0, m, of_m, of_last, dcn, reverse=reverse
        )
        # First states, and behind them the states of all steps: what reads each of them.
        states = torch.cat((h0.new_zeros(h0.shape), of_y))
        if dhn is not None:
            states[batch:][last] += dhn
        states.index_add_(0, self._before(y, batch, reverse=reverse), torch.mm(dgates.view(-1, len(u)), u))
        of_w = torch.mm(states[batch:].T, m.view(-1, hidden))
        return dgates, of_w, states[:batch].clone(), dc0

    def _ends(self, y: Tensor, batch: int, *, reverse: bool) -> tuple[slice | Tensor, slice | Tensor]:
        """The rows of each sequence's first and last step in the order of the pass."""
        if self.packing is not None:
            first, last = (self.packing.last_rows(reverse=not r).to(y.device) for r in (reverse, not reverse))
            return first, last
        rows = y.shape[0] * batch
        ends = slice(0, batch), slice(rows - batch, rows)
        return (ends[1], ends[0]) if reverse else ends

    def _before(self, y: Tensor, batch: int, *, reverse: bool) -> Tensor:
        """For each row, that of the state before among first states (batch) and all rows behind them."""
        if self.packing is not None:
            return self.packing.rows_before(reverse=reverse).to(y.device)
        rows = y.shape[0] * batch
        places = torch.arange(rows, dtype=torch.int64, device=y.device)
        if not reverse:
            return places
        return torch.where(places < rows - batch, places + 2 * batch, places - (rows - batch))


def folded_bytes(p: RecurrentProblem, rows: int, *, kept: bool) -> int:
    """Bytes that a projection takes beside what a plain layer does, 0 without one.

    That is m of ``rows`` at a time (of all directions where it is ``kept`` for training), and the folded weights. A
    backward has m's gradient and the states that each row reads as well.
    """
    if not p.projection:
        return 0
    size = p.torch_dtype("x").itemsize
    states, training = rows * p.hidden * size, p.task == "training"
    every = p.layers * p.directions if training and kept else 1
    backward = states + 2 * size * rows * p.width if training else 0
    return states * every + p.gates * p.hidden**2 * size + backward
