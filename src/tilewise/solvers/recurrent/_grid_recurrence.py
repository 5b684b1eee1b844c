"""Recurrent layers whose weights stay on the chip: one launch for all steps of a direction."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from tilewise.kernels.cuda.launch import Kernel, kernel
from tilewise.kernels.cuda.recurrent.programs import RecurrentProgram
from tilewise.machine.recent import Recent
from tilewise.problems.recurrent.tensors import GATES

__all__ = ["TILE", "GridRecurrence", "Kept", "Shape", "padded", "program"]

MOST_LAUNCHES = 512
"""Launches, by their sizes, that are remembered: parts of packed batches have many."""
TILE = 16
"""Batch rows that matrix units take at a time."""
Shape = tuple[int, int, int, int, int, int]
"""Units of a block, tiles, blocks of a cluster, groups of teams with columns of their own, rows of a tile, and warps of
a team."""
WHOLE = {2: torch.int16, 4: torch.int32}
"""Whole numbers by their bytes, of which -1 has all bits set."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a forward pass keeps: the gates' values, the states, and their cells or what U gives a GRU's third gate."""

    gates: torch.Tensor
    cells: torch.Tensor | None
    part: torch.Tensor | None
    states: torch.Tensor


@dataclass
class GridRecurrence:
    """The steps of one layer in one direction on GPU ``device``, as :class:`Recurrence` says.

    ``shapes`` are those of the forward and of the backward kernel. ``hidden`` is padded with units that stay zero where
    rows would not begin at 16 bytes.
    """

    cell: str
    hidden: int
    dtype: torch.dtype
    device: int
    shapes: tuple[Shape, Shape]
    precise: bool = True
    _launches: Recent[tuple[int, ...], Callable[..., None]] = field(default_factory=lambda: Recent(MOST_LAUNCHES))

    def forward(
        self, gx: torch.Tensor, u: torch.Tensor, bias_n: torch.Tensor | None, h0: torch.Tensor, c0: torch.Tensor | None,
        y: torch.Tensor, *, reverse: bool, keep: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Kept]:  # fmt: skip
        """See the protocol."""
        (time, batch, hidden), lstm = y.shape, self.cell == "lstm"
        wide = padded(hidden, self.dtype)
        u = self._weights(u)
        gx, h0 = self._gates(gx), _wide(h0, wide)
        bias_n, c0 = (None if t is None else _wide(t, wide) for t in (bias_n, c0))
        gx, h0 = (t if _aligned(t) else t.clone() for t in (gx, h0))
        states = y if hidden == wide and _aligned(y) else _new(y, time, batch, wide)
        states.view(WHOLE[self.dtype.itemsize]).fill_(-1)
        cells = _new(y, time, batch, wide, dtype=torch.float32) if lstm and keep else None
        part = _new(y, time, batch, wide) if self.cell == "gru" and keep else None
        last, last_cell = _new(y, batch, wide), _new(y, batch, wide) if lstm else None
        run = self._launch(False, time, batch, states.stride(1), reverse, keep)
        run(*map(_address, (gx, u, bias_n, h0, c0, states, cells, part, last, last_cell)))
        if states is not y:
            y.copy_(states[..., :hidden])
        saved = Kept(gx, cells, part, states)
        return _narrow(last, hidden), None if last_cell is None else _narrow(last_cell, hidden), saved

    def backward(
        self, saved: Kept, u: torch.Tensor, bias_n: torch.Tensor | None, h0: torch.Tensor, c0: torch.Tensor | None,
        y: torch.Tensor, dy: torch.Tensor, dhn: torch.Tensor | None, dcn: torch.Tensor | None, *, reverse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """See the protocol."""
        (time, batch, hidden), gates = y.shape, GATES[self.cell]
        wide = padded(hidden, self.dtype)
        u = self._weights(u)
        h0 = _wide(h0, wide)
        c0, dhn, dcn = (None if t is None else _wide(t, wide) for t in (c0, dhn, dcn))
        if hidden != wide or not _in_rows(dy):
            dy = _wide(dy, wide)
        changes = _new(y, time, batch, gates * wide)
        own = _new(y, time, batch, wide) if self.cell == "gru" else None
        for exchanged in (changes, own):
            if exchanged is not None:
                exchanged.view(WHOLE[self.dtype.itemsize]).fill_(-1)
        dh0, dc0 = _new(y, batch, wide), _new(y, batch, wide) if self.cell == "lstm" else None
        states = saved.states
        run = self._launch(True, time, batch, states.stride(1), dy.stride(1), reverse)
        tensors = (saved.gates, u, states, saved.cells, saved.part, h0, c0, dy, dhn, dcn, changes, own, dh0, dc0)
        run(*map(_address, tensors))
        if hidden != wide:
            changes = changes.view(time, batch, gates, wide)[..., :hidden].reshape(time, batch, gates * hidden)
            own = None if own is None else _narrow(own, hidden)
        return changes, own, _narrow(dh0, hidden), None if dc0 is None else _narrow(dc0, hidden)

    def by_address(self, backward: bool, time: int, batch: int, *scalars: int) -> Callable[..., None] | None:
        """What runs the steps of tensors of these sizes by their addresses, in the order of ``forward``'s launch.

        Of a backward it is the order of that launch. ``scalars`` are a row's elements and whether steps run back in
        time, and whether all is kept, or for a backward the elements of a row of the states and of their gradients,
        and whether steps run back in time. ``None`` where tensors are padded for the kernels.
        """
        if padded(self.hidden, self.dtype) != self.hidden:
            return None
        return self._launch(backward, time, batch, *scalars)

    def compile(self, p: RecurrentProgram) -> Kernel:
        """The kernel of a program. Raises ``RuntimeError`` where it cannot be compiled or loaded."""
        return kernel(p.source(), p.name, self.device)

    def _gates(self, gx: torch.Tensor) -> torch.Tensor:
        """The gates with units that stay zero, as many as rows of 16 bytes need."""
        more = padded(self.hidden, self.dtype) - self.hidden
        if not more:
            return gx
        return functional.pad(gx.unflatten(2, (GATES[self.cell], self.hidden)), (0, more)).flatten(2)

    def _weights(self, u: torch.Tensor) -> torch.Tensor:
        """The weights with rows and columns of zeros for such units, at 16 bytes."""
        more = padded(self.hidden, self.dtype) - self.hidden
        if not more:
            return u if _aligned(u) else u.clone(memory_format=torch.contiguous_format)
        gates = u.reshape(GATES[self.cell], self.hidden, self.hidden)
        return functional.pad(gates, (0, more, 0, more)).flatten(0, 1)

    def _launch(self, backward: bool, time: int, batch: int, *scalars: int) -> Callable[..., None]:
        """The launch for tensors of these sizes, compiled at the first call."""
        key = (backward, time, batch, *map(int, scalars))
        found = self._launches.get(key)
        if found is None:
            p = program(self.cell, self.hidden, self.dtype, self.shapes[backward], self.precise, backward)
            grid = p.slices * -(-batch // (p.rows * p.tiles))
            pointers = 14 if backward else 10
            found = self.compile(p).launch(grid, p.threads, p.shared, pointers, key[1:], together=True)
            self._launches[key] = found
        return found


def padded(hidden: int, dtype: torch.dtype) -> int:
    """Units of which rows begin at multiples of 16 bytes."""
    wide = 16 // dtype.itemsize
    return -(-hidden // wide) * wide


@functools.lru_cache(maxsize=256)
def program(
    cell: str, hidden: int, dtype: torch.dtype, shape: Shape, precise: bool, backward: bool
) -> RecurrentProgram:
    """The program of a direction, with its units padded."""
    return RecurrentProgram(cell, padded(hidden, dtype), dtype, *shape, backward, precise)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _in_rows(tensor: torch.Tensor) -> bool:
    """Whether a tensor of three dimensions is rows of dense numbers that all lie as far apart."""
    time, batch, hidden = tensor.shape
    row = tensor.stride(1) if batch > 1 else hidden
    return (
        (hidden == 1 or tensor.stride(2) == 1)
        and row >= hidden
        and (time == 1 or tensor.stride(0) == batch * tensor.stride(1))
    )


def _aligned(tensor: torch.Tensor) -> bool:
    """Whether every row begins at 16 bytes and is dense."""
    if tensor.data_ptr() % 16:
        return False
    if tensor.dim() == 3 and not tensor.is_contiguous():
        return _in_rows(tensor) and not tensor.stride(1) * tensor.element_size() % 16
    return tensor.is_contiguous()


def _new(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def _wide(tensor: torch.Tensor, wide: int) -> torch.Tensor:
    """The tensor, dense, with zeros after its last dimension's elements, up to ``wide``."""
    if tensor.shape[-1] == wide:
        return tensor.contiguous()
    return functional.pad(tensor, (0, wide - tensor.shape[-1])).contiguous()


def _narrow(tensor: torch.Tensor, hidden: int) -> torch.Tensor:
    return tensor if tensor.shape[-1] == hidden else tensor[..., :hidden].contiguous()
