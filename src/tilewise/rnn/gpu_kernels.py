"""Kernels of a user's recurrent cell for fixed sizes: their constants, how they are compiled, and their launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.cpu.recurrent.expressions import Cell, backward_of
from tilewise.solvers.base import SolverUnavailable

__all__ = ["ALIGNED", "CellKernel", "CellKernels"]

ROWS, UNITS, DEPTH = 16, 32, 64
"""Sequences and units of a program that multiplies, and the numbers of a sum that it adds at a time."""
PLAIN_UNITS = 256
"""Units of a program of one sequence that does not multiply."""
ALIGNED = 16
"""Bytes: where tensors that kernels get begin at multiples of this."""


@dataclass(frozen=True)
class CellKernel:
    """A kernel for fixed sizes, as it is launched: by addresses, or in Triton's interpreter by tensors."""

    kernel: Any
    grid: tuple[int, int, int]
    constants: dict[str, Any]
    warps: int
    compiled: Callable[..., None] | None = None

    def __call__(self, tensors: Sequence[Tensor], scalars: Sequence[int]) -> None:
        """Launch it on the current stream."""
        if self.compiled is None:
            self.kernel[self.grid](*tensors, *scalars, **self.constants)
            return
        constants = [self.constants[name] for name in self.kernel.arg_names if name in self.constants]
        stream = torch.cuda.current_stream(tensors[0].device).cuda_stream
        self.compiled(*(t.data_ptr() for t in tensors), *scalars, *constants, stream=stream)


@dataclass(frozen=True)
class CellKernels:
    """The kernels of a ``cell`` for batches of N sequences of H units; ``fused`` ones multiply by the state as well."""

    cell: Cell
    batch: int
    hidden: int
    dtype: torch.dtype
    device: torch.device
    fused: bool

    @functools.cached_property
    def derivative(self) -> tuple[Cell, dict[str, list[int]]]:
        """The cell with its gradients, and their places."""
        return backward_of(self.cell)

    def made(self, name: str, precision: str) -> CellKernel:
        """Compile a kernel. Raises ``SolverUnavailable`` with Triton's reason."""
        from tilewise.kernels.triton.recurrent import cell_steps

        kernel = getattr(cell_steps, name)
        rows, units = (ROWS, UNITS) if self.fused else (1, min(PLAIN_UNITS, _power(self.hidden)))
        if self.cell.means:
            units = _power(self.hidden)
        constants: dict[str, Any] = {
            "FUSED": self.fused, "PRECISION": precision, "BN": rows, "BH": units, "BK": DEPTH,
            "RANDOMS": self.cell.randoms,
        }  # fmt: skip
        if name == "step":
            constants |= cell_steps.encoded(self.cell) | {
                "RESULTS": self.cell.results, "FROM_X": self.cell.from_x, "FROM_H": self.cell.from_h,
                "STATES": self.cell.states, "PARAMETERS": self.cell.parameters,
            }  # fmt: skip
        else:
            found = {f"OF_{each.upper()}": tuple(places) for each, places in self.derivative[1].items()}
            constants |= cell_steps.encoded(self.derivative[0]) | found
        grid = (-(-self.batch // rows), -(-self.hidden // units), 1)
        made = CellKernel(kernel, grid, constants, 4 if units <= 1024 else 8)
        return made if self.device.type == "cpu" else self._compiled(made, name)

    def _compiled(self, made: CellKernel, name: str) -> CellKernel:
        """A kernel with its machine code."""
        from tilewise.kernels.triton.driver_launch import late_launchers, made_now
        from tilewise.kernels.triton.launch import Launch, Pointer
        from tilewise.kernels.triton.own_cache import own_cache

        pointers = [Pointer(0, bytes_apart, dtype) for dtype, bytes_apart in self.looks(name)]
        launch = Launch(made.kernel, made.grid, tuple(pointers), self.scalars, made.constants, warps=made.warps)
        try:
            with torch.cuda.device(self.device), own_cache(), late_launchers():
                compiled = launch.compile([ALIGNED])
                made_now(compiled.run)
        except Exception as error:  # Triton raises errors of many kinds when a kernel does not compile or fit
            text = str(error).strip().splitlines()
            raise SolverUnavailable(f"{type(error).__name__}: {text[-1] if text else error!r}"[:300]) from error
        return CellKernel(made.kernel, made.grid, made.constants, made.warps, compiled[made.grid])

    def looks(self, name: str) -> list[tuple[torch.dtype, int]]:
        """The type of each tensor of a kernel, and bytes by which its places for single steps lie apart."""
        steps, size = self.batch * self.hidden, self.dtype.itemsize
        own, fp32, byte, word = self.dtype, torch.float32, torch.uint8, torch.int64
        x, gates = steps * self.cell.from_x * size, steps * self.cell.from_h
        state, other = (own, steps * size), (fp32, steps * 4)
        resets, row, seed, whole = (byte, self.batch), (word, 8), (word, ALIGNED), (own, ALIGNED)
        if name == "step":
            return [(own, x), whole, state, other, whole, resets, row, seed, (fp32, gates * 4), state, other]
        return [
            (own, x), whole, state, other, (fp32, gates * 4), whole, resets, resets, row, seed, state,
            (own, gates * size), (fp32, ALIGNED), (fp32, ALIGNED), (own, x), (own, gates * size), (fp32, ALIGNED),
        ]  # fmt: skip

    @property
    def scalars(self) -> tuple[int, int, int]:
        """Sequences, units, and the numbers of a state of all sequences."""
        return self.batch, self.hidden, self.batch * self.hidden


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()
