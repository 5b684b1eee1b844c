"""The steps of a recurrent layer on a CPU: one call of a compiled kernel for all of them."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.kernels.cpu.recurrent.told import GATES, Told, rows_of
from tilewise.kernels.cpu.threads import share_out
from tilewise.solvers.common.cpu_run import numba_reasons

__all__ = ["CpuRecurrence", "Shares"]

NUMBER = 4
"""Bytes of an fp32 number."""
SECOND_CACHE = 2**18
"""Bytes of a panel that stay in a core's second cache while all rows are multiplied with them."""
MOST_VECTORS = 4
"""The most vectors of a line of a panel: with six rows they fill the registers of a 512-bit machine."""

Saved = tuple[torch.Tensor, torch.Tensor]
"""What the backward pass needs beside h: the gates, and c of an LSTM or U_n h + b_hn of a GRU (empty for others)."""


@dataclass(frozen=True)
class Shares:
    """How a pass divides its work: panels of units for the threads, and tiles of rows for the registers."""

    lanes: int
    gates: int
    batch: int
    hidden: int
    threads: int
    back: bool

    @functools.cached_property
    def blocks(self) -> int:
        """Blocks of units of a panel: as many as registers hold, unless some threads would have no panel."""
        most = MOST_VECTORS // (1 if self.back else self.gates)
        return max(1, min(most, -(-self._all_blocks // self.threads)))

    @property
    def _all_blocks(self) -> int:
        return -(-self.hidden // self.lanes)

    @property
    def panels(self) -> int:
        """The number of panels."""
        return -(-self._all_blocks // self.blocks)

    @property
    def vectors(self) -> int:
        """Vectors of a line of a panel: of the forward pass one for each gate of each block."""
        return self.blocks * (1 if self.back else self.gates)

    @property
    def panel_size(self) -> int:
        """Bytes of a panel, whose lines are filled up to a whole number of vectors."""
        depth = self.gates * self.hidden if self.back else -(-self.hidden // self.lanes) * self.lanes
        return depth * self.vectors * self.lanes * NUMBER

    @functools.cached_property
    def tiles(self) -> tuple[int, int, int]:
        """Tiles of rows of the batch: their number, rows of each, and of the last, all nearly equal."""
        most = rows_of(self.lanes, self.vectors)
        rows = -(-self.batch // -(-self.batch // most))
        count = -(-self.batch // rows)
        return count, rows, self.batch - (count - 1) * rows

    @property
    def part(self) -> int:
        """Lines of a panel that are multiplied with all rows before the next ones."""
        if self.tiles[0] == 1:
            return max(1, self.gates * self.hidden)
        return SECOND_CACHE // (self.vectors * self.lanes * NUMBER)

    @property
    def sums_size(self) -> int:
        """Bytes of a thread's sums, in whole pages."""
        return -(-self.batch * self.vectors * self.lanes * NUMBER // 4096) * 4096

    @property
    def scratch(self) -> int:
        """Bytes of packed weights and all threads' sums."""
        return self.panels * self.panel_size + self.threads * self.sums_size


class CpuRecurrence:
    """Runs all steps of one layer in one direction, in fp32.

    It is made for a cell, T steps, a batch of N, H units, the lanes of a vector and a number of threads, which are
    torch's with ``openmp``. Several threads of the program may use one at the same time. Making it compiles the
    kernels, or reads them from disk, and raises ``SolverUnavailable`` with the compiler's reason.

    Example::

        recurrence = CpuRecurrence("lstm", 100, 16, 512, lanes=16, threads=2, openmp=True)
        hn, cn, saved = recurrence.forward(gx, u, None, h0, c0, y, reverse=False, keep=True)
    """

    __slots__ = ("_back", "_backward", "_forward", "_openmp", "_to", "cell", "sizes")

    def __init__(
        self, cell: str, time: int, batch: int, hidden: int, *, lanes: int, threads: int, openmp: bool
    ) -> None:
        from tilewise.kernels.cpu.compiling import load_recurrent

        self.cell, self.sizes, self._openmp = cell, (time, batch, hidden), openmp
        self._to, self._back = (Shares(lanes, GATES[cell], batch, hidden, threads, back) for back in (False, True))
        with numba_reasons():
            self._forward, self._backward = (
                load_recurrent(lanes, cell, s.back, tuple((rows, s.vectors) for rows in s.tiles[1:]))
                for s in (self._to, self._back)
            )

    def forward(
        self,
        gx: torch.Tensor,
        u: torch.Tensor,
        bias_n: torch.Tensor | None,
        h0: torch.Tensor,
        c0: torch.Tensor | None,
        y: torch.Tensor,
        *,
        reverse: bool,
        keep: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Saved]:
        """Write h after each step to ``y``, and return the last h, the last c of an LSTM, and what was kept.

        ``gx`` (T, N, G * H) are the gates' inputs with their biases, which are overwritten; ``u`` (G * H, H),
        ``bias_n`` (H) b_hn of a GRU, ``h0`` and ``c0`` (N, H), ``y`` (T, N, H) with contiguous rows.
        """
        time, batch, hidden = self.sizes
        lstm, gru = self.cell == "lstm", self.cell == "gru"
        gx, u, h0 = gx.contiguous(), u.contiguous(), h0.contiguous()
        if bias_n is None:
            bias_n = torch.zeros(hidden if gru else 0, dtype=torch.float32, device="cpu")
        every, size = (time if keep else 1), (batch, hidden)
        state = torch.empty((every, *size) if lstm or (gru and keep) else (0,), dtype=torch.float32, device="cpu")
        first = h0 if c0 is None else c0.contiguous()
        addresses = {
            "x": gx, "u": u, "bias_n": bias_n.contiguous(), "h0": h0, "c0": first, "y": y, "dy": y, "state": state
        }  # fmt: skip
        self._run(self._forward, self._to, addresses, y, y, reverse=reverse, keep=keep)
        last = 0 if reverse else time - 1
        cn = state[last if keep else 0].clone() if lstm else None
        return y[last].clone(memory_format=torch.contiguous_format), cn, (gx, state)

    def backward(
        self,
        saved: Saved,
        u: torch.Tensor,
        bias_n: torch.Tensor | None,
        h0: torch.Tensor,
        c0: torch.Tensor | None,
        y: torch.Tensor,
        dy: torch.Tensor,
        dhn: torch.Tensor | None,
        dcn: torch.Tensor | None,
        *,
        reverse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        """Gradients of ``gx``, of U_n h + b_hn of a GRU, of ``h0`` and of ``c0`` of an LSTM.

        ``dy`` (T, N, H) are those of ``y``, ``dhn`` and ``dcn`` (N, H) those of the last h and c, or ``None`` for 0.
        """
        time, batch, hidden = self.sizes
        lstm, gru = self.cell == "lstm", self.cell == "gru"
        gx, state = saved
        dy = dy if dy.stride(-1) == 1 or hidden == 1 else dy.contiguous()
        dx = torch.empty((time, batch, GATES[self.cell] * hidden), dtype=torch.float32, device="cpu")
        dx_n = torch.empty((time, batch, hidden), dtype=torch.float32, device="cpu") if gru else None
        dh, dc = (
            torch.zeros((batch, hidden), dtype=torch.float32, device="cpu")
            if given is None
            else given.clone(memory_format=torch.contiguous_format)
            for given in (dhn, dcn if lstm else None)
        )
        h0 = h0.contiguous()
        addresses = {
            "x": gx, "u": u.contiguous(), "h0": h0, "c0": h0 if c0 is None else c0.contiguous(), "y": y,
            "state": state, "dx": dx, "dx_n": dx if dx_n is None else dx_n, "dy": dy, "dh": dh, "dc": dc,
        }  # fmt: skip
        self._run(self._backward, self._back, addresses, y, dy, reverse=reverse, keep=True)
        return dx, dx_n, dh, dc if lstm else None

    def _run(
        self, worker: tuple[int, ...], s: Shares, tensors: dict[str, torch.Tensor], y: torch.Tensor, dy: torch.Tensor,
        *, reverse: bool, keep: bool,
    ) -> None:  # fmt: skip
        """Run a worker on tensors of these names. Raises ``ValueError`` for rows of ``y`` that are not contiguous."""
        time, batch, hidden = self.sizes
        if y.stride(-1) != 1 and hidden > 1:
            raise ValueError(f"y: strides {y.stride()}, but rows must be contiguous: a stride of 1 would do")
        scratch = torch.empty(s.scratch, dtype=torch.uint8, device="cpu")
        threads = max(1, min(s.threads, s.panels, torch.get_num_threads()))
        numbers: dict[str, Any] = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        run, *calls = worker
        names = ("set", "set_last", "add", "add_last")
        numbers |= dict(zip(names, calls, strict=True))
        told = Told(
            threads=threads, time=time, batch=batch, hidden=hidden, panels=s.panels, blocks=s.blocks,
            vectors=s.vectors, panel_size=s.panel_size, tiles=s.tiles[0], rows=s.tiles[1], last=s.tiles[2],
            part=s.part, yielding=_yielding(), reverse=int(reverse), keep=int(keep),
            y_time=NUMBER * y.stride(0), y_row=NUMBER * y.stride(1),
            dy_time=NUMBER * dy.stride(0), dy_row=NUMBER * dy.stride(1),
            state_time=NUMBER * batch * hidden if keep else 0, sums_size=s.sums_size,
            packed=scratch.data_ptr(), sums=scratch.data_ptr() + s.panels * s.panel_size,
            **{"bias_n": 0, "dx": 0, "dx_n": 0, "dy": 0, "dh": 0, "dc": 0, **numbers},
        ).numbers()  # fmt: skip
        share_out(run, told.ctypes.data, threads, self._openmp)


@functools.cache
def _yielding() -> int:
    """The address of a C function that gives the core to another thread."""
    function: Any = ctypes.CDLL(None).sched_yield
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)
