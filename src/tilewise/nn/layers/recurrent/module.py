"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` as a kind of modules: which can be planned, and how they run by plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tilewise.nn.layers.kinds import Call, Layer, ModuleKind
from tilewise.nn.layers.overrides import stand_ins
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.recurrent.autocast import OPERATORS
from tilewise.nn.layers.recurrent.call import describe, given_of
from tilewise.nn.layers.recurrent.dynamo import let_dynamo_trace_planned
from tilewise.nn.layers.recurrent.layer import RecurrentLayer
from tilewise.nn.layers.recurrent.repeated import update_weights
from tilewise.nn.layers.recurrent.traced import trace
from tilewise.nn.layers.swaps import copies_itself, swapped
from tilewise.nn.layers.weights import Weights

__all__ = ["RecurrentLayers"]

CLASSES: tuple[type[nn.RNNBase], ...] = (nn.LSTM, nn.GRU, nn.RNN)
OWN: dict[Any, Any] = {kind: (kind.forward, kind.forward.__code__) for kind in CLASSES}
"""torch's own functions and code, as they are when this file is imported."""


class RecurrentLayers(ModuleKind):
    """``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` themselves. Classes derived from them may compute anything."""

    classes = CLASSES
    named = True
    under_limits = False  # torch's own choice keeps more for its backward than most limits allow
    whole_graphs = True
    problems = "rnn"

    def obstacle(self, module: nn.Module) -> str:
        """Why this module cannot be swapped: another class, or a forward that is not torch's own."""
        kind = type(module)
        if kind not in OWN:
            return f"is a {kind.__name__}, which may compute otherwise than the class it is derived from"
        if not _runs_torch(kind):
            return f"nn.{kind.__name__}.forward or a function of torch that it calls is not torch's own"
        if "forward" in module.__dict__ and swapped(module) is None:
            return "has a forward set on the instance"
        return copies_itself(module)

    def layers(self, plan_table: PlanTable, weights: Weights) -> RecurrentLayer:
        """The layer of a module. Nothing is kept of its weights."""
        let_dynamo_trace_planned()
        return RecurrentLayer(plan_table)

    def calls(
        self,
        module: Any,
        layers: RecurrentLayer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        gradients_later: bool,
    ) -> tuple[list[tuple[Layer, Call]], str]:
        """The one call of a recurrent layer, or why it is left to torch."""
        given = given_of(module, *_arguments(*args, **kwargs))
        if isinstance(given, str):
            return [], given
        call = describe(given)
        return [(layers, replace(call, needs=(True,)) if gradients_later else call)], ""

    def forward(self, module: Any, layers: RecurrentLayer) -> Callable[..., Any]:
        """The module's ``forward``, by plans where it still runs torch's own code."""
        let_dynamo_trace_planned()

        def forward(self: Any, input: Any, hx: Any = None) -> Any:
            kind = type(self)
            if torch.compiler.is_dynamo_compiling():
                traced = trace(layers, self, input, hx) if _runs_torch_in_trace(self) else NotImplemented
                return kind.forward(self, input, hx) if traced is NotImplemented else traced
            if not torch.compiler.is_compiling() and kind in OWN and _runs_torch(kind, (self.mode.lower(),)):
                update_weights(self)
                result = layers(self, input, hx)
                if result is not NotImplemented:
                    return result
            return kind.forward(self, input, hx)

        return forward


def _arguments(input: Any, hx: Any = None) -> tuple[Any, Any]:
    """The arguments of a forward by their places."""
    return input, hx


def _runs_torch(kind: Any, cells: Iterable[str] = tuple(OPERATORS)) -> bool:
    """Whether modules of this class run torch's own code, and its functions for these cells."""
    forward, code = OWN[kind]
    same = kind.forward is forward and forward.__code__ is code
    return same and all(_is_torchs(cell) for cell in cells)


def _is_torchs(cell: str) -> bool:
    """Whether torch's function for ``cell`` is there, or what stands in for it and computes the same."""
    found = getattr(torch._VF, cell)
    return found is OPERATORS[cell] or any(found is function for function in stand_ins(cell))


def _runs_torch_in_trace(module: Any) -> bool:
    """As :func:`_runs_torch`, of what Dynamo can follow, for a module that may be of another class by now."""
    kind = type(module)
    return kind in CLASSES and kind.forward is OWN[kind][0]
