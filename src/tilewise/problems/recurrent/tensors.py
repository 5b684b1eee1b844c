"""The tensors of a recurrent layer: their roles in order, and their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

__all__ = ["CELLS", "GATES", "TASKS", "Recurrent", "operands_of", "results_of", "shapes_of", "weights_of", "width_of"]

GATES = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 3, "lstm": 4}
"""Gates of each cell, as torch orders them: r, z, n of a GRU, and i, f, g, o of an LSTM."""
CELLS = tuple(GATES)
TASKS = ("inference", "training")
"""What is computed: the forward alone, or forward and backward."""


class Recurrent(Protocol):
    """What functions in this folder read of a :class:`~tilewise.problems.recurrent.problem.RecurrentProblem`.

    What each field means is said there.
    """

    @property
    def cell(self) -> str: ...
    @property
    def time(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def directions(self) -> int: ...
    @property
    def biases(self) -> bool: ...
    @property
    def packed(self) -> int: ...
    @property
    def projection(self) -> int: ...
    @property
    def task(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def device(self) -> str: ...


def weights_of(p: Recurrent) -> tuple[str, ...]:
    """Roles of the weights in torch's flat order: ``w_ih_l0``, ``w_hh_l0``, ``b_ih_l0``, ``b_hh_l0`` and so on.

    With a projection ``w_hr_l0`` follows the biases of its layer and direction.
    """
    kinds = ("w_ih", "w_hh", *(("b_ih", "b_hh") if p.biases else ()), *(("w_hr",) if p.projection else ()))
    ends = ("", "_reverse")[: p.directions]
    return tuple(f"{kind}_l{layer}{end}" for layer in range(p.layers) for end in ends for kind in kinds)


def operands_of(p: Recurrent) -> tuple[str, ...]:
    """Roles of what is given: input, first states, weights, and for training the gradients of the results."""
    cell = p.cell == "lstm"
    gradients = (("dy", "dhn", "dcn") if cell else ("dy", "dhn")) if p.task == "training" else ()
    return ("x", "h0", *(["c0"] if cell else []), *weights_of(p), *gradients)


def results_of(p: Recurrent) -> tuple[str, ...]:
    """Roles of what is computed: output, last states, and for training the gradient of each operand."""
    cell = p.cell == "lstm"
    results = ("y", "hn", "cn") if cell else ("y", "hn")
    if p.task == "inference":
        return results
    return (*results, "dx", "dh0", *(["dc0"] if cell else []), *(f"d{role}" for role in weights_of(p)))


def shapes_of(p: Recurrent) -> Mapping[str, tuple[int, ...]]:
    """The shape of every tensor by role."""
    width = width_of(p)
    rows, both = GATES[p.cell] * p.hidden, p.directions * width
    steps = (p.packed,) if p.packed else (p.time, p.batch)
    x, y = (*steps, p.inputs), (*steps, both)
    state = (p.layers * p.directions, p.batch, width)
    shapes: dict[str, tuple[int, ...]] = {"x": x, "dx": x, "y": y, "dy": y}
    shapes |= dict.fromkeys(("h0", "hn", "dh0", "dhn"), state)
    if p.cell == "lstm":
        shapes |= dict.fromkeys(("c0", "cn", "dc0", "dcn"), (*state[:2], p.hidden))
    for role in weights_of(p):
        matrices = {
            "w_ih": (rows, both if _layer(role) else p.inputs),
            "w_hh": (rows, width),
            "w_hr": (width, p.hidden),
        }
        shape = matrices.get(role[:4], (rows,))
        shapes |= {role: shape, f"d{role}": shape}
    roles = {*operands_of(p), *results_of(p)}
    return {role: shape for role, shape in shapes.items() if role in roles}


def width_of(p: Recurrent) -> int:
    """Numbers of the state h of one direction: those of the projection where there is one."""
    return p.projection or p.hidden


def _layer(role: str) -> int:
    """The number of the layer that a weight is of."""
    return int(role.split("_")[2][1:])
