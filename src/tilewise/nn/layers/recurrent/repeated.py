"""Calls of a recurrent module that are like the one before, told without asking all that was asked of that one."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from tilewise.kernels.native.autograd import native_calls
from tilewise.machine.device import recurrent_precision
from tilewise.nn.layers.recurrent.call import Given, RecurrentCall
from tilewise.nn.layers.recurrent.run import RecurrentRun

__all__ = ["RepeatedCall", "update_weights"]

_attributes = operator.attrgetter(
    "mode",
    "input_size",
    "hidden_size",
    "num_layers",
    "bias",
    "batch_first",
    "dropout",
    "bidirectional",
    "proj_size",
    "training",
)
"""All attributes of a module on which its results depend, beside its weights."""


class RepeatedCall:
    """A call that :meth:`RecurrentLayer.resolve` answered with ``run``, and what was found of it.

    :meth:`given` is what a call like it was given: tensors that look the same, of a module with the same attributes,
    with torch set as it was. Any other is ``None``, and is asked everything anew. Nothing of the tensors is kept.
    """

    __slots__ = ("_alike", "_attributes", "_batched", "_deterministic", "_grad", "_precision", "run")

    def __init__(self, alike: Any, given: Given, call: RecurrentCall, run: RecurrentRun | None) -> None:
        self._alike, self._attributes, self._batched = alike, _attributes(given.module), given.batched
        self._grad, self._deterministic = torch.is_grad_enabled(), call.deterministic
        asks = call.device.type == "cuda" and call.dtype is torch.float32
        self._precision = call.precision if asks else None
        self.run = run

    @classmethod
    def of(cls, x: object, hx: Any, given: Given, call: RecurrentCall, run: RecurrentRun | None) -> RepeatedCall | None:
        """That of a call; ``None`` where calls cannot be compared so, or there is no native code to do it."""
        module = native_calls(call.device.type)
        if module is None or run is None or given.packing is not None or torch._C._is_any_autocast_enabled():
            return None
        return cls(module.AlikeTensors(x, *_states(given.module, hx), *given.weights), given, call, run)

    def given(self, module: nn.RNNBase, x: Any, hx: Any) -> Given | None:
        """What the call ``module(x, hx)`` is given, where it is like this one."""
        if type(x) is PackedSequence:
            return None
        states = _states(module, hx)
        weights: tuple[Any, ...] = tuple(module._flat_weights)
        if not (
            self._alike(x, *states, *weights)
            and _attributes(module) == self._attributes
            and torch.is_grad_enabled() is self._grad
            and torch.are_deterministic_algorithms_enabled() is self._deterministic
            and not torch._C._is_any_autocast_enabled()
            and (self._precision is None or recurrent_precision() == self._precision)
        ):
            return None
        if not self._batched:
            x, states = x.unsqueeze(1), tuple(state.unsqueeze(1) for state in states)
        elif module.batch_first:
            x = x.transpose(0, 1)
        h0, c0 = (*states, None, None)[:2]
        return Given(module, x, h0, c0, weights, self._batched, x.dtype)


def _states(module: Any, hx: Any) -> tuple[Any, ...]:
    """The first states that were given."""
    if hx is None:
        return ()
    return tuple(hx) if module.mode == "LSTM" and isinstance(hx, tuple | list) else (hx,)


def update_weights(module: nn.RNNBase) -> None:
    """As ``module._update_flat_weights()``, which asks for each weight by the module's slow ``__getattr__``."""
    attributes = module.__dict__
    parameters = attributes["_parameters"]
    for name, weight in zip(module._flat_weights_names, module._flat_weights, strict=True):
        if parameters.get(name) is not weight or weight is None or name in attributes:
            module._update_flat_weights()
            return
