"""Convolutions with residual and activation in one plan, for calls of which no gradient is asked."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.machine.recent import Recent
from tilewise.nn.layers.bound_pass import BoundPass
from tilewise.nn.layers.call import Call, describe, disturbed
from tilewise.nn.layers.geometry import Geometry, Role
from tilewise.nn.layers.layer import MOST_CALLS, Layer
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.problems.base import dense_strides

__all__ = ["FinishedConvolutions"]

Kind = tuple[Geometry, Call, bool, str]


class FinishedConvolutions:
    """Calls of convolutions with what follows them, by plans of ``plan_table``. It holds no tensor of a call."""

    def __init__(self, plan_table: PlanTable) -> None:
        self._plan_table = plan_table
        self._known: Recent[Kind, BoundPass | None] = Recent(MOST_CALLS)

    def __call__(
        self,
        layer: Layer,
        x: torch.Tensor,
        w: torch.Tensor,
        b: torch.Tensor | None,
        residual: torch.Tensor | None,
        activation: str,
    ) -> Any:
        """activation(convolution of ``layer`` + residual); ``NotImplemented`` where no plan does all of it.

        That is so for calls that are cast or padded first, for tensors that are not plain, and where torch is faster.
        """
        call = None if disturbed() else describe(x, w, b, layer.geometry.dims)
        if call is None or any(call.needs) or layer.adapted(call) is not None:
            return NotImplemented
        kind = (layer.geometry, call, residual is not None, activation)
        if kind not in self._known:
            is_known, made = self._made(layer, call, kind)
            if not is_known:
                return NotImplemented
            self._known[kind] = made
        bound_pass = self._known.get(kind)
        if bound_pass is None or (residual is not None and not _suits(residual, bound_pass, x.device)):
            return NotImplemented
        first, second = (slot.take(t) for slot, t in zip(bound_pass.slots, (x, w), strict=True))
        return bound_pass.bound(first, second, b, residual=residual)

    def _made(self, layer: Layer, call: Call, kind: Kind) -> tuple[bool, BoundPass | None]:
        """Whether a new kind of call could be planned at this moment, and its plan, ``None`` where it has none."""
        try:
            problem, strides = layer.problems(call)[Role.FORWARD], layer.strides(call)
        except ValueError:  # torch says what is wrong with these sizes
            return True, None
        lies = dense_strides(problem.shape(problem.result), problem.layout(problem.result)) == strides.result
        if layer.geometry.transposed or not lies:
            return True, None
        problem = problem.changed(residual=kind[2], activation=kind[3])
        if not self._plan_table.ready([problem], call.deterministic, call.device):
            return False, None
        return True, self._plan_table.bound(problem, call.deterministic, call.device)

    def forget(self) -> None:
        """Look every plan up anew."""
        self._known.clear()


def _suits(residual: torch.Tensor, bound_pass: BoundPass, device: torch.device) -> bool:
    """Whether ``residual`` has the result's shape and type: others are left to torch, which broadcasts and casts."""
    p = bound_pass.problem
    return residual.shape == p.shape("y") and residual.dtype is p.torch_dtype("y") and residual.device == device
