"""Calls of a planned recurrent layer in native code: see ``recurrent_call.h`` in ``kernels/native/``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tilewise.kernels.native.autograd import native_calls, why_never
from tilewise.kernels.native.building import native
from tilewise.kernels.native.sequence import SCALAR_TYPES
from tilewise.machine.torch_state import BACKENDS, FITTING, read_precision
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.problems.recurrent.tensors import GATES
from tilewise.solvers.recurrent._layers import StackedLayers

__all__ = ["NEVER", "recurrent_native"]

NEVER = object()
"""In place of a call in native code: there will be none."""
FORWARD, BACKWARD = 10, 14
"""Tensors of which the kernels of all steps take the addresses."""


def recurrent_native(p: RecurrentProblem, layer: Any, device: torch.device, by_torch: Callable[..., Any]) -> Any:
    """``call(x, h0, c0, weights)`` of a layer of ``p`` in native code: y, hn and cn of an LSTM, with autograd.

    First states may be ``None``. The call gives ``None`` for operands that lie otherwise than the kernels take them.
    ``by_torch(operands, gradients, needs)`` computes gradients that have gradients. Returns ``None`` while the module
    is not there, and :data:`NEVER` for a layer whose steps are not one launch on addresses each.
    """
    by_address = getattr(layer.recurrence, "by_address", None) if type(layer) is StackedLayers else None
    if by_address is None or p.packed or layer.block or layer.linear is not torch._C._nn.linear or why_never():
        return NEVER
    module = native_calls(device.type)
    if module is None:
        return None
    row, trains = p.directions * p.hidden, p.task == "training"
    directions = range(p.directions)
    forward = [by_address(False, p.time, p.batch, row, reverse, trains) for reverse in directions]
    back = [by_address(True, p.time, p.batch, row, row, reverse) for reverse in directions] if trains else []
    if None in forward or None in back:
        return NEVER
    steps = [tuple(_told(one, count) for one in each) for each, count in ((forward, FORWARD), (back, BACKWARD))]
    return module.RecurrentCall(
        cell=p.cell,
        sizes=(p.time, p.batch, p.inputs, p.hidden, p.layers, p.directions, GATES[p.cell]),
        biases=p.biases,
        trains=trains,
        copies=device.type == "cpu",
        dtype=SCALAR_TYPES[p.torch_dtype("x")],
        forward=steps[0],
        grads=steps[1],
        backward=by_torch,
        precision=_precision_of(p),
    )


def _told(launch: Any, count: int) -> tuple[Any, ...]:
    """A kernel as native code takes it: as a list that it queues, or as a function of Python on addresses."""
    found, listed = native(), getattr(launch, "listed", None)
    launches = None if listed is None else listed(count)
    if launches is None or found is None:
        return launch, None, None, -1
    return launches, found.module.api, torch._C._cuda_getCurrentRawStream, launch.device


def _precision_of(p: RecurrentProblem) -> Callable[[], bool] | None:
    """What tells whether torch's products of fp32 numbers are now as exact as the problem's; ``None`` for others."""
    if p.dtype != "fp32":
        return None
    wanted = FITTING[p.precision if p.device_type == "cuda" else "ieee"]
    read = functools.partial(read_precision, BACKENDS[p.device_type], "matmul")
    return lambda: read() in wanted
