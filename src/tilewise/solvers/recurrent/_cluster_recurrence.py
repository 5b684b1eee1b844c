"""Recurrent layers whose weights stay in clusters of blocks: one launch for all steps of a layer's directions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from tilewise.kernels.cuda.launch import Kernel, kernel
from tilewise.kernels.cuda.recurrent.cluster_programs import ClusterProgram
from tilewise.machine.recent import Recent
from tilewise.problems.recurrent.tensors import GATES
from tilewise.solvers.recurrent._grid_recurrence import WHOLE, padded

__all__ = ["MOST_LAYERS", "ClusterKept", "ClusterRecurrence", "ClusterShape", "cluster_program", "wave_clusters"]

MOST_LAUNCHES = 128
"""Launches, by their sizes, that are remembered."""
MOST_LAYERS = 4
"""Layers that the kernel of all layers has places for."""
WAVE_POINTERS = {False: 4 * MOST_LAYERS - 2 + 9, True: 2 * MOST_LAYERS - 1 + 15}
"""Weights and for the forward biases of all layers, and what there is one of."""
ClusterShape = tuple[int, int, int]
"""Blocks of a cluster, its batch rows, groups of warps with sums of their own: see the program."""


@dataclass(frozen=True, slots=True)
class ClusterKept:
    """What a forward keeps: the gates' values, the states, and their cells or what U gives a GRU's third gate.

    All but ``states`` (steps, batch, directions * hidden) have a direction each first. Units are padded.
    """

    gates: Tensor
    cells: Tensor | None
    part: Tensor | None
    states: Tensor


@dataclass
class ClusterRecurrence:
    """The steps of one layer in all its directions at once on GPU ``device``.

    T steps, N sequences, H hidden units, G gates, D directions. With one direction ``reverse`` says whether it runs
    backwards in time; of two the second one does. ``shapes`` are those of the forward and of the backward kernel.
    ``hidden`` is padded with units that stay zero where rows would not begin at 16 bytes.
    """

    cell: str
    hidden: int
    dtype: torch.dtype
    device: int
    shapes: tuple[ClusterShape, ClusterShape]
    precise: bool = True
    _launches: Recent[tuple[int, ...], Callable[..., None]] = field(default_factory=lambda: Recent(MOST_LAUNCHES))

    def forward(
        self, gx: Tensor, us: Sequence[Tensor], biases: Sequence[Tensor | None], h0: Tensor, c0: Tensor | None,
        y: Tensor, *, reverse: bool = False, keep: bool,
    ) -> tuple[Tensor, Tensor | None, ClusterKept]:  # fmt: skip
        """Write ``y`` (T, N, D*H); return hn, cn (D, N, H) and what ``backward`` needs, which follows where ``keep``.

        ``gx`` (D, T, N, G*H), which may be overwritten, is what the input gives each gate, with all biases but
        ``biases``, those of a GRU's n gate. Of ``us`` (G*H, H) and ``biases`` (H) each direction has one.
        """
        directions, time, batch, _ = gx.shape
        wide = padded(self.hidden, self.dtype)
        us = [self._weights(u) for u in us]
        gx, h0 = self._gates(gx), _aligned(_wide(h0, wide))
        biases = [None if bias is None else _wide(bias, wide) for bias in biases]
        c0 = None if c0 is None else _wide(c0, wide)
        own = self.hidden == wide and y.is_contiguous() and not y.data_ptr() % 16
        states = y if own else _new(y, time, batch, directions * wide)
        lstm = self.cell == "lstm"
        cells = _new(y, directions, time, batch, wide, dtype=torch.float32) if lstm and keep else None
        part = _new(y, directions, time, batch, wide) if self.cell == "gru" and keep else None
        last, last_cell = torch.empty_like(h0), torch.empty_like(h0) if lstm else None
        run = self._launch(False, directions, time, batch, states.stride(1), reverse, keep)
        tensors = (gx, us[0], us[-1], biases[0], biases[-1], h0, c0, states, cells, part, last, last_cell)
        run(*map(_address, tensors))
        if not own:
            y.view(time, batch, directions, -1).copy_(states.view(time, batch, directions, wide)[..., : self.hidden])
        return (
            self._narrow(last),
            None if last_cell is None else self._narrow(last_cell),
            ClusterKept(gx, cells, part, states),
        )

    def wave(
        self, gx: Tensor, us: Sequence[Tensor], ws: Sequence[Tensor], biases: Sequence[Tensor | None],
        input_biases: Sequence[Tensor | None], h0: Tensor, c0: Tensor | None, y: Tensor, *, keep: bool,
    ) -> tuple[Tensor, Tensor | None, ClusterKept]:  # fmt: skip
        """All steps of L layers in one direction: write ``y`` (T, N, H), and return hn and cn (L, N, H).

        ``gx`` (L, T, N, G*H) holds what the input gives the gates of layer 0. ``us`` has L matrices, and ``ws``
        (G*H, H) and ``input_biases`` (G*H) those of the layers above layer 0. Also returned is what
        :meth:`wave_backward` needs beside ``y``: its ``states`` (L-1, T, N, H) are those of the other layers. Raises
        ``ValueError`` where units would be padded.
        """
        layers, time, batch, _ = gx.shape
        if padded(self.hidden, self.dtype) != self.hidden:
            raise ValueError(f"hidden={self.hidden}: a multiple of {16 // self.dtype.itemsize} would do")
        between = _new(y, layers - 1, time, batch, self.hidden)
        for exchanged in (gx[1:], between):
            exchanged.view(WHOLE[self.dtype.itemsize]).fill_(-1)
        us, ws, h0 = [self._weights(u) for u in us], [self._weights(w) for w in ws], _aligned(h0.contiguous())
        lstm = self.cell == "lstm"
        cells = _new(y, layers, time, batch, self.hidden, dtype=torch.float32) if lstm and keep else None
        part = _new(y, layers, time, batch, self.hidden) if self.cell == "gru" and keep else None
        last, last_cell = torch.empty_like(h0), torch.empty_like(h0) if lstm else None
        matrices = (*_filled(us, MOST_LAYERS), *_filled(ws, MOST_LAYERS - 1))
        shifts = (*_filled(biases, MOST_LAYERS), *_filled(input_biases, MOST_LAYERS - 1))
        run = self._wave(False, layers, time, batch, keep)
        run(*map(_address, (gx, *matrices, *shifts, h0, c0, between, y, cells, part, last, last_cell)))
        return last, last_cell, ClusterKept(gx, cells, part, between)

    def wave_backward(
        self, saved: ClusterKept, y: Tensor, us: Sequence[Tensor], ws: Sequence[Tensor], h0: Tensor, c0: Tensor | None,
        dy: Tensor, dhn: Tensor | None, dcn: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
        """The gradients of all layers' gates (L, T, N, G*H), of U_n h + b_hn of a GRU (L, T, N, H), of h0 and of c0.

        ``dy`` (T, N, H), and ``dhn`` and ``dcn`` (L, N, H), which may be ``None`` for zero.
        """
        layers, time, batch, _ = saved.gates.shape
        us, ws = [self._weights(u) for u in us], [self._weights(w) for w in ws]
        h0, dy = h0.contiguous(), dy.contiguous()
        c0, dhn, dcn = (None if t is None else t.contiguous() for t in (c0, dhn, dcn))
        changes, between = torch.empty_like(saved.gates), torch.empty_like(saved.states)
        for exchanged in (changes[1:], between):
            exchanged.view(WHOLE[self.dtype.itemsize]).fill_(-1)
        own = _new(y, layers, time, batch, self.hidden) if self.cell == "gru" else None
        dh0, dc0 = torch.empty_like(h0), torch.empty_like(h0) if self.cell == "lstm" else None
        matrices = (*_filled(us, MOST_LAYERS), *_filled(ws, MOST_LAYERS - 1))
        kept = saved.states, y, saved.cells, saved.part, h0, c0
        run = self._wave(True, layers, time, batch, dy.stride(1))
        results = between, changes, own, dh0, dc0
        run(*map(_address, (saved.gates, *matrices, *kept, dy, dhn, dcn, *results)))
        return changes, own, dh0, dc0

    def backward(
        self, saved: ClusterKept, us: Sequence[Tensor], h0: Tensor, c0: Tensor | None, dy: Tensor, dhn: Tensor | None,
        dcn: Tensor | None, *, reverse: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
        """The gradients of ``gx``, of U_n h + b_hn of a GRU (D, T, N, H), of h0 and of c0.

        ``dy`` (T, N, D*H), and ``dhn`` and ``dcn`` (D, N, H), which may be ``None`` for zero.
        """
        directions, time, batch, _ = saved.gates.shape
        wide, states = padded(self.hidden, self.dtype), saved.states
        us = [self._weights(u) for u in us]
        h0 = _wide(h0, wide)
        c0, dhn, dcn = (None if t is None else _wide(t, wide) for t in (c0, dhn, dcn))
        if self.hidden != wide:
            dy = _wide(dy.unflatten(2, (directions, self.hidden)), wide).flatten(2)
        elif not dy.is_contiguous():
            dy = dy.contiguous()
        changes = torch.empty_like(saved.gates)
        own = _new(h0, directions, time, batch, wide) if self.cell == "gru" else None
        dh0, dc0 = torch.empty_like(h0), torch.empty_like(h0) if self.cell == "lstm" else None
        run = self._launch(True, directions, time, batch, states.stride(1), dy.stride(1), reverse)
        ends = h0, c0, dy, dhn, dcn
        tensors = (saved.gates, us[0], us[-1], states, saved.cells, saved.part, *ends, changes, own, dh0, dc0)
        run(*map(_address, tensors))
        if self.hidden != wide:
            changes = changes.unflatten(3, (GATES[self.cell], wide))[..., : self.hidden].flatten(3)
            own = None if own is None else self._narrow(own)
        return changes, own, self._narrow(dh0), None if dc0 is None else self._narrow(dc0)

    def compile(self, p: ClusterProgram) -> Kernel:
        """The kernel of a program. Raises ``RuntimeError`` where it cannot be compiled or loaded, or never runs."""
        found = kernel(p.source(), p.name, self.device)
        if not found.clusters(p.cluster, p.threads, p.shared):
            raise RuntimeError(f"the device runs no cluster of {p.cluster} blocks with {p.shared} bytes each")
        return found

    def _gates(self, gx: Tensor) -> Tensor:
        """The gates with units that stay zero, as many as rows of 16 bytes need."""
        more = padded(self.hidden, self.dtype) - self.hidden
        if not more:
            return gx.contiguous()
        return functional.pad(gx.unflatten(3, (GATES[self.cell], self.hidden)), (0, more)).flatten(3)

    def _weights(self, u: Tensor) -> Tensor:
        """The weights with rows and columns of zeros for such units, at 16 bytes."""
        more = padded(self.hidden, self.dtype) - self.hidden
        if not more:
            return _aligned(u.contiguous())
        gates = u.reshape(GATES[self.cell], self.hidden, self.hidden)
        return functional.pad(gates, (0, more, 0, more)).flatten(0, 1)

    def _narrow(self, tensor: Tensor) -> Tensor:
        """Without the units that stay zero."""
        return tensor if tensor.shape[-1] == self.hidden else tensor[..., : self.hidden].contiguous()

    def _launch(self, backward: bool, directions: int, time: int, batch: int, *scalars: int) -> Callable[..., None]:
        """The launch for tensors of these sizes, compiled at the first call.

        Clusters do not wait for each other, and the blocks of one always run at a time. So it starts as any other, and
        clusters that find no room follow the first ones.
        """
        key = (backward, directions, time, batch, *map(int, scalars))
        found = self._launches.get(key)
        if found is None:
            p = cluster_program(self.cell, self.hidden, self.dtype, self.shapes[backward], self.precise, backward)
            grid = p.cluster * -(-batch // p.rows) * directions
            pointers = 15 if backward else 12
            found = self.compile(p).launch(grid, p.threads, p.shared, pointers, key[2:], cluster=p.cluster)
            self._launches[key] = found
        return found

    def _wave(self, backward: bool, layers: int, time: int, batch: int, scalar: int) -> Callable[..., None]:
        """The launch of all layers. Their clusters wait for each other, so it starts only when the device has room."""
        key = (2 + backward, layers, time, batch, int(scalar))
        found = self._launches.get(key)
        if found is None:
            p = cluster_program(self.cell, self.hidden, self.dtype, self.shapes[backward], self.precise, backward, True)
            grid = p.cluster * wave_clusters(layers, batch, p.rows)
            scalars = (time, batch, layers, int(scalar))
            found = self.compile(p).launch(
                grid, p.threads, p.shared, WAVE_POINTERS[backward], scalars, together=True, cluster=p.cluster
            )
            self._launches[key] = found
        return found


@functools.lru_cache(maxsize=256)
def cluster_program(
    cell: str, hidden: int, dtype: torch.dtype, shape: ClusterShape, precise: bool, backward: bool, wave: bool = False
) -> ClusterProgram:
    """The program of all directions of a layer, or with ``wave`` of all layers, with its units padded."""
    cluster, rows, columns = shape
    return ClusterProgram(cell, padded(hidden, dtype), dtype, cluster, rows, columns, backward, precise, wave)


def wave_clusters(layers: int, batch: int, rows: int) -> int:
    """Clusters of ``rows`` batch rows that all layers take at a time: for their steps, and inputs of all but one."""
    return (2 * layers - 1) * -(-batch // rows)


def _filled(tensors: Sequence[Tensor | None], count: int) -> tuple[Tensor | None, ...]:
    """So many tensors, ``None`` for layers that do not exist."""
    return (*tensors, *(None for _ in range(count - len(tensors))))


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _aligned(tensor: Tensor) -> Tensor:
    """A dense tensor at 16 bytes."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _new(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def _wide(tensor: Tensor, wide: int) -> Tensor:
    """The tensor, dense, with zeros after its last dimension's elements, up to ``wide``."""
    if tensor.shape[-1] == wide:
        return tensor.contiguous()
    return functional.pad(tensor, (0, wide - tensor.shape[-1])).contiguous()
