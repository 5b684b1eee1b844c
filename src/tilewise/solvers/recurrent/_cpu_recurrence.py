"""The steps of a recurrent layer on a CPU: one call of a compiled kernel for all of them."""

from __future__ import annotations

import copy
import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tilewise.kernels.cpu.recurrent.told import GATES, Told, rows_of
from tilewise.kernels.cpu.threads import share_out
from tilewise.problems.recurrent.packing import Packing
from tilewise.solvers.common.cpu_run import numba_reasons

__all__ = ["NUMBER", "CpuRecurrence", "Shares", "Worker"]

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

    @property
    def most(self) -> int:
        """The most rows of a tile."""
        return min(self.batch, rows_of(self.lanes, self.vectors))

    @functools.cached_property
    def tiles(self) -> tuple[int, int, int]:
        """Tiles of all rows of the batch: their number, rows of each, and of the last, all nearly equal."""
        count = -(-self.batch // self.most)
        rows = -(-self.batch // count)
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

    It is made for a cell, a batch of N that is ``packed`` or not, H units, the lanes of a vector and a number of
    threads, which are torch's with ``openmp``. A packed batch may have any lengths, for which :meth:`of` makes
    another. Several threads of the program may use one at the same time. Making it compiles the kernels, or reads them
    from disk, and raises ``SolverUnavailable`` with the compiler's reason.

    Example::

        recurrence = CpuRecurrence("lstm", 16, 512, lanes=16, threads=2, openmp=True)
        hn, cn, saved = recurrence.forward(gx, u, None, h0, c0, y, reverse=False, keep=True)
    """

    __slots__ = ("_backward", "_forward", "_openmp", "_packing", "cell", "sizes")

    def __init__(
        self, cell: str, batch: int, hidden: int, *, lanes: int, threads: int, openmp: bool, packed: bool = False
    ) -> None:
        from tilewise.kernels.cpu.compiling import load_recurrent

        self.cell, self.sizes, self._openmp = cell, (batch, hidden), openmp
        self._packing: Packing | None = None
        with numba_reasons():
            self._forward, self._backward = (
                Worker.of(s, functools.partial(load_recurrent, lanes, cell, s.back), packed=packed)
                for s in (Shares(lanes, GATES[cell], batch, hidden, threads, back) for back in (False, True))
            )

    def of(self, packing: Packing) -> CpuRecurrence:
        """The same for a packed batch with this ``packing``. Raises ``ValueError`` for more sequences than N."""
        if packing.batch > self.sizes[0]:
            raise ValueError(f"packing: has {packing.batch} sequences; at most {self.sizes[0]} would do")
        twin = copy.copy(self)
        twin._packing = packing
        return twin

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
        ``bias_n`` (H) b_hn of a GRU, ``h0`` and ``c0`` (N, H), ``y`` (T, N, H) with contiguous rows. Of a packed batch
        ``gx`` is (R, G * H) and ``y`` (R, H). Raises ``ValueError`` for a ``y`` whose rows do not lie equally far
        apart.
        """
        hidden, lstm, gru = self.sizes[1], self.cell == "lstm", self.cell == "gru"
        y = _rows(y)
        gx, u, h0 = gx.contiguous(), u.contiguous(), h0.contiguous()
        if bias_n is None:
            bias_n = torch.zeros(hidden if gru else 0, dtype=torch.float32, device="cpu")
        kept = len(y) if keep else len(h0)
        state = torch.empty((kept, hidden) if lstm or (gru and keep) else (0,), dtype=torch.float32, device="cpu")
        first = h0 if c0 is None else c0.contiguous()
        addresses = {
            "x": gx, "u": u, "bias_n": bias_n.contiguous(), "h0": h0, "c0": first, "y": y, "dy": y, "state": state
        }  # fmt: skip
        self._run(self._forward, addresses, y, y, h0, reverse=reverse, keep=keep)
        last = self._last_rows(y, len(h0), reverse=reverse)
        cn = (state[last] if keep else state).clone() if lstm else None
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
        hidden, lstm, gru = self.sizes[1], self.cell == "lstm", self.cell == "gru"
        gx, state = saved
        leading, y = y.shape[:-1], _rows(y)
        dy = dy.reshape(-1, hidden)
        dy = dy if dy.stride(-1) == 1 or hidden == 1 else dy.contiguous()
        dx = torch.empty((*leading, GATES[self.cell] * hidden), dtype=torch.float32, device="cpu")
        dx_n = torch.empty((*leading, hidden), dtype=torch.float32, device="cpu") if gru else None
        dh, dc = (
            torch.zeros((len(h0), hidden), dtype=torch.float32, device="cpu")
            if given is None
            else given.clone(memory_format=torch.contiguous_format)
            for given in (dhn, dcn if lstm else None)
        )
        h0 = h0.contiguous()
        addresses = {
            "x": gx, "u": u.contiguous(), "h0": h0, "c0": h0 if c0 is None else c0.contiguous(), "y": y,
            "state": state, "dx": dx, "dx_n": dx if dx_n is None else dx_n, "dy": dy, "dh": dh, "dc": dc,
        }  # fmt: skip
        self._run(self._backward, addresses, y, dy, h0, reverse=reverse, keep=True)
        return dx, dx_n, dh, dc if lstm else None

    def _last_rows(self, y: torch.Tensor, batch: int, *, reverse: bool) -> slice | torch.Tensor:
        """The rows with each sequence's last state."""
        if self._packing is not None:
            return self._packing.last_rows(reverse=reverse)
        return slice(0, batch) if reverse else slice(len(y) - batch, None)

    def _run(
        self, worker: Worker, tensors: dict[str, torch.Tensor], y: torch.Tensor, dy: torch.Tensor, h0: torch.Tensor,
        *, reverse: bool, keep: bool,
    ) -> None:  # fmt: skip
        """Run a worker on tensors of these names; ``y`` and ``dy`` are rows."""
        if self._packing is None:
            offsets = torch.arange(0, len(y) + 1, len(h0), dtype=torch.int64, device="cpu")
        else:
            offsets = self._packing.offsets
        worker(
            self._openmp, time=len(offsets) - 1, offsets=offsets.data_ptr(), reverse=int(reverse), keep=int(keep),
            y_row=NUMBER * y.stride(0), dy_row=NUMBER * dy.stride(0),
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        )  # fmt: skip


@dataclass(frozen=True)
class Worker:
    """A compiled pass: its address, its shares, and its table of products of tiles (see ``Told.products``)."""

    run: int
    shares: Shares
    products: np.ndarray

    @classmethod
    def of(cls, s: Shares, load: Callable[[tuple[tuple[int, int], ...]], tuple[int, ...]], *, packed: bool) -> Worker:
        """The worker of a pass that ``load`` gives for the tiles (rows, vectors) that it multiplies.

        A step of a packed batch may have tiles of any number of rows.
        """
        rows = range(1, s.most + 1) if packed else sorted(set(s.tiles[1:]))
        run, *calls = load(tuple((each, s.vectors) for each in rows))
        products = np.zeros((s.most, 2), dtype=np.int64)
        products[[each - 1 for each in rows]] = np.array(calls, dtype=np.int64).reshape(2, -1).T
        return cls(run, s, products)

    def __call__(self, openmp: bool, **numbers: int) -> None:
        """Run the pass on as many threads as its shares are for; ``numbers`` are the rest of :class:`Told`'s."""
        s = self.shares
        scratch = torch.empty(s.scratch, dtype=torch.uint8, device="cpu")
        threads = max(1, min(s.threads, s.panels, torch.get_num_threads()))
        unused = dict.fromkeys(("bias_n", "c0", "dx", "dx_n", "dy", "dh", "dc"), 0)
        told = Told(
            threads=threads, hidden=s.hidden, panels=s.panels, blocks=s.blocks, vectors=s.vectors,
            panel_size=s.panel_size, most=s.most, products=self.products.ctypes.data, part=s.part,
            yielding=_yielding(), sums_size=s.sums_size, packed=scratch.data_ptr(),
            sums=scratch.data_ptr() + s.panels * s.panel_size, **{**unused, **numbers},
        ).numbers()  # fmt: skip
        share_out(self.run, told.ctypes.data, threads, openmp)


def _rows(y: torch.Tensor) -> torch.Tensor:
    """The rows of all steps. Raises ``ValueError`` where they are not contiguous, or not equally far apart."""
    if y.dim() == 3 and len(y) > 1 and y.shape[1] > 1 and y.stride(0) != y.shape[1] * y.stride(1):
        raise ValueError(f"y: strides {y.stride()}, but rows of all steps must lie equally far apart")
    if y.stride(-1) != 1 and y.shape[-1] > 1:
        raise ValueError(f"y: strides {y.stride()}, but rows must be contiguous: a stride of 1 would do")
    return y.view(-1, y.shape[-1])


@functools.cache
def _yielding() -> int:
    """The address of a C function that gives the core to another thread."""
    function: Any = ctypes.CDLL(None).sched_yield
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)
