"""Recurrent layers: frozen, hashable problems with a canonical text key.

A :class:`RecurrentProblem` knows its tensors, floating-point operations and least memory traffic, and its value in
float64. It knows nothing of algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch

from tilewise.machine.torch_state import fp32_precision, framework_flags
from tilewise.problems.base import ALIGNMENT, DTYPES, PRECISIONS, Part, Problem, Tensors, read_back
from tilewise.problems.recurrent.key import fields_of, key_of
from tilewise.problems.recurrent.one_piece import in_one_piece
from tilewise.problems.recurrent.reference import reference
from tilewise.problems.recurrent.tensors import (
    CELLS,
    GATES,
    TASKS,
    operands_of,
    results_of,
    shapes_of,
    weights_of,
    width_of,
)

__all__ = ["RecurrentProblem"]


@dataclass(frozen=True, slots=True)
class RecurrentProblem(Problem):
    """A whole call of ``nn.RNN``, ``nn.GRU`` or ``nn.LSTM``: all steps, layers and directions.

    ``cell`` is ``rnn_tanh``, ``rnn_relu``, ``gru`` or ``lstm``. The input has ``time`` steps of ``batch`` sequences
    with ``inputs`` numbers each, the state ``hidden`` numbers. ``layers`` lie on one another, each reading the output
    of the one below. With 2 ``directions`` each layer also runs backwards in time, and its output has both states side
    by side. Without ``biases`` there are only the matrices. ``packed`` is 0 where every sequence has all steps. Else it
    is the sum of all lengths, ``time`` is the longest one, and only steps that exist are computed. With a
    ``projection`` an LSTM's state h is a product of ``w_hr`` (projection, hidden) with what a plain LSTM has as h, and
    has fewer numbers (Sak et al. 2014, "Long short-term memory recurrent neural network architectures for large scale
    acoustic modeling"); 0 is for none. c has ``hidden`` numbers still. The ``task`` ``inference`` is the
    forward; ``training`` is forward and backward together, with the gradient of every operand.

    Tensors are dense with the time first: ``x`` (time, batch, inputs), ``y`` (time, batch, directions * width), states
    (layers * directions, batch, width), then the weights as torch orders and shapes them. ``width`` is ``hidden``, or
    but for c the projection. Of a packed batch ``x`` is (packed, inputs) and ``y`` (packed, directions * width), with
    rows as :class:`~.packing.Packing` says: a plan is made for typical lengths and runs with any. There is no dropout.
    ``dtype`` is that of all tensors.
    ``precision`` is torch's for fp32 operands of recurrent layers, ``ieee`` or ``tf32``. ``device`` is ``"cpu"`` or
    ``"cuda:<name>"``.

    Raises ``ValueError`` naming the field for values that make no layer. For example
    ``RecurrentProblem("lstm", 512, 16, 768, 768, task="training")`` is a training step of ``nn.LSTM(768, 768)``.

    >>> problem = tilewise.RecurrentProblem("gru", time=4, batch=2, inputs=8, hidden=16)
    >>> problem.shape("y"), problem.gates
    ((4, 2, 16), 3)
    """

    kind: ClassVar[str] = "rnn"
    accumulate: ClassVar[bool] = False
    cut_axes: ClassVar[tuple[str, ...]] = ()

    cell: str
    time: int
    batch: int
    inputs: int
    hidden: int
    layers: int = 1
    directions: int = 1
    biases: bool = True
    packed: int = 0
    projection: int = 0
    task: str = "inference"
    dtype: str = "fp32"
    precision: str = "ieee"
    device: str = "cpu"

    def __post_init__(self) -> None:
        known = {"cell": CELLS, "task": TASKS, "dtype": tuple(DTYPES), "precision": PRECISIONS}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r}: one of {', '.join(values)} would do")
        for name in ("time", "batch", "inputs", "hidden", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.directions not in (1, 2):
            raise ValueError(f"directions={self.directions}: 1, or 2 for both, would do")
        least, most = self.time + self.batch - 1, self.time * self.batch
        if self.packed and not least <= self.packed <= most:
            raise ValueError(f"packed={self.packed}: {least} to {most} rows would do, or 0 for no packed batch")
        if self.projection and self.cell != "lstm":
            raise ValueError(f"projection={self.projection}: of an LSTM alone; 0 would do for cell={self.cell!r}")
        if not 0 <= self.projection < self.hidden:
            raise ValueError(f"projection={self.projection}: 0, or 1 to {self.hidden - 1} of {self.hidden} would do")
        if self.dtype != "fp32" and self.precision != "ieee":
            # Only fp32 operands can be rounded to TF32, so both names would be one problem.
            object.__setattr__(self, "precision", "ieee")

    @property
    def gates(self) -> int:
        """Gates of the cell: 1, 3 of a GRU, 4 of an LSTM."""
        return GATES[self.cell]

    @property
    def width(self) -> int:
        """Numbers of the state h of one direction: ``projection``, or ``hidden`` where there is none."""
        return width_of(self)

    @property
    def rows(self) -> int:
        """Rows of all steps: one for each sequence at each of its steps."""
        return self.packed or self.time * self.batch

    @property
    def out_dtype(self) -> str:
        """That of the operands."""
        return self.dtype

    @property
    def operands(self) -> tuple[str, ...]:
        """Roles of the operands: ``x``, first states, weights, and for training the gradients of the results."""
        return operands_of(self)

    @property
    def results(self) -> tuple[str, ...]:
        """Roles of the results: ``y``, last states, and for training the gradient of each operand."""
        return results_of(self)

    @property
    def weights(self) -> tuple[str, ...]:
        """Roles of the weights in torch's flat order."""
        return weights_of(self)

    def shape(self, role: str) -> tuple[int, ...]:
        """Shape of the tensor of ``role``."""
        shapes = shapes_of(self)
        if role not in shapes:
            raise ValueError(f"role={role!r}: one of {', '.join(self.roles)} would do")
        return shapes[role]

    def alignment_of(self, role: str) -> int:
        """Bytes by which addresses are aligned; weights may lie behind one another in one piece of memory."""
        packed = role in self.weights
        numbers = math.gcd(self.hidden, self.width * self.hidden) if self.projection else self.hidden
        return math.gcd(ALIGNMENT, numbers * self.torch_dtype(role).itemsize) if packed else ALIGNMENT

    def arranged(self, operands: Tensors) -> Tensors:
        """Operands with the weights in one piece, as torch's modules keep them on a GPU."""
        first = self.operands.index(self.weights[0])
        last = first + len(self.weights)
        return (*operands[:first], *in_one_piece(self, operands[first:last]), *operands[last:])

    def flags(self, *, deterministic: bool) -> AbstractContextManager[None]:
        """A context with the problem's precision of recurrent layers and of matrix products on a GPU."""
        return _flags(self.precision, deterministic) if self.device_type == "cuda" else nullcontext()

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products, two for a multiply-add. Training has three for each."""
        both = self.directions * self.width
        columns = self.inputs + (self.layers - 1) * both + self.layers * self.width
        forward = 2 * self.rows * self.directions * self.gates * self.hidden * columns
        forward += 2 * self.rows * self.directions * self.layers * self.projection * self.hidden
        return forward if self.task == "inference" else 3 * forward

    @property
    def bytes(self) -> int:
        """Least memory traffic: operands read once, results written once."""
        shapes, size = shapes_of(self), self.torch_dtype("x").itemsize
        return size * sum(math.prod(shapes[role]) for role in self.roles)

    @property
    def key(self) -> str:
        """Canonical text: equal for equal problems, different for different ones."""
        return key_of(self)

    @classmethod
    def from_key(cls, text: str) -> RecurrentProblem:
        """Read :attr:`key` back, whoever wrote it. Raises ``ValueError`` for what is no recurrent layer's key."""
        return read_back(cls(**fields_of(text)), text)

    def split(self, axis: str, sizes: Sequence[int]) -> tuple[Part[RecurrentProblem], ...]:
        """Raises ``ValueError``: a recurrent layer is not cut, since parts of dense tensors are not dense."""
        raise ValueError(f"axis={axis!r}: a recurrent layer is not cut along any axis")

    def extent(self, axis: str) -> int:
        """Raises ``ValueError``, as :meth:`split`."""
        raise ValueError(f"axis={axis!r}: a recurrent layer is not cut along any axis")

    def reference(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All results in float64, from all operands."""
        return reference(self, operands)


@contextmanager
def _flags(precision: str, deterministic: bool) -> Iterator[None]:
    """torch's flags on a GPU: its recurrent layers may run by cuDNN or by matrix products."""
    with (
        framework_flags("cuda", precision, deterministic=deterministic, operation="rnn"),
        fp32_precision("cuda", "matmul", precision),
    ):
        yield
