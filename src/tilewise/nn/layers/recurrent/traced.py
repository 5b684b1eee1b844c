"""How ``torch.compile`` sees a planned recurrent module: as one operator, with views around it.

Dynamo traces this in place of the module's own forward, with tensors that have no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import tilewise.nn.layers.recurrent.compiled_by_torch  # noqa: F401 - makes an operator
from tilewise.machine.device import recurrent_precision
from tilewise.nn.layers.recurrent.autocast import lower_type
from tilewise.nn.layers.recurrent.compiled import Known
from tilewise.problems.recurrent.tensors import GATES

__all__ = ["trace"]


def trace(layer: Any, module: nn.RNNBase, x: Any, hx: Any) -> Any:
    """What ``module(x, hx)`` is in a graph: the operator of a plan of ``layer`` that is there, or torch's as one.

    ``NotImplemented`` where torch must judge the call, and in exported programs, which run without tilewise.
    """
    if torch.compiler._is_exporting_flag or not isinstance(x, Tensor):
        return NotImplemented
    states = [] if hx is None else list(hx) if module.mode == "LSTM" else [hx]
    weights = [getattr(module, name) for name in module._flat_weights_names]
    dtype = _computed_in(module, [x, *states], weights)
    if dtype is None or not _fits(module, x, states):
        return NotImplemented
    batched = x.dim() == 3
    if not batched:
        x, states = x.unsqueeze(1), [state.unsqueeze(1) for state in states]
    elif module.batch_first:
        x = x.transpose(0, 1)
    if not states:
        rows = module.num_layers * (2 if module.bidirectional else 1)
        states = [
            torch.zeros((rows, x.shape[1], width), dtype=dtype, device=x.device) for width in _widths_of_states(module)
        ]
    results = _called(layer, module, [t.to(dtype).contiguous() for t in (x, *states, *weights)])
    y, *last = results[: 3 if module.mode == "LSTM" else 2]
    if not batched:
        y, last = y.squeeze(1), [state.squeeze(1) for state in last]
    elif module.batch_first:
        y = y.transpose(0, 1)
    return y, tuple(last) if module.mode == "LSTM" else last[0]


def _called(layer: Any, module: nn.RNNBase, tensors: list[Tensor]) -> list[Tensor]:
    """The results of the operator for x, first states and weights."""
    states = 2 if module.mode == "LSTM" else 1
    x, h0, c0 = tensors[0], tensors[1], tensors[2] if states == 2 else None
    weights = tensors[1 + states :]
    dropout = float(module.dropout) if module.training and module.num_layers > 1 else 0.0
    needs = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    directions = 2 if module.bidirectional else 1
    for known in layer.known:
        if _is_like(known, module, x, needs):
            return torch.ops.tilewise.rnn(x, h0, c0, weights, known.plans, dropout)  # type: ignore[no-any-return]
    return torch.ops.tilewise.rnn_by_torch(  # type: ignore[no-any-return]
        x, h0, c0, weights, module.mode.lower(), module.bias, module.num_layers, directions, dropout, needs
    )


def _is_like(known: Known, module: nn.RNNBase, x: Tensor, needs: bool) -> bool:
    """Whether a call of ``module`` with this input, time first, is the known one."""
    return (
        x.shape == known.shape
        and module.mode.lower() == known.cell
        and module.hidden_size == known.hidden
        and module.proj_size == known.projection
        and module.num_layers == known.layers
        and module.bidirectional is (known.directions == 2)
        and module.bias is known.biases
        and x.dtype == known.dtype
        and x.device == known.device
        and needs is known.needs
        and torch.are_deterministic_algorithms_enabled() is known.deterministic
        and (x.device.type != "cuda" or x.dtype != torch.float32 or known.precision == _precision())
    )


def _computed_in(module: nn.RNNBase, inputs: Sequence[Any], weights: Sequence[Any]) -> torch.dtype | None:
    """The type in which tensors are computed; ``None`` where torch must judge them, or computes in several types."""
    tensors = [*inputs, *weights]
    if not all(isinstance(t, Tensor) for t in tensors):
        return None
    x: Tensor = inputs[0]
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        lowered = all(t.dtype != torch.float32 for t in inputs)
        dtype = LOWER[_lower_name(module.mode.lower(), x.device.type, module.proj_size > 0, lowered)]
        if dtype is None or any(t.dtype not in (torch.float32, dtype) for t in tensors):
            return None
    elif any(t.dtype != dtype for t in tensors):
        return None
    return dtype if x.is_floating_point() and all(t.device == x.device for t in tensors) else None


LOWER: dict[str, Any] = {"fp16": torch.float16, "bf16": torch.bfloat16, "": None}


def _lower_name(cell: str, device_type: str, projected: bool, lowered: bool) -> str:
    """The name of :func:`lower_type`. Dynamo calls it while it traces, and keeps the answer."""
    found = lower_type(cell, torch.device(device_type), projected=projected, lowered=lowered)
    return next(name for name, dtype in LOWER.items() if dtype is found)


# What ``torch.compiler.assume_constant_result`` sets: calling that would import Dynamo here, which takes seconds.
_lower_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _precision() -> str:
    """torch's precision of recurrent layers, read while Dynamo traces: operators check that it has stayed."""
    return recurrent_precision()


_precision._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _fits(module: nn.RNNBase, x: Tensor, states: Sequence[Tensor]) -> bool:
    """Whether shapes are such as torch's forward takes, and nothing is empty."""
    if x.dim() not in (2, 3) or x.shape[-1] != module.input_size:
        return False
    if any(size == 0 for size in x.shape) or module.mode.lower() not in (*GATES, "rnn_tanh"):
        return False
    if states and len(states) != (2 if module.mode == "LSTM" else 1):
        return False
    batch = x.shape[:-2] if x.dim() == 2 else (x.shape[0 if module.batch_first else 1],)
    rows = module.num_layers * (2 if module.bidirectional else 1)
    shapes = [(rows, *batch, width) for width in _widths_of_states(module)]
    return not states or [tuple(state.shape) for state in states] == shapes


def _widths_of_states(module: nn.RNNBase) -> list[int]:
    """The numbers of each of the states that a module takes."""
    return [module.proj_size or module.hidden_size, *([module.hidden_size] if module.mode == "LSTM" else [])]
