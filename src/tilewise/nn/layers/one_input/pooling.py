"""``nn.MaxPool1d`` to ``nn.MaxPool3d`` and ``nn.AvgPool1d`` to ``nn.AvgPool3d`` as a kind of modules.

Gradients of gradients are torch's. Calls under autocast, in ``torch.compile`` and with ``return_indices`` are torch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format

from tilewise import solvers
from tilewise.machine.device import device_name
from tilewise.nn.layers.bound_pass import BoundPass, Slot
from tilewise.nn.layers.call import disturbed, is_plain
from tilewise.nn.layers.one_input.base import OneInputKind, OneInputLayer
from tilewise.nn.layers.overrides import stand_ins
from tilewise.nn.ranges import both_ranges, shown
from tilewise.problems.base import DTYPE_NAMES
from tilewise.problems.pooling.problem import PoolingProblem
from tilewise.solvers.pooling._pooling import Pooler, PoolingSolver
from tilewise.solvers.pooling.aten_pooling import called

__all__ = ["Asked", "PoolingCall", "PoolingLayer", "Poolings"]

CLASSES: dict[type[nn.Module], tuple[str, int]] = {
    nn.MaxPool1d: ("max", 1), nn.MaxPool2d: ("max", 2), nn.MaxPool3d: ("max", 3),
    nn.AvgPool1d: ("avg", 1), nn.AvgPool2d: ("avg", 2), nn.AvgPool3d: ("avg", 3),
}  # fmt: skip
"""The operation and the number of axes of each class."""
OWN: dict[Any, Any] = {kind: (kind.forward, kind.forward.__code__) for kind in CLASSES}
NAMES = {kind: f"{op}_pool{dims}d" for kind, (op, dims) in CLASSES.items()}
BY_TORCH = {name: getattr(nn.functional, name) for name in NAMES.values()}
"""torch's own functions and code, as they are when this file is imported."""
STAND_INS = {name: stand_ins(name) for name in NAMES.values()}


@dataclass(frozen=True, slots=True)
class PoolingCall:
    """One call, as far as plans depend on it: its forward's problem, and whether the input needs a gradient."""

    forward: PoolingProblem
    device: torch.device
    needs: tuple[bool, ...]
    deterministic: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the input."""
        return self.forward.shape("x")

    @property
    def problem(self) -> PoolingProblem:
        """Forward and backward together where a gradient is needed, else the forward."""
        return replace(self.forward, task="training") if any(self.needs) else self.forward


@dataclass(frozen=True, slots=True, eq=False)
class PoolingRun:
    """What runs one kind of call: a pooler, or torch where there is none. Slots say how it takes x and dy.

    ``ranges`` are the names under which a profiler shows forward and backward.
    """

    problem: PoolingProblem
    pooler: Pooler | None = None
    slots: tuple[Slot, ...] = ()
    ranges: tuple[str, str] = ("", "")

    @property
    def planned(self) -> bool:
        """Whether a plan runs it."""
        return self.pooler is not None

    def __call__(self, x: Tensor) -> Tensor:
        """The result for a batch of images, or for one image, with autograd where that is needed."""
        if x.dim() == len(self.problem.space) + 1:
            return self(x.unsqueeze(0)).squeeze(0)
        assert self.pooler is not None
        if self.problem.task == "training":
            return PlannedPooling.apply(self, x)  # type: ignore[no-any-return,no-untyped-call]
        with shown(self.ranges[0]):
            return self.pooler.forward(self.slots[0].take(x.detach()), keep=False)[0]


class PlannedPooling(torch.autograd.Function):
    """Pooling whose forward and backward run by one plan."""

    @staticmethod
    def forward(ctx: Any, run: PoolingRun, x: Tensor) -> Tensor:
        assert run.pooler is not None
        taken = run.slots[0].take(x)
        with shown(run.ranges[0]):
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
        with shown(run.ranges[1]):
            return None, run.pooler.backward(saved, run.slots[1].take(dy))


def _gradient_by_torch(p: PoolingProblem, x: Tensor | None, dy: Tensor) -> Tensor:
    """The gradient of the input by torch's functions, with gradients of its own."""
    again = torch.is_grad_enabled()
    with torch.enable_grad(), torch._C._DisableAutocast():
        leaf = torch.zeros(p.shape("x"), dtype=dy.dtype, device=dy.device) if x is None else x.detach()
        leaf = leaf.requires_grad_()
        return torch.autograd.grad(called(p, leaf), leaf, dy, create_graph=again)[0]


class PoolingLayer(OneInputLayer):
    """Poolings with plans in one table: ``layer(asked, x)`` is the result, or ``NotImplemented`` where it is torch's.

    ``asked`` is a module, or :class:`Asked`.
    """

    def described(self, asked: Any, x: object) -> PoolingCall | str:
        """The call of what is ``asked`` on ``x``, or why it is left to torch."""
        return describe(asked, x)

    def made(self, call: PoolingCall, bound: BoundPass | None) -> PoolingRun | str:
        """What runs such a call by its bound plan, or by torch where that is ``None``; or why the plan cannot."""
        problem = call.problem
        if bound is None:
            return PoolingRun(problem)
        solver = solvers.get(bound.plan.solver)
        if not isinstance(solver, PoolingSolver):
            return f"{solver.name}: cannot run forward and backward apart, as a module needs them"
        pooler = solver.pooler(problem, bound.plan.config, call.device)
        return PoolingRun(problem, pooler, bound.slots, both_ranges(self.name, bound.plan.solver))


@dataclass(frozen=True, slots=True)
class Asked:
    """What a call of one of torch's functions asks for, with the names that modules have."""

    op: str
    dims: int
    kernel_size: Any
    stride: Any
    padding: Any
    dilation: Any
    ceil_mode: bool
    count_include_pad: bool
    divisor_override: Any
    return_indices: bool = False


def describe(module: Any, x: object) -> PoolingCall | str:
    """The call ``module(x)`` of a module or of :class:`Asked`, or why it is left to torch."""
    op, dims = (module.op, module.dims) if type(module) is Asked else CLASSES[type(module)]
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


class Poolings(OneInputKind):
    """torch's own classes of pooling. Classes derived from them may compute anything."""

    classes = tuple(CLASSES)
    problems = "pool"
    layer = PoolingLayer

    def special(self, module: Any) -> str:
        """Modules that return indices are torch's."""
        return "has return_indices: indices are torch's" if getattr(module, "return_indices", False) else ""

    def runs_torch(self, kind: type[nn.Module]) -> bool:
        """Whether modules of this class run torch's own code and function."""
        forward, code = OWN[kind]
        name = NAMES[kind]
        function = getattr(nn.functional, name)
        own = function is BY_TORCH[name] or function in STAND_INS[name]
        return own and kind.forward is forward and forward.__code__ is code
