"""``nn.MaxPool1d`` to ``nn.MaxPool3d`` and ``nn.AvgPool1d`` to ``nn.AvgPool3d`` as a kind of modules.

A call with gradients is one problem, forward and backward together: a plan decides what is kept between. Gradients of
gradients are torch's. Calls under autocast, in ``torch.compile`` and with ``return_indices`` are torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format

from tilewise import solvers
from tilewise.machine.device import device_name
from tilewise.machine.recent import Recent
from tilewise.nn.layers.bound_pass import Slot
from tilewise.nn.layers.call import disturbed, is_plain
from tilewise.nn.layers.kinds import Call, Layer, ModuleKind
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.swaps import copies_itself, swapped
from tilewise.nn.layers.weights import Weights
from tilewise.problems.base import DTYPE_NAMES
from tilewise.problems.pooling.problem import PoolingProblem
from tilewise.solvers.pooling._pooling import Pooler, PoolingSolver
from tilewise.solvers.pooling.aten_pooling import called

__all__ = ["PoolingCall", "PoolingLayer", "Poolings"]

CLASSES: dict[type[nn.Module], tuple[str, int]] = {
    nn.MaxPool1d: ("max", 1), nn.MaxPool2d: ("max", 2), nn.MaxPool3d: ("max", 3),
    nn.AvgPool1d: ("avg", 1), nn.AvgPool2d: ("avg", 2), nn.AvgPool3d: ("avg", 3),
}  # fmt: skip
"""The operation and the number of axes of each class."""
OWN: dict[Any, Any] = {kind: (kind.forward, kind.forward.__code__) for kind in CLASSES}
NAMES = {kind: f"{op}_pool{dims}d" for kind, (op, dims) in CLASSES.items()}
BY_TORCH = {name: getattr(nn.functional, name) for name in NAMES.values()}
"""torch's own functions and code, as they are when this file is imported."""
MOST_CALLS = 128
"""Kinds of call of which a layer remembers what runs them."""


@dataclass(frozen=True, slots=True)
class PoolingCall:
    """One call, as far as plans depend on it: its forward's problem, and whether the input needs a gradient."""

    problem: PoolingProblem
    device: torch.device
    needs: tuple[bool, ...]
    deterministic: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the input."""
        return self.problem.shape("x")


@dataclass(frozen=True, slots=True, eq=False)
class PoolingRun:
    """What runs one kind of call: a pooler, or torch where there is none. Slots say how it takes x and dy."""

    problem: PoolingProblem
    pooler: Pooler | None = None
    slots: tuple[Slot, ...] = ()

    @property
    def planned(self) -> bool:
        """Whether a plan runs it."""
        return self.pooler is not None

    def __call__(self, x: Tensor) -> Tensor:
        """The result for a batch of images, with autograd where that is needed."""
        assert self.pooler is not None
        if self.problem.task == "training":
            return PlannedPooling.apply(self, x)  # type: ignore[no-any-return,no-untyped-call]
        return self.pooler.forward(self.slots[0].take(x.detach()), keep=False)[0]


class PlannedPooling(torch.autograd.Function):
    """Pooling whose forward and backward run by one plan."""

    @staticmethod
    def forward(ctx: Any, run: PoolingRun, x: Tensor) -> Tensor:
        assert run.pooler is not None
        taken = run.slots[0].take(x)
        y, saved = run.pooler.forward(taken, keep=True)
        # Which element is a maximum depends on the input, which gradients of gradients need. An average's does not.
        first = (x,) if run.problem.op == "max" else ()
        ctx.run, ctx.shape = run, x.shape
        ctx.save_for_backward(*first, *saved)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        run: PoolingRun = ctx.run
        tensors = ctx.saved_tensors
        x, saved = (tensors[0], tensors[1:]) if run.problem.op == "max" else (None, tensors)
        plain = is_plain(dy) and dy.dtype is run.problem.torch_dtype("x")
        if torch.is_grad_enabled() or not plain or disturbed() or torch._C._is_any_autocast_enabled():
            return None, _gradient_by_torch(run.problem, x, dy)
        assert run.pooler is not None
        return None, run.pooler.backward(saved, run.slots[1].take(dy))


def _gradient_by_torch(p: PoolingProblem, x: Tensor | None, dy: Tensor) -> Tensor:
    """The gradient of the input by torch's functions, with gradients of its own."""
    again = torch.is_grad_enabled()
    with torch.enable_grad(), torch._C._DisableAutocast():
        leaf = torch.zeros(p.shape("x"), dtype=dy.dtype, device=dy.device) if x is None else x.detach()
        leaf = leaf.requires_grad_()
        return torch.autograd.grad(called(p, leaf), leaf, dy, create_graph=again)[0]


class PoolingLayer:
    """Poolings with plans in one table: ``layer(module, x)`` is the result, or ``NotImplemented`` where it is torch's.

    Copies of a module share it. It holds no tensor.
    """

    def __init__(self, plan_table: PlanTable) -> None:
        self.plan_table = plan_table
        self._runs: Recent[PoolingCall, PoolingRun] = Recent(MOST_CALLS)

    def __call__(self, module: nn.Module, x: object) -> Any:
        if disturbed():
            return NotImplemented
        call = describe(module, x)
        if isinstance(call, str):
            return NotImplemented
        run = self.resolve(call)
        if run is None or not run.planned:
            return NotImplemented
        assert isinstance(x, Tensor)
        single = x.dim() == len(call.problem.space) + 1
        y = run(x.unsqueeze(0) if single else x)
        return y.squeeze(0) if single else y

    def problems(self, call: PoolingCall) -> dict[str, PoolingProblem]:
        """The problem of a call. That of a call with gradients is the backward's as well: one plan runs both."""
        return {"forward": _problem_of(call)}

    def resolve(self, call: PoolingCall) -> PoolingRun | None:
        """What runs such a call; ``None`` where it cannot be planned at this moment."""
        run = self._runs.get(call)
        problem = _problem_of(call)
        if run is None and self.plan_table.ready([problem], call.deterministic, call.device):
            run = self._runs[call] = self._made(call, problem)
        return run

    def _made(self, call: PoolingCall, problem: PoolingProblem) -> PoolingRun:
        """What runs such a call, of which the plan is bound."""
        bound = self.plan_table.bound(problem, call.deterministic, call.device)
        if bound is None:
            return PoolingRun(problem)
        solver = solvers.get(bound.plan.solver)
        if not isinstance(solver, PoolingSolver):
            reason = f"{solver.name}: cannot run forward and backward apart, as a module needs them"
            self.plan_table.refuse(problem, call.deterministic, reason)
            return PoolingRun(problem)
        return PoolingRun(problem, solver.pooler(problem, bound.plan.config, call.device), bound.slots)

    def forget(self) -> None:
        """Forget all resolved calls, as the plan table's plans have changed."""
        self._runs.clear()


def _problem_of(call: PoolingCall) -> PoolingProblem:
    """The problem of a call: forward and backward together where a gradient is needed, else the forward."""
    return replace(call.problem, task="training") if any(call.needs) else call.problem


def describe(module: Any, x: object) -> PoolingCall | str:
    """The call ``module(x)``, or why it is left to torch."""
    op, dims = CLASSES[type(module)]
    if not isinstance(x, Tensor) or not is_plain(x):
        return "called with a tensor of a class of its own, or with something else in a tensor's place"
    if x.device.type not in ("cpu", "cuda"):
        return f"called on {x.device.type}, for which there is no plan"
    if x.dtype not in DTYPE_NAMES:
        return f"computes in {x.dtype}"
    if torch._C._is_any_autocast_enabled():
        return "called under autocast"
    if x.dim() not in (dims + 1, dims + 2) or x.numel() == 0:
        return "called with sizes that do not fit, or with an empty tensor"
    if op == "max" and module.return_indices:
        return "returns indices"
    batched = x if x.dim() == dims + 2 else x.unsqueeze(0)
    names = ("kernel_size", "stride", "padding", "dilation")
    kernel, stride, padding, dilation = (_numbers(getattr(module, name, 1), dims) for name in names)
    if kernel is None or stride is None or padding is None or dilation is None:
        return "has sizes that are no whole numbers"
    try:
        problem = PoolingProblem(
            op,
            batched.shape[0],
            batched.shape[1],
            tuple(batched.shape[2:]),
            kernel,
            stride,
            padding,
            dilation,
            ceil_mode=bool(module.ceil_mode),
            count_include_pad=bool(getattr(module, "count_include_pad", True)),
            divisor=getattr(module, "divisor_override", None) or 0,
            layout_name=_layout(op, batched),
            dtype=DTYPE_NAMES[x.dtype],
            device=device_name(x.device),
        )
    except ValueError as error:
        return f"called with sizes that are torch's to judge: {error}"
    needs = torch.is_grad_enabled() and x.requires_grad
    return PoolingCall(problem, x.device, (needs,), torch.are_deterministic_algorithms_enabled())


def _numbers(value: Any, dims: int) -> tuple[int, ...] | None:
    """One number for each axis, as torch takes them; ``None`` for what are none."""
    numbers: Sequence[Any] = value if isinstance(value, tuple | list) else (value,) * dims
    if len(numbers) == 1:
        numbers = tuple(numbers) * dims
    return tuple(numbers) if len(numbers) == dims and all(type(n) is int for n in numbers) else None


def _layout(op: str, x: Tensor) -> str:
    """The layout of the result, as torch chooses it: averages of volumes are always contiguous."""
    if x.dim() == 3 or (op == "avg" and x.dim() == 5) or x.stride(1) != 1 or math.prod(x.shape[2:]) == 1:
        return "contiguous"
    return "contiguous" if suggest_memory_format(x) is torch.contiguous_format else "channels_last"


class Poolings(ModuleKind):
    """torch's own classes of pooling. Classes derived from them may compute anything."""

    classes = tuple(CLASSES)
    under_limits = False  # torch's own choice keeps more for its backward than most limits allow
    problems = "pool"

    def obstacle(self, module: Any) -> str:
        """Why this module cannot be swapped: another class, indices, or a forward that is not torch's own."""
        kind = type(module)
        if kind not in CLASSES:
            return f"is a {kind.__name__}, which may compute otherwise than the class it is derived from"
        if getattr(module, "return_indices", False):
            return "has return_indices: indices are torch's"
        if not _runs_torch(kind):
            return f"nn.{kind.__name__}.forward or the function of torch that it calls is not torch's own"
        if "forward" in module.__dict__ and swapped(module) is None:
            return "has a forward set on the instance"
        return copies_itself(module)

    def layers(self, plan_table: PlanTable, weights: Weights) -> PoolingLayer:
        """The layer of a module, which has no weight."""
        return PoolingLayer(plan_table)

    def calls(
        self, module: Any, layers: PoolingLayer, args: tuple[Any, ...], kwargs: dict[str, Any], *, gradients_later: bool
    ) -> tuple[list[tuple[Layer, Call]], str]:
        """The one call of a pooling, or why it is left to torch."""
        call = describe(module, _argument(*args, **kwargs))
        if isinstance(call, str):
            return [], call
        return [(layers, replace(call, needs=(True,)) if gradients_later else call)], ""

    def forward(self, module: Any, layers: PoolingLayer) -> Callable[..., Any]:
        """The module's ``forward``, by plans where it still runs torch's own code."""

        def forward(self: Any, input: Any) -> Any:
            kind = type(self)
            if not torch.compiler.is_dynamo_compiling() and kind in CLASSES and _runs_torch(kind):
                y = layers(self, input)
                if y is not NotImplemented:
                    return y
            return kind.forward(self, input)

        return forward


def _argument(input: Any) -> Any:
    """The argument of a forward."""
    return input


def _runs_torch(kind: Any) -> bool:
    """Whether modules of this class run torch's own code and function."""
    forward, code = OWN[kind]
    function = getattr(nn.functional, NAMES[kind])
    return kind.forward is forward and forward.__code__ is code and function is BY_TORCH[NAMES[kind]]
