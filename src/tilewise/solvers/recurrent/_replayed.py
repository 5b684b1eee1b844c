"""The steps of a recurrence as replays of CUDA graphs, in place of a launch for each operator of each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tilewise.problems.recurrent.packing import Packing
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers.common.matmul import library_scratch
from tilewise.solvers.common.replays import Replays
from tilewise.solvers.recurrent._recurrence import Recurrence, Saved

__all__ = ["Replayed", "bytes_of_graphs"]

FP32 = 4
TEMPORARY = 8
"""What operators of a step have at a time beside results, in states of all gates."""


@dataclass(frozen=True)
class Replayed:
    """The steps of a ``recurrence`` by ``replays``, as :class:`Recurrence` says.

    A batch of so many ``steps`` is recorded when it comes first, others when they come again. ``packing`` is that of
    the recurrence, each of which has graphs of its own.
    """

    recurrence: Recurrence
    replays: Replays
    steps: int
    packing: Packing | None = None

    def forward(
        self, gx: Tensor, u: Tensor, own: Tensor | None, h0: Tensor, c0: Tensor | None, y: Tensor, /,
        *, reverse: bool, keep: bool,
    ) -> tuple[Tensor, Tensor | None, Saved]:  # fmt: skip
        """As :meth:`Recurrence.forward`."""

        def run(*tensors: Any) -> Any:
            return self.recurrence.forward(*tensors, reverse=reverse, keep=keep)

        name = "forward", reverse, keep, self._rows
        found: tuple[Tensor, Tensor | None, Saved] = self.replays(
            name, run, (gx, u, own, h0, c0), (y,), at_once=self._is_planned(y)
        )
        return found

    def backward(
        self, saved: Saved, u: Tensor, own: Tensor | None, h0: Tensor, c0: Tensor | None, y: Tensor, dy: Tensor,
        dhn: Tensor | None, dcn: Tensor | None, /, *, reverse: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
        """As :meth:`Recurrence.backward`."""
        kept, structure = tree_flatten(saved)

        def run(*tensors: Any) -> Any:
            again = tree_unflatten(tensors[: len(kept)], structure)
            return self.recurrence.backward(again, *tensors[len(kept) :], reverse=reverse)

        given = (*kept, u, own, h0, c0, y, dy, dhn, dcn)
        name = "backward", reverse, self._rows
        found: tuple[Tensor, Tensor | None, Tensor, Tensor | None] = self.replays(
            name, run, given, at_once=self._is_planned(y)
        )
        return found

    def _is_planned(self, y: Tensor) -> bool:
        """Whether a call has the steps for which the layer is made."""
        return self.packing is None and len(y) == self.steps

    @property
    def _rows(self) -> bytes:
        """What tells the lengths of a packed batch from others."""
        return b"" if self.packing is None else self.packing.sizes.numpy().tobytes()


def bytes_of_graphs(p: RecurrentProblem, rows: int) -> int:
    """Bytes that the graphs of both directions hold: operands and results of ``rows`` rows, and temporary ones."""
    size, gates = p.torch_dtype("x").itemsize, p.gates * p.hidden
    weights = (gates * p.width + p.projection * p.hidden) * size
    states = 4 * p.batch * (p.width + p.hidden) * size + TEMPORARY * p.batch * gates * FP32
    kept = rows * (gates + p.hidden) * FP32 if p.task == "training" else 0
    forward = rows * (gates + p.width) * size + weights + states + kept + library_scratch(p)
    if p.task == "inference":
        return p.directions * forward
    of_gates = rows * (gates + (p.hidden if p.cell == "gru" else 0)) * size
    projected = (rows * (p.width + p.hidden) + p.projection * p.hidden) * FP32 if p.projection else 0
    backward = 2 * rows * p.width * size + of_gates + weights + states + kept + projected + library_scratch(p)
    return p.directions * (forward + backward)
