"""``nn.LocalResponseNorm`` as a kind of modules: forward and backward by one plan.

Gradients of gradients are torch's: the backward is then computed by torch's own function from what was saved.
Under autocast, within ``torch.compile`` and inside transforms the module is torch's. So it is in other types than fp32
on a CPU, for which there is no solver but torch's, and for views, whose results torch lays out as they lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewise import solvers
from tilewise.machine.device import device_name
from tilewise.nn.layers.bound_pass import BoundPass, Slot
from tilewise.nn.layers.call import autocast_dtype, disturbed, is_plain
from tilewise.nn.layers.one_input.base import OneInputKind, OneInputLayer
from tilewise.nn.layers.overrides import stand_ins
from tilewise.nn.ranges import both_ranges, shown
from tilewise.problems.base import DTYPE_NAMES, dense_strides, layout_of
from tilewise.problems.lrn.problem import LrnProblem
from tilewise.solvers.lrn._lrn import LrnPasses, LrnSolver
from tilewise.solvers.lrn.aten_lrn import FUNCTION

__all__ = ["AskedNorm", "LocalResponseNorms", "LrnCall", "LrnLayer", "LrnRun", "describe", "why_torchs"]

FORWARD = nn.LocalResponseNorm.forward
CODE = FORWARD.__code__
BY_TORCH: Any = torch.nn.functional.local_response_norm
BY_TORCH_CODE = BY_TORCH.__code__
"""torch's own functions and their code, as they are when this file is imported."""
STAND_INS = stand_ins("local_response_norm")
CPU_DTYPES = (torch.float32,)
"""Types in which there is a solver beside torch's on a CPU."""


@dataclass(frozen=True, slots=True)
class LrnCall:
    """One call of a local response normalization, as far as plans depend on it.

    ``shape`` is the input's, (batch, channels, *space). ``layout`` is the dense one in which it is computed. ``needs``
    says whether the input needs a gradient: forward and backward are one problem then.
    """

    shape: tuple[int, ...]
    layout: str
    size: int
    alpha: float
    beta: float
    k: float
    dtype: torch.dtype
    device: torch.device
    needs: tuple[bool, ...]
    deterministic: bool

    @property
    def problem(self) -> LrnProblem:
        """The problem of the call."""
        batch, channels, *space = self.shape
        return LrnProblem(
            batch,
            channels,
            tuple(space),
            self.size,
            self.alpha,
            self.beta,
            self.k,
            task="training" if any(self.needs) else "inference",
            layout_name=self.layout,
            dtype=DTYPE_NAMES[self.dtype],
            device=device_name(self.device),
        )


@dataclass(frozen=True, slots=True)
class AskedNorm:
    """What a call of torch's function asks for, with the names that the module has."""

    size: Any
    alpha: Any
    beta: Any
    k: Any


def why_torchs(module: Any, x: object) -> str:
    """Why the call ``module(x)`` is left to torch; empty where it may be planned."""
    if not isinstance(x, Tensor) or not is_plain(x):
        return "called with a tensor of a class of its own, or with something else in a tensor's place"
    if x.dtype not in (DTYPE_NAMES if x.device.type == "cuda" else CPU_DTYPES) or x.device.type not in ("cpu", "cuda"):
        return f"computes in {x.dtype} on {x.device.type}, for which there is no solver but torch's"
    if autocast_dtype(x.device) is not None:
        return "called under autocast"
    if x.dim() < 3 or x.numel() == 0:
        return f"called with the shape {tuple(x.shape)}, of which torch computes nothing or raises an error"
    if layout_of(x.shape, x.stride()) == "view":
        return "called with a tensor that is dense neither contiguous nor in channels_last"
    try:
        _ = describe(module, x).problem
    except (TypeError, ValueError) as error:
        return f"has numbers that make no normalization: {error}"
    return ""


def describe(module: Any, x: Tensor) -> LrnCall:
    """The call ``module(x)``, which may be planned."""
    return LrnCall(
        shape=tuple(x.shape),
        layout=layout_of(x.shape, x.stride()),
        size=module.size,
        alpha=float(module.alpha),
        beta=float(module.beta),
        k=float(module.k),
        dtype=x.dtype,
        device=x.device,
        needs=(torch.is_grad_enabled() and x.requires_grad,),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


@dataclass(frozen=True, slots=True, eq=False)
class LrnRun:
    """What runs one kind of call of ``problem``: a plan's forward and backward, or torch where ``passes`` is None.

    ``ranges`` are the names under which a profiler shows them.
    """

    problem: LrnProblem
    strides: tuple[int, ...]
    passes: LrnPasses | None
    slots: tuple[Slot, ...] = ()
    ranges: tuple[str, str] = ("", "")

    @property
    def planned(self) -> bool:
        """Whether a plan runs it."""
        return self.passes is not None

    def __call__(self, x: Tensor) -> Tensor:
        """The result, with autograd where that is needed."""
        if self.problem.task == "inference":
            return self.forward(self.slots[0].take(x))
        return PlannedLrn.apply(self, x)  # type: ignore[no-any-return,no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """The result of a dense ``x``, without autograd."""
        assert self.passes is not None
        with shown(self.ranges[0]):
            return self.passes.forward(x, self._empty(x))

    def backward(self, x: Tensor, dy: Tensor) -> Tensor:
        """The gradient of a dense ``x`` by that of the result, without autograd."""
        assert self.passes is not None
        with shown(self.ranges[1]):
            return self.passes.backward(x, self.slots[1].take(dy), self._empty(x))

    def _empty(self, like: Tensor) -> Tensor:
        """A new tensor as the plan expects it."""
        return torch.empty_strided(like.shape, self.strides, dtype=like.dtype, device=like.device)


class PlannedLrn(torch.autograd.Function):
    """A local response normalization whose forward and backward run by one plan."""

    @staticmethod
    def forward(ctx: Any, run: LrnRun, x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run.forward(run.slots[0].take(x.detach()))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        run: LrnRun = ctx.run
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain(dy) or dy.dtype is not x.dtype or disturbed():
            return None, _gradient_by_torch(run.problem, x, dy)
        return None, run.backward(run.slots[0].take(x), dy)


def _gradient_by_torch(p: LrnProblem, x: Tensor, dy: Tensor) -> Tensor:
    """The gradient by torch's function; with autograd enabled it has gradients itself."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        leaf = x if again and x.requires_grad else x.detach().requires_grad_()
        y = FUNCTION(leaf, p.size, p.alpha, p.beta, p.k)
        return torch.autograd.grad(y, leaf, dy, create_graph=again)[0]


class LrnLayer(OneInputLayer):
    """Local response normalization with plans in a table: ``layer(asked, x)``, or ``NotImplemented`` for torch.

    ``asked`` has ``size``, ``alpha``, ``beta`` and ``k``, as ``nn.LocalResponseNorm`` has.
    """

    def described(self, asked: Any, x: object) -> LrnCall | str:
        """The call of what is ``asked`` on ``x``, or why it is left to torch."""
        reason = why_torchs(asked, x)
        if reason:
            return reason
        assert isinstance(x, Tensor)
        return describe(asked, x)

    def made(self, call: LrnCall, bound: BoundPass | None) -> LrnRun | str:
        """What runs such a call by its bound plan, or by torch where that is ``None``; or why the plan cannot."""
        problem = call.problem
        strides = dense_strides(problem.shape("x"), problem.layout_name)
        if bound is None:
            return LrnRun(problem, strides, None)
        solver, config = solvers.get(bound.plan.solver), bound.plan.config
        passes = solver.passes(problem, config, call.device) if isinstance(solver, LrnSolver) else None
        if passes is None:
            return f"{solver.name}: cannot run forward and backward apart, as a module needs them"
        return LrnRun(problem, strides, passes, bound.slots, both_ranges(self.name, bound.plan.solver))


class LocalResponseNorms(OneInputKind):
    """``nn.LocalResponseNorm`` itself. Classes derived from it may compute anything."""

    classes = (nn.LocalResponseNorm,)
    problems = "lrn"
    layer = LrnLayer

    def runs_torch(self, kind: type[nn.Module]) -> bool:
        """Whether ``nn.LocalResponseNorm`` runs torch's own code and function."""
        function = torch.nn.functional.local_response_norm
        return (
            nn.LocalResponseNorm.forward is FORWARD
            and FORWARD.__code__ is CODE
            and (function is BY_TORCH or function in STAND_INS)
            and BY_TORCH.__code__ is BY_TORCH_CODE
        )
