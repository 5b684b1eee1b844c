"""A layer's table from calls to what runs them, with a check for the last call that costs about a microsecond."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad

from tilewise import solvers
from tilewise.device import conv_precision, device_name
from tilewise.nn.book import Book
from tilewise.nn.call import Call, describe, disturbed, function_mode_watches, is_plain_type
from tilewise.nn.compiled import Known, publish
from tilewise.nn.geometry import Geometry, Role, Weights
from tilewise.nn.handlers import through, unwrapped_tensors
from tilewise.nn.runner import Run, Runner
from tilewise.nn.strides import Strides, torch_strides
from tilewise.problem import ALIGNMENT, DTYPE_NAMES, ConvProblem, dense_strides, layout_of
from tilewise.recent import Recent

__all__ = ["Layer", "wanted"]

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
    """What runs one kind of call (``None``: torch) and the cheap check that a call is of that kind.

    ``guard`` compares tensors' types, dispatch keys, element types, devices, sizes, strides and ``requires_grad``, and
    the thread's modes, transforms and autocast, with what they were when it was made; the other fields are what it
    does not see. ``precision`` and ``autocast`` are ``None`` where they make no difference; a call that is not
    ``aligned`` is always looked up.
    """

    run: Run | None
    guard: Guard
    has_bias: bool
    aligned: bool
    grad: bool
    deterministic: bool
    precision: str | None
    autocast: torch.dtype | None
    device_type: str


@dataclass(frozen=True, slots=True)
class Adapted:
    """A call that becomes another layer's once its operands are changed as torch would: cast, or padded first."""

    layer: Layer
    change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], Tensors]

    def __call__(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        x, w, b = self.change(x, w, b)
        with torch._C._DisableAutocast():
            y = self.layer(x, w, b)
            return self.layer.geometry.torch_forward(x, w, b) if y is NotImplemented else y


class Layer:
    """One convolution layer: ``layer(x, w, b)`` is its result, or ``NotImplemented`` where torch is to do it.

    Shared by the copies of a module; it holds no tensor but what a constant weight came to. ``weights`` says whether
    that is kept. ``runners`` are the calls resolved lately, ``known`` those
    with plans, as ``torch.compile`` finds them.
    """

    __slots__ = ("_entries", "_inner", "_last", "book", "geometry", "known", "runners", "weights")

    def __init__(
        self,
        geometry: Geometry,
        book: Book,
        known: list[Known] | None = None,
        *,
        weights: Weights = Weights.CHANGING,
    ) -> None:
        self.geometry, self.book, self.weights = geometry, book, weights
        self.runners: Recent[Call, Runner] = Recent(MOST_CALLS)
        self.known: list[Known] = [] if known is None else known
        self._entries: Recent[Call, Entry] = Recent(MOST_CALLS)
        self._last: Entry | None = None
        self._inner: dict[object, Layer] = {}

    def __call__(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Any:
        e = self._last
        if (
            e is not None
            and (e.guard(x, w, b) if e.has_bias else b is None and e.guard(x, w))
            and e.aligned
            and not (x.data_ptr() | w.data_ptr()) & 15
            and _grad_enabled() is e.grad
            and _deterministic() is e.deterministic
            and forward_ad._current_level < 0
            and (e.precision is None or _precision("cuda", "conv") == e.precision or conv_precision() == e.precision)
            and (e.autocast is None or torch.get_autocast_dtype(e.device_type) is e.autocast)
            and not (_function_mode() and function_mode_watches())
        ):
            return NotImplemented if e.run is None else e.run(x, w, b)
        if not (is_plain_type(type(x)) and is_plain_type(type(w)) and (b is None or is_plain_type(type(b)))):
            return through(self, x, w, b)
        if unbatched(x, self.geometry.dims):
            y = self(x.unsqueeze(0), w, b)
            return y if y is NotImplemented else y.squeeze(0)
        e = self.entry(x, w, b)
        if e is None:
            return NotImplemented
        self._last = e
        return NotImplemented if e.run is None else e.run(x, w, b)

    def entry(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Entry | None:
        """What runs this call; ``None`` when it is torch's own affair, or cannot be planned at this moment."""
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
        adapted = self.adapted(call)
        run: Run | None
        if adapted is not None:
            with torch._C._DisableAutocast():
                inner = adapted.layer.entry(*adapted.change(*tensors))
            if inner is None:
                return None
            run = None if inner.run is None else adapted
        else:
            runner = self.resolve(call)
            if runner is None:
                return None
            run = runner.run if runner.planned else None
        entry = self._entries[call] = Entry(
            run=run,
            guard=guard_of(*tensors),
            has_bias=call.bias is not None,
            aligned=call.x.alignment == call.w.alignment == ALIGNMENT,
            grad=torch.is_grad_enabled(),
            deterministic=call.deterministic,
            precision=call.precision if call.device.type == "cuda" and call.dtype is torch.float32 else None,
            autocast=call.autocast,
            device_type=call.device.type,
        )
        return entry

    def computed(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Any:
        """What a subclass' own handler gets from torch's function."""
        return self(x, w, b)

    def leave(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> None:
        """Told of a call that is torch's own affair."""

    def adapted(self, call: Call) -> Adapted | None:
        """How this call becomes another layer's, ``None`` when it is this one's own."""
        if call.autocast is not None:
            inner = self._inner.get(call.autocast) or Layer(self.geometry, self.book, self.known)
            return Adapted(self._inner.setdefault(call.autocast, inner), cast_to(call.autocast))
        if self.geometry.symmetric or torch_pads_natively(self, call):
            return None
        geometry, pads = self.geometry.without_excess()
        inner = self._inner.get(pads) or Layer(geometry, self.book, weights=self.weights)
        return Adapted(self._inner.setdefault(pads, inner), lambda x, w, b: (torch.constant_pad_nd(x, pads), w, b))

    def resolve(self, call: Call) -> Runner | None:
        """The runner of a call without autocast; ``None`` when it cannot be planned at this moment."""
        runner = self.runners.get(call)
        if runner is not None:
            return runner
        try:
            problems, strides = self.problems(call), self.strides(call)
        except ValueError:  # torch says what is wrong with these sizes
            problems, strides = {}, Strides((), (), ())
        if not self.book.ready(problems.values(), call.deterministic, call.device):
            return None
        bound = {role: self.book.bound(problem, call.deterministic, call.device) for role, problem in problems.items()}
        runner = self.runners[call] = Runner(
            self.geometry,
            bound.get(Role.FORWARD),
            bound.get(Role.GRAD_INPUT),
            bound.get(Role.GRAD_WEIGHT),
            needs_grad=any(call.needs),
            strides=strides,
            direct=call.x == call.x.settled(call.backend_layout) and call.w == call.w.settled(call.backend_layout),
            device=call.device,
        )
        if runner.planned and self.book.traced and len(self.known) < MOST_CALLS:
            forward = problems[Role.FORWARD]
            known = publish(runner, call, forward.shape(forward.result))
            if known is not None and known not in self.known:
                self.known.append(known)
        return runner

    def problems(self, call: Call) -> dict[Role, ConvProblem]:
        """The problems that a call without autocast goes through.

        Operands that are not dense are copied first, as torch does. A gradient is laid out as torch's, and not as its
        operand. Raises ``ValueError`` for sizes that make no convolution.
        """
        layout = call.backend_layout
        x, w = call.x.settled(layout), call.w.settled(layout)
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
        """Those that torch gives to the call's result and gradients. Raises ``ValueError`` as :meth:`problems`."""
        x, w = call.x, call.w
        shape = self.geometry.result_shape(x.shape, w.shape)
        return torch_strides(self.geometry, (x.shape, x.strides), (w.shape, w.strides), shape, call.dtype, call.device)

    def forget(self) -> None:
        """Resolve every call anew: the book's plans have changed."""
        self.runners.clear()
        self.known.clear()
        self._entries.clear()
        self._last = None
        for inner in self._inner.values():
            inner.forget()

    def visit(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Iterator[tuple[Layer, Call]]:
        """The layer and call that a call comes down to, without planning; nothing where it is torch's own affair."""
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
    """The computations that a call with these needs for gradients goes through."""
    return [role for role, want in zip(Role, (True, needs[0], needs[1]), strict=True) if want]


def unbatched(x: object, dims: int) -> bool:
    """Whether ``x`` is one plain image without its batch axis."""
    return is_plain_type(type(x)) and x.dim() == dims + 1  # type: ignore[attr-defined]


def cast_to(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], Tensors]:
    """The change that autocast makes to a convolution's operands."""

    def cast(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Tensors:
        return x.to(dtype), w.to(dtype), None if b is None else b.to(dtype)

    return cast


def torch_pads_natively(layer: Layer, call: Call) -> bool:
    """Whether the baseline can be measured on the layer's uneven padding, so that a plan may take it whole."""
    try:
        problems = layer.problems(call)
    except ValueError:
        return True
    return not any(solvers.baseline().why_not(p) for p in problems.values())


def guard_of(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Guard:
    """torch.compile's own check of tensors, one call of C++."""
    tensors = (x, w) if b is None else (x, w, b)
    guards = TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],  # type: ignore[misc]
        dynamic_dims_strides=[list(t.stride()) for t in tensors],  # type: ignore[misc]
    )
    check: Guard = guards.check
    return check
