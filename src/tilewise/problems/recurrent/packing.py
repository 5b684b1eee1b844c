"""How sequences of several lengths lie behind one another in a packed batch.

Sequences stand in the order of their lengths, the longest first. The rows of a step are those sequences that are long
enough, and the rows of all steps follow each other. So each step takes part of the batch from its beginning, and no row
is padding. ``torch.nn.utils.rnn.PackedSequence`` lays its data in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.problems.recurrent.tensors import Recurrent

__all__ = ["Packing", "dense_packing", "packing_of", "typical_packing"]


@dataclass(frozen=True, eq=False)
class Packing:
    """The sequences of each step: ``sizes`` (time), int64 on the CPU, none larger than the one before.

    :meth:`of` checks numbers that come from outside.
    """

    sizes: Tensor

    @classmethod
    def of(cls, sizes: Tensor, rows: int) -> Packing:
        """A packing of ``rows`` rows with these ``sizes``.

        Raises ``ValueError`` where the sizes are no int64 on the CPU, not positive, rise, or have another sum. For
        example ``Packing.of(torch.tensor([3, 3, 1]), 7)`` has sequences of 3, 2 and 2 steps.
        """
        if sizes.dim() != 1 or sizes.dtype is not torch.int64 or sizes.device.type != "cpu" or not len(sizes):
            raise ValueError("sizes: one dimension of int64 on the CPU, with at least one step, would do")
        if int(sizes[-1]) < 1 or bool((sizes[1:] > sizes[:-1]).any()):
            raise ValueError("sizes: of one step larger than of the step before, or below 1")
        if int(sizes.sum()) != rows:
            raise ValueError(f"sizes: their sum is {int(sizes.sum())}, but there are {rows} rows")
        return cls(sizes.contiguous())

    @property
    def time(self) -> int:
        """Steps of the longest sequence."""
        return len(self.sizes)

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.steps[0][1] if self.time else 0

    @property
    def rows(self) -> int:
        """Rows of all steps: the sum of all lengths."""
        return int(self.offsets[-1])

    @functools.cached_property
    def offsets(self) -> Tensor:
        """The first row of each step, and at the end the number of rows: (time + 1), int64."""
        offsets = torch.zeros(self.time + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(self.sizes, 0, out=offsets[1:])
        return offsets

    @functools.cached_property
    def steps(self) -> list[tuple[int, int]]:
        """The first row and the number of rows of each step."""
        return list(zip(self.offsets.tolist()[:-1], self.sizes.tolist(), strict=True))

    def order(self, *, reverse: bool) -> Iterator[tuple[int, int]]:
        """The steps' first rows and numbers of rows, in the order of a pass: from the last step where ``reverse``."""
        return reversed(self.steps) if reverse else iter(self.steps)

    @functools.cached_property
    def lengths(self) -> Tensor:
        """The length of each sequence: (batch), int64."""
        sequences = torch.arange(self.batch, dtype=torch.int64, device="cpu")
        return self.time - torch.searchsorted(self.sizes.flip(0), sequences, right=True)

    def last_rows(self, *, reverse: bool) -> Tensor:
        """The row in which each sequence has its last state: its own end, or where ``reverse`` its beginning."""
        sequences = torch.arange(self.batch, dtype=torch.int64, device="cpu")
        return sequences if reverse else self.offsets[self.lengths - 1] + sequences

    def rows_before(self, *, reverse: bool) -> Tensor:
        """For each row, that of the state before among first states (batch) and all rows behind them.

        With ``reverse`` a sequence begins at its own end.
        """
        return self._before_backwards if reverse else self._before_forwards

    @functools.cached_property
    def _before_forwards(self) -> Tensor:
        return self._rows_before(reverse=False)

    @functools.cached_property
    def _before_backwards(self) -> Tensor:
        return self._rows_before(reverse=True)

    def _rows_before(self, *, reverse: bool) -> Tensor:
        """:meth:`rows_before`, computed."""
        offsets, sizes = self.offsets, self.sizes
        step = torch.repeat_interleave(torch.arange(self.time, dtype=torch.int64, device="cpu"), sizes)
        sequence = torch.arange(self.rows, dtype=torch.int64, device="cpu") - offsets[step]
        earlier = step + 1 if reverse else step - 1
        exists = torch.cat((sizes[1:], sizes.new_zeros(1)))[step] > sequence if reverse else step > 0
        found = self.batch + offsets[earlier.clamp(0, self.time - 1)] + sequence
        return torch.where(exists, found, sequence)

    def part(self, start: int, length: int) -> tuple[Packing, Tensor]:
        """The packing of ``length`` sequences from the one with number ``start`` on, and their rows."""
        sizes = (self.sizes - start).clamp(0, length)
        sizes = sizes[sizes > 0]
        within = Packing(sizes)
        step = torch.repeat_interleave(torch.arange(within.time, dtype=torch.int64, device="cpu"), sizes)
        sequence = torch.arange(within.rows, dtype=torch.int64, device="cpu") - within.offsets[step]
        return within, self.offsets[step] + start + sequence


def typical_packing(time: int, batch: int, rows: int) -> Packing:
    """A packing with these numbers, from which plans are made: lengths fall evenly from ``time``, few are very short.

    Raises ``ValueError`` where there is none. For example the lengths of ``typical_packing(9, 3, 18)`` are 9, 6 and 3.
    """
    if not time + batch - 1 <= rows <= time * batch:
        raise ValueError(f"rows={rows}: {time + batch - 1} to {time * batch} would do for {time} steps of {batch}")
    mean = rows / batch
    power = (time - 1) / (mean - 1) - 1 if mean > 1 else 1.0
    place = (torch.arange(batch, dtype=torch.float64, device="cpu") + 0.5) / batch
    lengths = (1 + (time - 1) * (1 - place) ** power).round().long().clamp(1, time)
    lengths[0] = time
    missing = rows - int(lengths.sum())
    while missing:
        sign = 1 if missing > 0 else -1
        room = ((lengths < time) if sign > 0 else (lengths > 1)) & (
            torch.arange(batch, dtype=torch.int64, device="cpu") > 0
        )
        free = room.nonzero()[:, 0]
        share = max(1, abs(missing) // len(free))
        chosen = free[: abs(missing)]
        lengths[chosen] = (lengths[chosen] + sign * share).clamp(1, time)
        missing = rows - int(lengths.sum())
    lengths = lengths.sort(descending=True).values
    steps = torch.arange(time, dtype=torch.int64, device="cpu")
    return Packing(batch - torch.searchsorted(lengths.flip(0), steps, right=True))


def packing_of(p: Recurrent) -> Packing:
    """The packing for which ``p`` is planned: typical lengths, or all steps of every sequence."""
    if p.packed:
        return typical_packing(p.time, p.batch, p.packed)
    return dense_packing(p.time, p.batch)


def dense_packing(time: int, batch: int) -> Packing:
    """The packing in which every sequence has all steps."""
    return Packing(torch.full((time,), batch, dtype=torch.int64, device="cpu"))
