"""``nn.Linear`` as a kind of modules: which can be planned, their products, and how they run by plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tilewise.nn.layers.kinds import Call, Layer, ModuleKind
from tilewise.nn.layers.linear.call import why_torchs
from tilewise.nn.layers.linear.layer import LinearLayer
from tilewise.nn.layers.linear.repeated import RepeatedLinear, is_usual
from tilewise.nn.layers.linear.run import BY_TORCH
from tilewise.nn.layers.linear.traced import trace
from tilewise.nn.layers.overrides import stand_ins
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.swaps import copies_itself, swapped
from tilewise.nn.layers.weights import Weights

__all__ = ["Linears"]

FORWARD = nn.Linear.forward
CODE = FORWARD.__code__
"""torch's own code, as it is when this file is imported."""
STAND_INS = stand_ins("linear")
"""What tilewise itself puts in the place of torch's function."""


class Linears(ModuleKind):
    """``nn.Linear`` itself. Classes derived from it may compute anything.

    ``nn.MultiheadAttention`` never calls its ``out_proj``, which is of such a class, but reads its weight.
    """

    classes = (nn.Linear,)
    named = True
    under_limits = False  # what cuBLAS keeps for itself is over most limits, and there whatever is planned
    problems = "gemm"

    def obstacle(self, module: nn.Module) -> str:
        """Why this module cannot be swapped: another class, or a forward or a function that is not torch's own."""
        kind = type(module)
        if kind is not nn.Linear:
            return f"is a {kind.__name__}, which may compute otherwise than the Linear it is derived from"
        if not _runs_torch():
            return "nn.Linear.forward or torch.nn.functional.linear is not torch's own"
        if "forward" in module.__dict__ and swapped(module) is None:
            return "has a forward set on the instance"
        return copies_itself(module)

    def layers(self, plan_table: PlanTable, weights: Weights) -> LinearLayer:
        """The layer of a module. Nothing is kept of its weight."""
        return LinearLayer(plan_table)

    def calls(
        self,
        module: Any,
        layers: LinearLayer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        gradients_later: bool,
    ) -> tuple[list[tuple[Layer, Call]], str]:
        """The one call of a linear layer, or why it is left to torch."""
        (x,) = args or kwargs.values()
        w, b = module.weight, module.bias
        reason = why_torchs(x, w, b)
        visited = None if reason else layers.visit(x, w, b)
        if visited is None:
            return [], reason
        layer, call = visited
        if gradients_later:
            call = replace(call, needs=(True, w.requires_grad, b is not None and b.requires_grad))
        return [(layer, call)], ""

    def forward(self, module: Any, layers: LinearLayer) -> Callable[..., torch.Tensor]:
        """The module's ``forward``, by plans where it still runs torch's own code."""
        repeated = RepeatedLinear(layers)

        def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_dynamo_compiling():
                runs_torch = type(self) is nn.Linear and _runs_torch()
                traced = trace(layers, input, self.weight, self.bias) if runs_torch else None
                return type(self).forward(self, input) if traced is None else traced
            if repeated.call is not None:
                found = repeated.call(self, input)
                if found is not None:
                    return found
            if type(self) is nn.Linear and _runs_torch():
                w, b = self.weight, self.bias
                y = layers(input, w, b)
                if layers.latest is not repeated.entry and is_usual(self):
                    repeated.learn(input, w, b)
                if y is not NotImplemented:
                    return y  # type: ignore[no-any-return]
            return type(self).forward(self, input)  # type: ignore[no-any-return]

        return forward


def _runs_torch() -> bool:
    """Whether ``nn.Linear`` runs torch's own code and function."""
    if nn.Linear.forward is not FORWARD or FORWARD.__code__ is not CODE:
        return False
    function = torch.nn.functional.linear
    return function is BY_TORCH or function in STAND_INS
