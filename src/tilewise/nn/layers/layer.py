"""A layer's table from calls to what runs them, with a check for a repeated call that takes about a microsecond."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad

from tilewise import solvers
from tilewise.kernels.native.autograd import when_there
from tilewise.machine.device import conv_precision, device_name
from tilewise.machine.recent import Recent
from tilewise.nn.layers.call import Call, describe, disturbed, function_mode_watches, is_plain_type, libraries
from tilewise.nn.layers.compiled import Known, publish
from tilewise.nn.layers.geometry import Geometry, Role
from tilewise.nn.layers.handlers import through, unwrapped_tensors
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.runner import Run, Runner
from tilewise.nn.layers.strides import Strides, torch_strides
from tilewise.nn.layers.weights import Weights
from tilewise.problems.base import ALIGNMENT, DTYPE_NAMES, dense_strides, layout_of
from tilewise.problems.conv.problem import ConvProblem

__all__ = ["Entry", "Layer", "is_like", "wanted"]

MOST_CALLS = 128
"""Kinds of call (shapes, needs for gradients, flags) of which a layer remembers what runs them."""

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
Guard = Callable[..., bool]

_grad_enabled = torch.is_grad_enabled
_deterministic = torch._C._get_deterministic_algorithms
_function_mode = torch._C._is_torch_function_mode_enabled
_precision = torch._C._get_fp32_precision_getter


@dataclass(slots=True)
class Entry:
    """What runs one kind of call (``run``, ``None`` for torch), and a cheap check that a call is of that kind.

    ``runner`` is ``None`` where the call becomes one of another layer first.

    ``guard`` compares types, dispatch keys, dtypes, devices, sizes, strides and ``requires_grad`` of the tensors, and
    modes, transforms and autocast of the thread, with those at its making. The other fields are what it does not
    compare. ``precision``, ``autocast`` and ``libraries`` are ``None`` where they make no difference. A call that is
    not ``aligned`` is always looked up.
    """

    run: Run | None
    runner: Runner | None
    guard: Guard
    has_bias: bool
    aligned: bool
    grad: bool
    deterministic: bool
    precision: str | None
    autocast: torch.dtype | None
    libraries: tuple[bool, bool] | None
    device_type: str


def is_like(e: Entry, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> bool:
    """Whether ``e`` is the entry of this call, as torch is set now."""
    return (
        (e.guard(x, w, b) if e.has_bias else b is None and e.guard(x, w))
        and e.aligned
        and not (x.data_ptr() | w.data_ptr()) & 15
        and _grad_enabled() is e.grad
        and _deterministic() is e.deterministic
        and forward_ad._current_level < 0
        and (e.precision is None or _precision("cuda", "conv") == e.precision or conv_precision() == e.precision)
        and (e.autocast is None or torch.get_autocast_dtype(e.device_type) is e.autocast)
        and (e.libraries is None or libraries() == e.libraries)
        and not (_function_mode() and function_mode_watches())
    )


@dataclass(frozen=True, slots=True)
class Adapted:
    """A call that becomes one of ``layer`` by a ``change`` of operands that torch would make: a cast or padding."""

    layer: Layer
    change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], Tensors]

    def __call__(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        x, w, b = self.change(x, w, b)
        with torch._C._DisableAutocast():
            y = self.layer(x, w, b)
            return self.layer.geometry.torch_forward(x, w, b) if y is NotImplemented else y

    def native(self, autocast: torch.dtype | None, entry: Entry) -> Run | None:
        """The same in native code, for a change that is autocast's; ``None`` where that is not there."""
        if autocast is None or entry.runner is None or not entry.aligned:
            return None
        return entry.runner.native(autocast)


class Layer:
    """One convolution layer: ``layer(x, w, b)`` is its result, or ``NotImplemented`` where torch must compute it.

    Copies of a module share it. It holds no tensor, except what was computed from a constant weight where ``weights``
    allows that. ``runners`` has the runners of recent calls, ``latest`` what ran the latest one, and ``known`` the
    planned calls as ``torch.compile`` finds them. ``name`` is the module's in its model, for a profiler to show.
    """

    __slots__ = (
        "__weakref__",
        "_entries",
        "_inner",
        "geometry",
        "known",
        "latest",
        "name",
        "plan_table",
        "runners",
        "weights",
    )

    def __init__(
        self,
        geometry: Geometry,
        plan_table: PlanTable,
        known: list[Known] | None = None,
        *,
        weights: Weights = Weights.CHANGING,
        name: str = "",
    ) -> None:
        self.geometry, self.plan_table, self.weights, self.name = geometry, plan_table, weights, name
        self.runners: Recent[Call, Runner] = Recent(MOST_CALLS)
        self.known: list[Known] = [] if known is None else known
        self._entries: Recent[Call, Entry] = Recent(MOST_CALLS)
        self.latest: Entry | None = None
        self._inner: dict[object, Layer] = {}

    def __call__(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Any:
        e = self.latest
        if e is not None and is_like(e, x, w, b):
            return NotImplemented if e.run is None else e.run(x, w, b)
        if not (is_plain_type(type(x)) and is_plain_type(type(w)) and (b is None or is_plain_type(type(b)))):
            return through(self, x, w, b)
        if unbatched(x, self.geometry.dims):
            y = self(x.unsqueeze(0), w, b)
            return y if y is NotImplemented else y.squeeze(0)
        e = self.entry(x, w, b)
        if e is None:
            return NotImplemented
        self.latest = e
        return NotImplemented if e.run is None else e.run(x, w, b)

    def entry(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Entry | None:
        """The entry of this call; ``None`` where it is left to torch or cannot be planned at this moment."""
        call = None if disturbed() else describe(x, w, b, self.geometry.dims)
        if call is None:
            self.leave(x, w, b)
            return None
        entry = self._entries.get(call)
        if entry is None:
            entry = self._enter(call, (x, w, b))
        elif not (entry.guard(x, w) if b is None else entry.guard(x, w, b)):
            entry.guard = guard_of(x, w, b)
        return entry

    def _enter(self, call: Call, tensors: Tensors) -> Entry | None:
        """Make the entry of a new kind of call; ``None`` where it cannot be planned at this moment."""
        adapted = self.adapted(call)
        run: Run | None
        if adapted is not None:
            with torch._C._DisableAutocast():
                inner = adapted.layer.entry(*adapted.change(*tensors))
            if inner is None:
                return None
            run = None if inner.run is None else adapted.native(call.autocast, inner) or adapted
        else:
            runner = self.resolve(call)
            if runner is None:
                return None
            run = runner.run if runner.planned else None
        entry = self._entries[call] = Entry(
            run=run,
            runner=None if adapted is not None else runner,
            guard=guard_of(*tensors),
            has_bias=call.bias is not None,
            aligned=call.x.alignment == call.w.alignment == ALIGNMENT,
            grad=torch.is_grad_enabled(),
            deterministic=call.deterministic,
            precision=call.precision if call.device.type == "cuda" and call.dtype is torch.float32 else None,
            autocast=call.autocast,
            libraries=call.libraries,
            device_type=call.device.type,
        )
        return entry

    def computed(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Any:
        """The result for a subclass' handler that calls torch's function."""
        return self(x, w, b)

    def leave(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> None:
        """Take note of a call that is left to torch. Nothing is done here; subclasses may."""

    def adapted(self, call: Call) -> Adapted | None:
        """The call of another layer that this call becomes; ``None`` where it stays a call of this layer."""
        if call.autocast is not None:
            inner = self._inner.get(call.autocast) or Layer(self.geometry, self.plan_table, self.known, name=self.name)
            return Adapted(self._inner.setdefault(call.autocast, inner), cast_to(call.autocast))
        if self.geometry.symmetric or torch_pads_natively(self, call):
            return None
        geometry, pads = self.geometry.without_excess()
        inner = self._inner.get(pads) or Layer(geometry, self.plan_table, weights=self.weights, name=self.name)
        return Adapted(self._inner.setdefault(pads, inner), lambda x, w, b: (torch.constant_pad_nd(x, pads), w, b))

    def resolve(self, call: Call) -> Runner | None:
        """The runner of a call without autocast; ``None`` where it cannot be planned at this moment."""
        runner = self.runners.get(call)
        if runner is not None:
            return runner
        if call.libraries not in (None, libraries()):  # torch is asked for its strides as it is
            return None
        try:
            problems, strides = self.problems(call), self.strides(call)
        except ValueError:  # torch says what is wrong with these sizes
            problems, strides = {}, Strides((), (), ())
        self.plan_table.new_inputs.note(self.name, call, problems, self.plan_table)
        if not self.plan_table.ready(problems.values(), call.deterministic, call.device):
            return None
        runner = self.runners[call] = self._runner(self.name, call, problems, strides)
        when_there(self)
        if runner.planned and self.plan_table.traced and len(self.known) < MOST_CALLS:
            forward = problems[Role.FORWARD]
            # Layers of equal plans share what is published, so that it has no layer's name.
            shared = self._runner("", call, problems, strides) if self.name else runner
            known = publish(shared, call, forward.shape(forward.result), self.plan_table.number)
            if known is not None and known not in self.known:
                self.known.append(known)
                self.plan_table.published.add(known.plans)
        return runner

    def _runner(self, name: str, call: Call, problems: Mapping[str, ConvProblem], strides: Strides) -> Runner:
        """The runner of a call whose plans are bound. A profiler shows its passes as those of a layer ``name``."""
        bound = {
            role: self.plan_table.bound(problem, call.deterministic, call.device) for role, problem in problems.items()
        }
        named = {role: None if found is None else found.named(name, role) for role, found in bound.items()}
        return Runner(
            self.geometry,
            named.get(Role.FORWARD),
            named.get(Role.GRAD_INPUT),
            named.get(Role.GRAD_WEIGHT),
            needs_grad=any(call.needs),
            strides=strides,
            direct=call.x == call.x.dense(call.backend_layout) and call.w == call.w.dense(call.backend_layout),
            operand_strides=(call.x.strides, call.w.strides),
            device=call.device,
        )

    def problems(self, call: Call) -> dict[str, ConvProblem]:
        """The problem of each pass of a call without autocast.

        Operands that are not dense are copied first, as torch does. A gradient has torch's layout, which may differ
        from its operand's. Raises ``ValueError`` for sizes that do not fit.
        """
        layout = call.backend_layout
        x, w = call.x.dense(layout), call.w.dense(layout)
        shape = self.geometry.result_shape(x.shape, w.shape)
        if call.bias is not None and call.bias != shape[1]:
            raise ValueError(f"bias has {call.bias} elements for {shape[1]} channels")
        strides = self.strides(call)
        if dense_strides(shape, layout) != strides.result:
            layout = "contiguous"
        of_x, of_w = layout_of(x.shape, x.strides), layout_of(w.shape, w.strides)
        layouts = {
            Role.FORWARD: (of_x, of_w, layout),
            Role.GRAD_INPUT: (layout_of(x.shape, strides.grad_input), of_w, layout),
            Role.GRAD_WEIGHT: (of_x, layout_of(w.shape, strides.grad_weight), layout),
        }
        return {
            role: self.geometry.problem(
                role,
                x.shape,
                w.shape,
                dtype=DTYPE_NAMES[call.dtype],
                precision=call.precision,
                bias=call.bias is not None,
                layouts=layouts[role],
                alignment=(x.alignment, w.alignment, ALIGNMENT),
                device=device_name(call.device),
                weights=self.weights,
            )
            for role in wanted(call.needs)
        }

    def strides(self, call: Call) -> Strides:
        """The strides that torch gives to result and gradients. Raises ``ValueError`` for sizes that do not fit."""
        x, w = call.x, call.w
        shape = self.geometry.result_shape(x.shape, w.shape)
        return torch_strides(self.geometry, (x.shape, x.strides), (w.shape, w.strides), shape, call.dtype, call.device)

    def use_native(self) -> None:
        """Run by native code what can be: it has come to be there."""
        for runner in list(self.runners.values()):
            runner.use_native()
        self._entries.clear()
        self.latest = None

    def forget(self) -> None:
        """Forget all resolved calls, as the plan table's plans have changed."""
        self.runners.clear()
        self.known.clear()
        self._entries.clear()
        self.latest = None
        for inner in self._inner.values():
            inner.forget()

    def visit(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Iterator[tuple[Layer, Call]]:
        """The layer and call that a call becomes in the end, without planning; nothing where it is left to torch."""
        operands = None if disturbed() else unwrapped_tensors(x, w, b)
        if operands is None:
            return
        x, w, b = operands
        if unbatched(x, self.geometry.dims):
            yield from self.visit(x.unsqueeze(0), w, b)
            return
        call = describe(x, w, b, self.geometry.dims)
        adapted = None if call is None else self.adapted(call)
        if adapted is not None:
            with torch._C._DisableAutocast():
                yield from adapted.layer.visit(*adapted.change(x, w, b))
        elif call is not None:
            yield self, call


def wanted(needs: tuple[bool, bool, bool]) -> list[Role]:
    """The passes of a call that needs these gradients (input, weight, bias)."""
    return [role for role, want in zip(Role, (True, needs[0], needs[1]), strict=True) if want]


def unbatched(x: object, dims: int) -> bool:
    """Whether ``x`` is a plain image without a batch axis."""
    return is_plain_type(type(x)) and x.dim() == dims + 1  # type: ignore[attr-defined]


def cast_to(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], Tensors]:
    """A function that casts a convolution's operands as autocast does."""

    def cast(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Tensors:
        return x.to(dtype), w.to(dtype), None if b is None else b.to(dtype)

    return cast


def torch_pads_natively(layer: Layer, call: Call) -> bool:
    """Whether the baseline can compute the layer's uneven padding, so that a plan may include the padding."""
    try:
        problems = layer.problems(call)
    except ValueError:
        return True
    return not any(solvers.baseline(p).why_not(p) for p in problems.values())


def guard_of(*given: torch.Tensor | None) -> Guard:
    """A check that tensors are like those given: that of ``torch.compile``, which is one call of C++.

    It takes as many as there are without ``None``.
    """
    tensors = [t for t in given if t is not None]
    guards = TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],  # type: ignore[misc]
        dynamic_dims_strides=[list(t.stride()) for t in tensors],  # type: ignore[misc]
    )
    check: Guard = guards.check
    return check
