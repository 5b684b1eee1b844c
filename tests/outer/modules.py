"""A kind of modules over outer products: how a call becomes a problem, and how the module runs by its plan.

As ``tilewise.nn.layers.outer`` it registers itself; no other file names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tilewise.problems.outer import OuterProblem
from torch import nn

from tilewise.machine.device import device_name
from tilewise.nn.layers.bound_pass import BoundPass
from tilewise.nn.layers.kinds import Call, Layer, ModuleKind, register
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.weights import Weights
from tilewise.problems.base import DTYPE_NAMES


class ScaledOuter(nn.Module):
    """``z[b, m, n] = s[b] u[b, m] v[b, n]`` and ``t[b, m] = s[b] u[b, m]`` for parameters ``s`` and ``v``."""

    def __init__(self, batch: int, columns: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(batch, columns, dtype=torch.float32, device="cpu"))
        self.s = nn.Parameter(torch.randn(batch, dtype=torch.float32, device="cpu"))

    def forward(self, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        t = self.s[:, None] * u
        return t[:, :, None] * self.v[:, None, :], t


@dataclass(frozen=True)
class OuterCall:
    """A call with an input of ``shape``."""

    shape: tuple[int, ...]
    columns: int
    dtype: torch.dtype
    device: torch.device
    needs: tuple[bool, ...]
    deterministic: bool


@dataclass(frozen=True)
class OuterRun:
    """What computes a call: a bound plan, or torch."""

    forward: BoundPass | None

    @property
    def planned(self) -> bool:
        return self.forward is not None


@dataclass(frozen=True, eq=False)
class OuterLayer:
    """The layer of a module, which keeps nothing but the table of its plans."""

    plan_table: PlanTable

    def problems(self, call: OuterCall) -> dict[str, OuterProblem]:
        batch, rows = call.shape
        device = device_name(call.device)
        return {"forward": OuterProblem(batch, rows, call.columns, DTYPE_NAMES[call.dtype], device=device)}

    def resolve(self, call: OuterCall) -> OuterRun | None:
        problem = self.problems(call)["forward"]
        if not self.plan_table.ready([problem], call.deterministic, call.device):
            return None
        return OuterRun(self.plan_table.bound(problem, call.deterministic, call.device))

    def forget(self) -> None:
        pass


class Outer(torch.autograd.Function):
    """The forward by plan, the gradients by torch's operators."""

    @staticmethod
    def forward(ctx: Any, planned: BoundPass, u: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> Any:
        ctx.save_for_backward(u, v, s)
        return planned(u, v, s)

    @staticmethod
    def backward(ctx: Any, dz: torch.Tensor, dt: torch.Tensor) -> Any:
        u, v, s = ctx.saved_tensors
        scaled = (dz * v[:, None, :]).sum(2) + dt
        return None, scaled * s[:, None], (dz * (s[:, None] * u)[:, :, None]).sum(1), (scaled * u).sum(1)


class ScaledOuters(ModuleKind):
    """``ScaledOuter`` as a kind of modules."""

    classes = (ScaledOuter,)

    def obstacle(self, module: nn.Module) -> str:
        return "" if type(module) is ScaledOuter else "is derived from ScaledOuter"

    def layers(self, plan_table: PlanTable, weights: Weights) -> OuterLayer:
        return OuterLayer(plan_table)

    def calls(
        self, module: Any, layers: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, gradients_later: bool
    ) -> tuple[list[tuple[Layer, Call]], str]:
        (u,) = args or kwargs.values()
        if u.shape[0] != module.v.shape[0]:
            return [], "called with a batch that is broadcast"
        return [(layers, _call(module, u))], ""

    def forward(self, module: Any, layers: OuterLayer) -> Callable[..., Any]:
        def forward(self: ScaledOuter, u: torch.Tensor) -> Any:
            run = layers.resolve(_call(self, u)) if u.shape[0] == self.v.shape[0] else None
            if run is None or run.forward is None:
                return type(self).forward(self, u)
            return Outer.apply(run.forward, u, self.v, self.s)

        return forward


def _call(module: ScaledOuter, u: torch.Tensor) -> OuterCall:
    grad = torch.is_grad_enabled()
    needs = tuple(grad and t.requires_grad for t in (u, module.v, module.s))
    deterministic = torch.are_deterministic_algorithms_enabled()
    return OuterCall(tuple(u.shape), module.v.shape[1], u.dtype, u.device, needs, deterministic)


register(ScaledOuters())
