"""A recurrence whose kernels are functions on addresses, as those of GPUs are, computed by torch's operators."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.problems.recurrent.tensors import GATES
from tilewise.solvers.recurrent import stepped
from tilewise.solvers.recurrent._grid_recurrence import GridRecurrence, padded

__all__ = ["StepsByAddress"]


class StepsByAddress(GridRecurrence):
    """Kernels read their tensors by address alone: a wrong order, size or lifetime shows in numbers."""

    def _launch(self, backward: bool, time: int, batch: int, *scalars: int) -> Callable[..., None]:
        numbers = tuple(map(int, scalars))
        return Launched(self.cell, padded(self.hidden, self.dtype), self.dtype, backward, (time, batch), numbers)


class Launched:
    """One kernel for tensors of ``sizes`` (time, batch)."""

    def __init__(
        self, cell: str, hidden: int, dtype: torch.dtype, backward: bool, sizes: tuple[int, int], scalars: Any
    ) -> None:
        time, batch = sizes
        self.hidden, self.dtype, self.sizes, self.scalars = hidden, dtype, sizes, scalars
        self.lstm, self.gru, self.gates = cell == "lstm", cell == "gru", GATES[cell]
        problem = RecurrentProblem(cell, time, batch, hidden, hidden)
        self.steps = stepped.recurrence(problem)
        self.run = self.backward if backward else self.forward

    def __call__(self, *addresses: int) -> None:
        with torch.no_grad():
            self.run(*addresses)

    def tensor(self, address: int, *shape: int, row: int = 0, dtype: torch.dtype | None = None) -> Any:
        """The tensor of ``shape`` at an address, whose rows lie ``row`` elements apart; ``None`` for no address."""
        if not address:
            return None
        kind = dtype or self.dtype
        row = row or shape[-1]
        strides = [row, 1] if len(shape) == 2 else [shape[1] * row, row, 1] if len(shape) == 3 else [1]
        count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        memory = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=kind).as_strided(shape, strides)

    def firsts(self, h0: int, c0: int) -> tuple[Tensor, Tensor | None]:
        """First states."""
        assert bool(c0) == self.lstm
        size = self.sizes[1], self.hidden
        return self.tensor(h0, *size), self.tensor(c0, *size)

    def forward(
        self, gx: int, u: int, bias_n: int, h0: int, c0: int, y: int, cells: int, part: int, last: int, last_cell: int
    ) -> None:
        """As a kernel's forward; a GRU's ``part`` gets what ``backward`` needs of the bias."""
        (time, batch), hidden, (row, reverse, keep) = self.sizes, self.hidden, self.scalars
        assert (bool(cells), bool(part)) == (bool(keep and self.lstm), bool(keep and self.gru))
        states, bias = self.tensor(y, time, batch, hidden, row=row), self.tensor(bias_n, hidden)
        assert_unwritten(states)
        gates, weight = (
            self.tensor(gx, time, batch, self.gates * hidden),
            self.tensor(u, self.gates * hidden, hidden),
        )
        found, cell, _ = self.steps.forward(
            gates.clone(), weight, bias, *self.firsts(h0, c0), states, reverse=bool(reverse), keep=False
        )
        self.tensor(last, batch, hidden).copy_(found)
        if self.lstm:
            self.tensor(last_cell, batch, hidden).copy_(cell)
        if keep and self.gru:
            self.tensor(part, time, batch, hidden).copy_(torch.zeros(hidden) if bias is None else bias)

    def backward(
        self, gates: int, u: int, y: int, cells: int, part: int, h0: int, c0: int, dy: int, dhn: int, dcn: int,
        changes: int, own: int, dh0: int, dc0: int,
    ) -> None:  # fmt: skip
        """As a kernel's backward; it computes the forward again."""
        (time, batch), hidden, (row, of_dy, reverse) = self.sizes, self.hidden, self.scalars
        assert (bool(cells), bool(part), bool(own), bool(dc0)) == (self.lstm, self.gru, self.gru, self.lstm)
        wide = self.gates * hidden
        given, weight = self.tensor(gates, time, batch, wide), self.tensor(u, wide, hidden)
        bias = self.tensor(part, time, batch, hidden)[0, 0] if self.gru else None
        first, states = self.firsts(h0, c0), torch.empty(time, batch, hidden, dtype=self.dtype)
        *_, saved = self.steps.forward(given.clone(), weight, bias, *first, states, reverse=bool(reverse), keep=True)
        torch.testing.assert_close(states, self.tensor(y, time, batch, hidden, row=row))
        results = self.tensor(changes, time, batch, wide), self.tensor(own, time, batch, hidden)
        for each in results:
            assert each is None or assert_unwritten(each)
        size = batch, hidden
        ends = self.tensor(dy, time, batch, hidden, row=of_dy), self.tensor(dhn, *size), self.tensor(dcn, *size)
        found = self.steps.backward(saved, weight, bias, *first, states, *ends, reverse=bool(reverse))
        for result, value in zip((*results, self.tensor(dh0, *size), self.tensor(dc0, *size)), found, strict=True):
            if result is not None:
                result.copy_(value)


def assert_unwritten(tensor: Tensor) -> bool:
    """All bits are set, by which kernels know that nothing is written yet."""
    assert bool((tensor.contiguous().view(torch.int32) == -1).all())
    return True
