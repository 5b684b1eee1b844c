"""A user's recurrent cell by Triton's kernels on a GPU: one kernel a step, forward and backward.

A launch takes the host longer than such a kernel runs. So all steps are recorded as a CUDA graph when calls of a size
come again, and replayed from then on. Within a capture of the program's own they are launched as part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.cpu.recurrent.expressions import Cell
from tilewise.machine.torch_state import read_precision
from tilewise.rnn.gpu_kernels import ALIGNED, CellKernel, CellKernels
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.common.replays import Replays

__all__ = ["DTYPES", "GpuScan", "gpu_missing"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_UNITS = 8192
"""Hidden units of a cell with means, of which one program has all."""
MOST_FUSED = 1024
"""Hidden units up to which the product with the state is computed in the cell's kernel, and not by a library."""


@dataclass(frozen=True)
class Kept:
    """What the forward leaves: the first state before and after all steps, the others in fp32, and what h gave.

    ``h`` is (T + 1, N, H), ``others`` (T + 1, states - 1, N, H) in fp32, ``from_h`` (T, N, G * H) in fp32: ``None``
    where there is no backward.
    """

    h: Tensor
    others: Tensor
    from_h: Tensor | None


class GpuScan:
    """A ``cell`` for batches of N sequences of H units of one type on one GPU, as its first tensors are.

    Raises ``SolverUnavailable`` with the compiler's reason, or for a cell with means over too many units. On a CPU the
    kernels run in Triton's interpreter.
    """

    def __init__(self, cell: Cell, batch: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        if cell.means and hidden > MOST_UNITS:
            raise SolverUnavailable(f"it has means over {hidden} units; at most {MOST_UNITS} would do")
        self.cell, self.batch, self.hidden, self.dtype, self.device = cell, batch, hidden, dtype, device
        self.fused = not cell.means and hidden <= MOST_FUSED
        self.replays = Replays()
        self._interpreted = device.type == "cpu"
        self._kernels: dict[tuple[object, ...], CellKernel] = {}
        self.kernels = CellKernels(cell, batch, hidden, dtype, device, self.fused)
        if not self._interpreted:
            with self._on_device():
                for name in ("step", "step_back"):
                    self._kernel(name)

    def forward(
        self, x: Tensor, u: Tensor, states: list[Tensor], parameters: list[Tensor], resets: Tensor | None, *,
        reverse: bool, seed: int, keep: bool,
    ) -> Kept:  # fmt: skip
        """All steps. ``x`` (T, N, X * H), ``u`` (G * H, H) and ``states`` (N, H) are contiguous."""
        given = (x, u, torch.stack(states), self._joined(parameters), self._bytes(resets, len(x)), self._word(seed))

        def run(*tensors: Any) -> Any:
            kept = self._forward(*map(_aligned, tensors), reverse=reverse)
            return kept.h, kept.others, kept.from_h if keep else None

        return Kept(*self._run(("forward", reverse, keep), run, given))

    def backward(
        self, kept: Kept, x: Tensor, u: Tensor, parameters: list[Tensor], resets: Tensor | None, dy: Tensor,
        ends: list[Tensor], *, reverse: bool, seed: int,
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
        """Gradients of ``x``, of what the state gives the gates (T, N, G * H), of first states and of parameters.

        ``dy`` (T, N, H) is that of all states h, ``ends`` (N, H) are those of the last states.
        """
        joined = self._joined(parameters)
        given = (
            kept.h, kept.others, kept.from_h, x, u, joined, self._bytes(resets, len(x)), self._word(seed), dy,
            torch.stack(ends).float(),
        )  # fmt: skip

        def run(*tensors: Any) -> Any:
            return self._backward(*map(_aligned, tensors), reverse=reverse)

        dx, dgates, firsts, sums = self._run(("backward", reverse), run, given)
        sizes = [p.numel() for p in parameters]
        return dx, dgates, list(firsts.to(self.dtype)), list(sums.to(self.dtype).split(sizes)) if sizes else []

    def before(self, kept: Kept, *, reverse: bool) -> Tensor:
        """The first state before each step, (T, N, H), but for resets."""
        return kept.h[1:] if reverse else kept.h[:-1]

    def after(self, kept: Kept, *, reverse: bool) -> list[Tensor]:
        """All states after each step, (T, N, H), the first in the type of the call."""
        places = slice(None, -1) if reverse else slice(1, None)
        return [kept.h[places], *kept.others[places].unbind(1)]

    def run(
        self, x: Tensor, u: Tensor, states: list[Tensor], parameters: list[Tensor], resets: Tensor | None, *,
        reverse: bool, seed: int, keep: bool,
    ) -> tuple[Tensor, list[Tensor], tuple[Tensor, ...]]:  # fmt: skip
        """As :meth:`tilewise.rnn.cpu_scan.CpuScan.run`."""
        kept = self.forward(x, u, states, parameters, resets, reverse=reverse, seed=seed, keep=keep)
        y, *others = self.after(kept, reverse=reverse)
        last = [each[0 if reverse else -1].to(self.dtype, copy=True) for each in (y, *others)]
        return y, last, () if kept.from_h is None else (kept.h, kept.others, kept.from_h)

    def gradients(
        self, saved: Sequence[Tensor], x: Tensor, u: Tensor, states: list[Tensor], parameters: list[Tensor],
        resets: Tensor | None, dy: Tensor | None, ends: Sequence[Tensor | None], *, reverse: bool, seed: int,
        of_weights: bool,
    ) -> tuple[Tensor, Tensor | None, list[Tensor], list[Tensor]]:  # fmt: skip
        """As :meth:`tilewise.rnn.cpu_scan.CpuScan.gradients`."""
        kept = Kept(*saved)
        before = self.before(kept, reverse=reverse)
        dy = torch.zeros_like(before) if dy is None else dy.contiguous()
        last = [torch.zeros_like(s) if end is None else end for s, end in zip(states, ends, strict=True)]
        dx, dgates, firsts, of_parameters = self.backward(
            kept, x, u, parameters, resets, dy, last, reverse=reverse, seed=seed
        )
        if not of_weights:
            return dx, None, firsts, of_parameters
        if resets is not None:
            before = before.masked_fill(resets[..., None], 0.0)
        return dx, dgates.flatten(0, 1).T @ before.flatten(0, 1), firsts, of_parameters

    def _run(self, name: tuple[object, ...], run: Callable[..., Any], given: Sequence[Tensor | None]) -> Any:
        """The results of a pass, replayed where it is known."""
        with self._on_device():
            return run(*given) if self._interpreted else self.replays(name, run, given)

    def _forward(
        self, x: Tensor, u: Tensor, states: Tensor, parameters: Tensor, resets: Tensor, seed: Tensor, *, reverse: bool
    ) -> Kept:
        """Launch all steps."""
        time, batch, hidden = len(x), self.batch, self.hidden
        first = time if reverse else 0
        h = x.new_empty((time + 1, batch, hidden))
        others = x.new_empty((time + 1, self.cell.states - 1, batch, hidden), dtype=torch.float32)
        h[first] = states[0]
        others[first] = states[1:]
        from_h = x.new_empty((time, batch, len(u)), dtype=torch.float32)
        rows, further = (
            self._rows(x),
            others if self.cell.states > 1 else self._unread(from_h),
        )
        kernel = self._kernel("step")
        for t in range(time - 1, -1, -1) if reverse else range(time):
            old, new = (t + 1, t) if reverse else (t, t + 1)
            if not self.fused:
                self._multiplied(h[old], u.T, from_h[t])
            tensors = (
                x[t], u, h[old], further[old], parameters, resets[t + 1], rows[t : t + 1], seed, from_h[t], h[new],
                further[new],
            )  # fmt: skip
            kernel(tensors, self.kernels.scalars)
        return Kept(h, others, from_h)

    def _backward(
        self, h: Tensor, others: Tensor, from_h: Tensor, x: Tensor, u: Tensor, parameters: Tensor, resets: Tensor,
        seed: Tensor, dy: Tensor, ends: Tensor, *, reverse: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Launch all steps backwards."""
        time, batch, hidden = len(x), self.batch, self.hidden
        ends = ends.clone()
        dx = torch.empty_like(x)
        gates = x.new_empty((time + 2, batch, len(u)))  # of a step t at t + 1, between zeros
        gates[0 if reverse else time + 1] = 0
        rows, further = (
            self._rows(x),
            others if self.cell.states > 1 else self._unread(from_h),
        )
        kernel = self._kernel("step_back")
        sums = from_h.new_zeros((kernel.grid[0], self.cell.parameters, hidden))
        carry = from_h.new_empty((batch, hidden))
        given = sums if sums.numel() else carry
        for t in range(time) if reverse else range(time - 1, -1, -1):
            old, later = (t + 1, t) if reverse else (t, t + 2)
            if not self.fused:
                self._multiplied(gates[later], u, carry)
            tensors = (
                x[t], u, h[old], further[old], from_h[t], parameters, resets[t + 1], resets[later], rows[t : t + 1],
                seed, dy[t], gates[later], carry, ends, dx[t], gates[t + 1], given,
            )  # fmt: skip
            kernel(tensors, self.kernels.scalars)
        first = time if reverse else 1
        self._multiplied(gates[first], u, carry)
        ends[0] += carry.masked_fill(resets[first].bool()[:, None], 0.0)
        return dx, gates[1:-1], ends, sums.sum(0).flatten()

    def _multiplied(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """A product by torch's library, with sums and result in fp32."""
        if a.dtype is torch.float32:
            torch.mm(a, b, out=out)
        elif self._interpreted:
            torch.mm(a.float(), b.float(), out=out)
        else:
            out.copy_(torch.mm(a, b, out_dtype=torch.float32))

    def _kernel(self, name: str) -> CellKernel:
        """The kernel of a pass, compiled at the first call under torch's precision of matrix products as it is."""
        precise = self.dtype is not torch.float32 or read_precision("cuda", "matmul") != "tf32"
        key = name, precise
        if key not in self._kernels:
            self._kernels[key] = self.kernels.made(name, "ieee" if precise else "tf32")
        return self._kernels[key]

    def _rows(self, x: Tensor) -> Tensor:
        """The number of each step's first row, (T,)."""
        return torch.arange(0, len(x) * self.batch, self.batch, dtype=torch.int64, device=x.device)

    def _unread(self, from_h: Tensor) -> Tensor:
        """What stands for further states of a cell without any, for every step."""
        return from_h.new_empty((1, self.batch, self.hidden)).expand(len(from_h) + 1, -1, -1)

    def _bytes(self, resets: Tensor | None, time: int) -> Tensor:
        """Resets as bytes (T + 2, N), those of step t at t + 1 between zeros."""
        found = torch.zeros((time + 2, self.batch), dtype=torch.uint8, device=self.device)
        if resets is not None:
            found[1:-1] = resets
        return found

    def _word(self, seed: int) -> Tensor:
        """A seed where kernels read it."""
        return torch.full((1,), seed, dtype=torch.int64, device=self.device)

    def _joined(self, parameters: list[Tensor]) -> Tensor:
        """All parts of all parameters behind one another; one zero where there are none."""
        return torch.cat(parameters) if parameters else torch.zeros(1, dtype=self.dtype, device=self.device)

    def _on_device(self) -> AbstractContextManager[Any]:
        """A context in which the scan's GPU is the current one."""
        several = self.device.type == "cuda" and torch.cuda.device_count() > 1
        return torch.cuda.device(self.device) if several else nullcontext()


def gpu_missing() -> str:
    """Why cells cannot be compiled for a GPU; empty where they can."""
    from tilewise.solvers.common.triton_run import has_triton

    return "" if has_triton() else "Triton is not installed"


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, at a multiple of 16 bytes."""
    return tensor if tensor.data_ptr() % ALIGNED == 0 else tensor.clone(memory_format=torch.contiguous_format)
