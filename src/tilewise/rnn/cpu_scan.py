"""A user's recurrent cell by compiled kernels on a CPU: all steps in one call, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.recurrent.expressions import MOST_MEANS, Cell, backward_of
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.common.cpu_run import numba_reasons, vector_lanes
from tilewise.solvers.recurrent._cpu_recurrence import NUMBER, Shares, Worker

__all__ = ["CpuScan"]


@dataclass(frozen=True)
class Steps:
    """What the forward leaves for the backward: the states before and after all steps, and what h gave the gates.

    ``seed`` is that of random numbers.
    """

    firsts: list[Tensor]
    kept: list[Tensor]
    from_h: Tensor
    resets: Tensor | None
    seed: int = 0


class CpuScan:
    """A ``cell`` for a batch of N sequences of H units, in fp32. Making it compiles it, or finds it on disk.

    Raises ``SolverUnavailable`` with the compiler's reason, or for a cell with too many means over units.
    """

    def __init__(self, cell: Cell, batch: int, hidden: int) -> None:
        from tilewise.kernels.cpu.compiling import load_custom

        self.cell, self.batch, self.hidden = cell, batch, hidden
        means = sum(map(len, backward_of(cell)[0].means))
        if means > MOST_MEANS:
            raise SolverUnavailable(f"it has {means} means with those of its gradient; at most {MOST_MEANS} would do")
        lanes, threads = vector_lanes(), torch.get_num_threads()
        with numba_reasons():
            self._workers = [
                Worker.of(s, functools.partial(load_custom, lanes, cell, s.back), packed=False)
                for s in (Shares(lanes, cell.from_h, batch, hidden, threads, back) for back in (False, True))
            ]

    def run(
        self, x: Tensor, u: Tensor, states: list[Tensor], parameters: list[Tensor], resets: Tensor | None, *,
        reverse: bool, seed: int, keep: bool,
    ) -> tuple[Tensor, list[Tensor], tuple[Tensor, ...]]:  # fmt: skip
        """y (T, N, H), the last states, and where ``keep`` what :meth:`gradients` takes. Tensors are contiguous.

        ``y`` may be what is kept.
        """
        steps = self.forward(x, u, states, parameters, resets, reverse=reverse, seed=seed)
        last = [kept[0 if reverse else -1].clone() for kept in steps.kept]
        return steps.kept[0], last, (steps.from_h, *steps.kept) if keep else ()

    def gradients(
        self, saved: Sequence[Tensor], x: Tensor, u: Tensor, states: list[Tensor], parameters: list[Tensor],
        resets: Tensor | None, dy: Tensor | None, ends: Sequence[Tensor | None], *, reverse: bool, seed: int,
        of_weights: bool,
    ) -> tuple[Tensor, Tensor | None, list[Tensor], list[Tensor]]:  # fmt: skip
        """The gradients of x, of u where ``of_weights``, of first states and parameters.

        ``dy`` and ``ends`` are those of y and the last states, ``None`` for zero.
        """
        from_h, *kept = saved
        steps = Steps(states, kept, from_h, _whole_words(resets), seed)
        dy = torch.zeros_like(kept[0]) if dy is None else dy.contiguous()
        last = [
            torch.zeros_like(first) if end is None else end.clone(memory_format=torch.contiguous_format)
            for first, end in zip(states, ends, strict=True)
        ]
        dx, dgates, firsts, of_parameters = self.backward(steps, x, u, parameters, dy, last, reverse=reverse)
        if not of_weights:
            return dx, None, firsts, of_parameters
        # The gradient of u: over all steps, that of the gates times the state h before.
        h, first = kept[0], states[0][None]
        before = torch.cat((h[1:], first) if reverse else (first, h[:-1]))
        if resets is not None:
            before = before.masked_fill(resets[..., None], 0.0)
        return dx, dgates.flatten(0, 1).T @ before.flatten(0, 1), firsts, of_parameters

    def forward(
        self, x: Tensor, u: Tensor, states: list[Tensor], parameters: list[Tensor], resets: Tensor | None, *,
        reverse: bool, seed: int = 0,
    ) -> Steps:  # fmt: skip
        """All states after all steps, (T, N, H) each, in what is kept.

        ``x`` (T, N, X * H), ``u`` (G * H, H), ``states`` (N, H) and ``parameters`` are contiguous, ``resets`` is
        (T, N) of bool or ``None``.
        """
        time = len(x)
        kept = [torch.empty((time, self.batch, self.hidden), dtype=torch.float32, device="cpu") for _ in states]
        from_h = torch.empty((time, self.batch, len(u)), dtype=torch.float32, device="cpu")
        steps = Steps(states, kept, from_h, _whole_words(resets), seed)
        self._run(0, steps, x, u, [*kept, *parameters], reverse=reverse)
        return steps

    def backward(
        self, steps: Steps, x: Tensor, u: Tensor, parameters: list[Tensor], dy: Tensor, ends: list[Tensor], *,
        reverse: bool,
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
        """Gradients of ``x``, of what the state gives the gates (T, N, G * H), of first states and of parameters.

        ``dy`` (T, N, H) is that of all states h, ``ends`` (N, H) those of the last states, which are overwritten.
        """
        dx, dgates = torch.empty_like(x), torch.empty_like(steps.from_h)
        # Where threads divide the sequences, each sums gradients of parameters by itself.
        own = self._workers[1].shares.threads if self.cell.means else 1
        sums = torch.zeros((own, self.cell.parameters * self.hidden), dtype=torch.float32, device="cpu")
        places = [*steps.kept, *parameters, *ends, sums[0]]
        more = {
            "apart": NUMBER * sums.shape[1],
            "dx": dx.data_ptr(),
            "dx_n": dgates.data_ptr(),
            "dy": dy.data_ptr(),
            "dh": ends[0].data_ptr(),
        }
        self._run(1, steps, x, u, places, reverse=reverse, **more)
        of_parameters = sums.sum(0) if own > 1 else sums[0]
        return dx, dgates, ends, list(of_parameters.split([p.numel() for p in parameters]))

    def _run(
        self, back: int, steps: Steps, x: Tensor, u: Tensor, places: list[Tensor], *, reverse: bool, **more: int
    ) -> None:
        """Run a worker on tensors whose addresses stand in a table, a part of H numbers at a time."""
        zeros = torch.zeros(self.hidden, dtype=torch.float32, device="cpu")
        tables = [self._table(each) for each in (places, steps.firsts, [zeros] * self.cell.states)]
        row, rows = NUMBER * self.hidden, len(x) * self.batch
        offsets = torch.arange(0, rows + 1, self.batch, dtype=torch.int64, device="cpu")
        self._workers[back](
            True, time=len(x), offsets=offsets.data_ptr(), reverse=int(reverse), keep=1, y_row=row, dy_row=row,
            x=x.data_ptr(), u=u.data_ptr(), h0=steps.firsts[0].data_ptr(), y=steps.kept[0].data_ptr(),
            state=steps.from_h.data_ptr(),
            places=tables[0].ctypes.data, firsts=tables[1].ctypes.data, zeros=tables[2].ctypes.data,
            resets=0 if steps.resets is None else steps.resets.data_ptr(), seed=steps.seed, **more,
        )  # fmt: skip

    def _table(self, tensors: list[Tensor]) -> np.ndarray:
        """Addresses: of a parameter with several parts of H numbers that of each, of other tensors their own."""
        found: list[int] = []
        for tensor in tensors:
            parts = tensor.numel() // self.hidden if tensor.dim() == 1 else 1
            found += [tensor.data_ptr() + i * self.hidden * NUMBER for i in range(parts)]
        return np.array(found, dtype=np.int64)


def _whole_words(resets: Tensor | None) -> Tensor | None:
    """The bytes of resets, filled up to whole words of 8."""
    if resets is None:
        return None
    flat = torch.zeros(-(-resets.numel() // 8) * 8, dtype=torch.uint8, device="cpu")
    flat[: resets.numel()] = resets.reshape(-1)
    return flat
