"""What distinguishes one call of a recurrent layer from another, the tensors of a call, and the problem that it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from tilewise.machine.device import device_name, recurrent_precision
from tilewise.nn.layers.call import is_plain, why_not_described
from tilewise.nn.layers.recurrent.autocast import is_on, lower_type
from tilewise.problems.base import DTYPE_NAMES
from tilewise.problems.recurrent.packing import Packing
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.problems.recurrent.tensors import GATES

__all__ = ["Arguments", "Given", "RecurrentCall", "describe", "given_of", "problem_of"]


@dataclass(frozen=True, slots=True)
class RecurrentCall:
    """One call of a recurrent layer, as far as plans depend on it.

    ``shape`` is the input's with the time first: (time, batch, inputs). ``needs`` says whether any tensor needs a
    gradient: forward and backward are one problem then. ``packed`` is the sum of all lengths of a packed batch, else 0.
    """

    cell: str
    shape: tuple[int, ...]
    hidden: int
    layers: int
    directions: int
    biases: bool
    dtype: torch.dtype
    device: torch.device
    needs: tuple[bool, ...]
    deterministic: bool
    precision: str
    packed: int = 0
    projection: int = 0


@dataclass(frozen=True, slots=True)
class Arguments:
    """What torch's function of a ``mode`` (``LSTM``, ``RNN_TANH``) was called with, as attributes of a module."""

    mode: str
    input_size: int
    hidden_size: int
    proj_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    training: bool
    _flat_weights: list[Tensor]

    @classmethod
    def of(
        cls,
        cell: str,
        weights: Sequence[Tensor],
        biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        both: bool,
        batch_first: bool,
    ) -> Arguments | str:
        """Those of a call of torch's function for ``cell``, or why it is left to torch."""
        each, more = divmod(len(weights), layers * (2 if both else 1))
        plain = 4 if biases else 2
        if more or not plain <= each <= plain + (cell == "lstm") or any(w.dim() != 2 for w in weights[:2]):
            return "called with sizes that do not fit"
        inputs, width, hidden = weights[0].shape[1], weights[1].shape[1], weights[0].shape[0] // GATES[cell]
        own = inputs, hidden, width if each > plain else 0, layers
        return cls(cell.upper(), *own, biases, batch_first, dropout, both, train, list(weights))


@dataclass(frozen=True, slots=True)
class Given:
    """The tensors of one call of ``module``, as views of what it was called with.

    ``x`` is (time, batch, inputs). ``h0`` and ``c0`` (layers * directions, batch, hidden) are ``None`` for zeros, and
    ``c0`` for cells without one. ``weights`` are in torch's flat order. ``batched`` says that the input had an axis for
    the batch. ``dtype`` is the type in which it is computed: that of the tensors, or the one that autocast casts to.

    Of a packed ``source`` ``x`` are the data (rows, inputs), with this ``packing``, and states are in its order.
    """

    module: nn.RNNBase | Arguments
    x: Tensor
    h0: Tensor | None
    c0: Tensor | None
    weights: tuple[Tensor, ...]
    batched: bool
    dtype: torch.dtype
    packing: Packing | None = None
    source: PackedSequence | None = None

    @property
    def cell(self) -> str:
        """The name of the cell, as a problem has it."""
        return self.module.mode.lower()

    @property
    def tensors(self) -> list[Tensor]:
        """All that was given."""
        return [t for t in (self.x, self.h0, self.c0, *self.weights) if t is not None]

    @property
    def dropout(self) -> float:
        """The share of a layer's output that the next one does not see in this call."""
        return self.module.dropout if self.module.training and self.module.num_layers > 1 else 0.0

    def cast(self) -> Given:
        """The call in the type in which it is computed. Gradients go back to the tensors that were cast.

        Weights are cast at every call, as torch casts those of cuDNN's layers.
        """
        if all(t.dtype is self.dtype for t in self.tensors):
            return self
        x, *weights = (t.to(self.dtype) for t in (self.x, *self.weights))
        h0, c0 = (None if t is None else t.to(self.dtype) for t in (self.h0, self.c0))
        return replace(self, x=x, h0=h0, c0=c0, weights=tuple(weights))


def given_of(module: nn.RNNBase | Arguments, x: object, hx: object) -> Given | str:
    """The tensors of the call ``module(x, hx)``, or why it is left to torch."""
    if isinstance(x, PackedSequence):
        return _given_packed(module, x, hx)
    weights: tuple[Any, ...] = tuple(module._flat_weights)
    given: list[Any] = [x, *_states(module, hx), *weights]
    if not all(is_plain(t) for t in given):
        return "called with a tensor of a class of its own, or with something else in a tensor's place"
    reason = _why_torchs(module, given)
    if reason:
        return reason
    first, *states = given[: len(given) - len(weights)]
    batched = first.dim() == 3
    if not batched:
        first, states = first.unsqueeze(1), [state.unsqueeze(1) for state in states]
    elif module.batch_first:
        first = first.transpose(0, 1)
    h0, c0 = (*states, None, None)[:2]
    lower = _lower(module, given) if is_on(first.device.type) else None
    return Given(module, first, h0, c0, weights, batched, lower or first.dtype)


def _given_packed(module: nn.RNNBase | Arguments, x: PackedSequence, hx: object) -> Given | str:
    """As :func:`given_of`, for sequences that end at different steps."""
    weights: tuple[Any, ...] = tuple(module._flat_weights)
    given: list[Any] = [x.data, *_states(module, hx), *weights]
    if not all(is_plain(t) for t in (*given, x.batch_sizes)):
        return "called with a tensor of a class of its own, or with something else in a tensor's place"
    reason = _why_devices_are_torchs(given) or _why_types_are_torchs(module, given)
    if reason:
        return reason
    try:
        packing = Packing.of(x.batch_sizes, len(x.data))
    except ValueError as error:
        return f"called with a packed sequence that is none: {error}"
    shapes = _weights_and_states(module, (packing.batch,), len(given))
    if x.data.dim() != 2 or [tuple(t.shape) for t in given] != [(packing.rows, module.input_size), *shapes]:
        return "called with sizes that do not fit"
    if any(t.numel() == 0 for t in given):
        return "called with an empty tensor"
    states = given[1 : len(given) - len(weights)]
    if x.sorted_indices is not None:
        states = [state.index_select(1, x.sorted_indices) for state in states]
    h0, c0 = (*states, None, None)[:2]
    lower = _lower(module, given) if is_on(x.data.device.type) else None
    return Given(module, x.data, h0, c0, weights, True, lower or x.data.dtype, packing, x)


def _states(module: nn.RNNBase | Arguments, hx: Any) -> Sequence[Any]:
    """The first states that were given."""
    if hx is None:
        return ()
    return hx if module.mode == "LSTM" and isinstance(hx, tuple | list) else (hx,)


def _why_torchs(module: nn.RNNBase | Arguments, given: list[Tensor]) -> str:
    """Why the call with these plain tensors is left to torch; empty where it may be planned."""
    x = given[0]
    reason = _why_devices_are_torchs(given) or _why_types_are_torchs(module, given)
    if reason:
        return reason
    if x.dim() not in (2, 3) or [tuple(t.shape) for t in given] != _shapes(module, x, len(given)):
        return "called with sizes that do not fit"
    if any(t.numel() == 0 for t in given):
        return "called with an empty tensor"
    return ""


def _why_devices_are_torchs(given: list[Tensor]) -> str:
    """Why the call is left to torch for the devices of its tensors; empty where it may be planned."""
    device = given[0].device
    if device.type not in ("cpu", "cuda") or any(t.device != device for t in given):
        return why_not_described(*given)
    return ""


def _why_types_are_torchs(module: nn.RNNBase | Arguments, given: list[Tensor]) -> str:
    """Why the call is left to torch for the types of its tensors; empty where it may be planned."""
    x = given[0]
    if is_on(x.device.type):
        lower = _lower(module, given)
        if lower is None:
            return "called under autocast, where torch computes such a layer in several types, or not on this device"
        if any(t.dtype not in (torch.float32, lower) for t in given):
            return f"called under autocast with other types than {torch.float32} and {lower}"
    elif x.dtype not in DTYPE_NAMES or any(t.dtype is not x.dtype for t in given):
        return why_not_described(*given)
    return ""


def _lower(module: nn.RNNBase | Arguments, given: list[Tensor]) -> torch.dtype | None:
    """The 16-bit type in which torch computes the module under autocast; ``None`` where there is no one type."""
    inputs = given[: len(given) - len(module._flat_weights)]
    lowered = all(t.dtype is not torch.float32 for t in inputs)
    return lower_type(module.mode.lower(), given[0].device, projected=module.proj_size > 0, lowered=lowered)


def _shapes(module: nn.RNNBase | Arguments, x: Tensor, count: int) -> list[tuple[int, ...]]:
    """The shapes that torch's forward takes with ``x`` where ``count`` tensors are given."""
    batch = x.shape[:-2] if x.dim() == 2 else (x.shape[0 if module.batch_first else 1],)
    return [(*x.shape[:-1], module.input_size), *_weights_and_states(module, batch, count)]


def _weights_and_states(module: nn.RNNBase | Arguments, batch: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """The shapes of first states, where they are among ``count`` tensors beside the input, and of the weights."""
    directions = 2 if module.bidirectional else 1
    width, rows = module.proj_size or module.hidden_size, GATES[module.mode.lower()] * module.hidden_size
    state = (module.num_layers * directions, *batch)
    weights: list[tuple[int, ...]] = []
    for layer in range(module.num_layers):
        columns = width * directions if layer else module.input_size
        own = [(rows, columns), (rows, width), *([(rows,)] * 2 if module.bias else [])]
        weights += [*own, *([(width, module.hidden_size)] if module.proj_size else [])] * directions
    states = [(*state, width), *([(*state, module.hidden_size)] if module.mode == "LSTM" else [])]
    return [*(states if count > 1 + len(weights) else []), *weights]


def describe(given: Given) -> RecurrentCall:
    """The call of these tensors."""
    module, x, packing = given.module, given.x, given.packing
    return RecurrentCall(
        cell=given.cell,
        shape=tuple(x.shape) if packing is None else (packing.time, packing.batch, x.shape[1]),
        packed=0 if packing is None else packing.rows,
        hidden=module.hidden_size,
        projection=module.proj_size,
        layers=module.num_layers,
        directions=2 if module.bidirectional else 1,
        biases=module.bias,
        dtype=given.dtype,
        device=x.device,
        needs=(torch.is_grad_enabled() and any(t.requires_grad for t in given.tensors),),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        precision=recurrent_precision() if x.device.type == "cuda" and given.dtype is torch.float32 else "ieee",
    )


def problem_of(call: RecurrentCall) -> RecurrentProblem:
    """The problem of a call: forward and backward together where a gradient is needed, else the forward."""
    time, batch, inputs = call.shape
    return RecurrentProblem(
        call.cell,
        time,
        batch,
        inputs,
        call.hidden,
        call.layers,
        call.directions,
        call.biases,
        call.packed,
        call.projection,
        task="training" if any(call.needs) else "inference",
        dtype=DTYPE_NAMES[call.dtype],
        precision=call.precision,
        device=device_name(call.device),
    )
