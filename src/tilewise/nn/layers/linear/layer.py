"""A linear layer's table from calls to what runs them, with a short check for a call like the one before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd import forward_ad

from tilewise.kernels.native.autograd import when_there
from tilewise.machine.device import matmul_precision
from tilewise.machine.recent import Recent
from tilewise.nn.layers.call import autocast_dtype, disturbed, function_mode_watches, is_plain
from tilewise.nn.layers.layer import guard_of
from tilewise.nn.layers.linear.call import LinearCall, describe, problems_of
from tilewise.nn.layers.linear.casts import Change
from tilewise.nn.layers.linear.compiled import KnownLinear, publish
from tilewise.nn.layers.linear.run import BY_TORCH, LinearRun
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.problems.activations import activated
from tilewise.problems.base import ALIGNMENT
from tilewise.problems.gemm.problem import GemmProblem

__all__ = ["Entry", "LinearLayer"]

MOST_CALLS = 128
"""Kinds of call of which a layer remembers what runs them."""


Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(slots=True)
class Entry:
    """A kind of call and what runs it, ``None`` for torch. ``guard`` is that of the tensors.

    ``misaligned`` has the bits of an address that must be 0. ``autocast`` is ``None`` where autocast is off.
    ``plans`` are those that ``run`` runs, where it changes no tensor first.
    """

    run: Run | None
    guard: Callable[..., bool]
    has_bias: bool
    grad: bool
    deterministic: bool
    precision: str | None
    misaligned: int
    autocast: torch.dtype | None
    device_type: str
    plans: LinearRun | None = None

    def is_like(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> bool:
        """Whether a call is of this kind, as torch is set now."""
        return (
            (self.guard(x, w, b) if self.has_bias else b is None and self.guard(x, w))
            and torch.is_grad_enabled() is self.grad
            and torch._C._get_deterministic_algorithms() is self.deterministic
            and forward_ad._current_level < 0
            and (not self.misaligned or not (x.data_ptr() | w.data_ptr()) & self.misaligned)
            and (self.precision is None or matmul_precision() == self.precision)
            and (self.autocast is None or torch.get_autocast_dtype(self.device_type) is self.autocast)
            and not (torch._C._is_torch_function_mode_enabled() and function_mode_watches())
        )


@dataclass(frozen=True, slots=True)
class Adapted:
    """A call that becomes one of ``layer`` by a ``change`` of its tensors."""

    layer: LinearLayer
    change: Change

    def __call__(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        x, w, b = self.change(x, w, b)
        with torch._C._DisableAutocast():
            y = self.layer(x, w, b)
            return activated(BY_TORCH(x, w, b), self.layer.activation) if y is NotImplemented else y


class LinearLayer:
    """Linear layers with plans in one table: ``layer(x, w, b)`` is the result, or ``NotImplemented`` for torch's.

    Copies of a module share it. It holds no tensor. Results are after ``activation``, whose derivative must follow from
    them where calls need gradients; such a layer is not known to ``torch.compile``. ``latest`` is the entry of the
    latest call, and ``known`` has the planned calls as ``torch.compile`` finds them. ``name`` is the module's in its
    model, for a profiler to show.
    """

    __slots__ = ("__weakref__", "_entries", "_inner", "_runs", "activation", "known", "latest", "name", "plan_table")

    def __init__(
        self,
        plan_table: PlanTable,
        known: list[KnownLinear] | None = None,
        activation: str = "none",
        name: str = "",
    ) -> None:
        self.plan_table, self.activation, self.name = plan_table, activation, name
        self.known: list[KnownLinear] = [] if known is None else known
        self._runs: Recent[LinearCall, LinearRun] = Recent(MOST_CALLS)
        self._entries: Recent[LinearCall, Entry] = Recent(MOST_CALLS)
        self._inner: dict[Change, LinearLayer] = {}
        self.latest: Entry | None = None

    def __call__(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Any:
        latest = self.latest
        if latest is None or not latest.is_like(x, w, b):
            latest = self.find(x, w, b)
            if latest is None:
                return NotImplemented
            self.latest = latest
        return NotImplemented if latest.run is None else latest.run(x, w, b)

    def find(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Entry | None:
        """The entry of this call; ``None`` where it is left to torch or cannot be planned at this moment."""
        if disturbed():
            self.leave(x, w, b)
            return None
        call = self._described(x, w, b)
        if call is None:
            self.leave(x, w, b)
            plain = is_plain(x) and is_plain(w) and (b is None or is_plain(b))
            return _entry_of(None, x, w, b) if plain else None  # need not be asked again
        entry = self._entries.get(call)
        if entry is None or not entry.is_like(x, w, b):
            entry = self._enter(call, x, w, b)
            if entry is not None:
                self._entries[call] = entry
        return entry

    def _described(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> LinearCall | None:
        """The call of these tensors, with the layer's activation; ``None`` where it is left to torch."""
        call = describe(x, w, b)
        return call if call is None or self.activation == "none" else replace(call, activation=self.activation)

    def leave(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> None:
        """Take note of a call that is left to torch. Nothing is done here; subclasses may."""

    def _enter(self, call: LinearCall, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Entry | None:
        """Make the entry of a call; ``None`` where it cannot be planned at this moment."""
        adapted = self.adapted(call)
        if adapted is not None:
            tensors = adapted.change(x, w, b)
            with torch._C._DisableAutocast():
                inner = adapted.layer.find(*tensors)
            if inner is None:
                return None
            casts = inner.plans is not None and not call.copied and call.alignment == (ALIGNMENT, ALIGNMENT)
            native = inner.plans.native(call.autocast) if casts and inner.plans else None
            return _entry_of(None if inner.run is None else native or adapted, x, w, b, call)
        run = self.resolve(call)
        if run is None:
            return None
        if not run.planned:
            return _entry_of(None, x, w, b, call)
        entry = _entry_of(run.native() or run, x, w, b, call)
        entry.plans = run
        return entry

    def adapted(self, call: LinearCall) -> Adapted | None:
        """The call of another layer that this call becomes; ``None`` where it stays a call of this layer."""
        if call.autocast is None and not call.copied:
            return None
        change = Change(call.autocast, call.copied)
        inner = self._inner.get(change)
        if inner is None:
            layer = LinearLayer(self.plan_table, self.known, self.activation, self.name)
            inner = self._inner.setdefault(change, layer)
        return Adapted(inner, change)

    def visit(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> tuple[LinearLayer, LinearCall] | None:
        """The layer and call that a call becomes in the end, without planning; ``None`` where it is left to torch."""
        call = self._described(x, w, b)
        adapted = None if call is None else self.adapted(call)
        if call is None or adapted is None:
            return None if call is None else (self, call)
        tensors = adapted.change(x, w, b)
        with torch._C._DisableAutocast():
            return adapted.layer.visit(*tensors)

    def problems(self, call: LinearCall) -> dict[str, GemmProblem]:
        """The products of a call by the name of the pass."""
        return problems_of(call)

    def resolve(self, call: LinearCall) -> LinearRun | None:
        """What runs such a call; ``None`` where it cannot be planned at this moment."""
        run = self._runs.get(call)
        if run is not None:
            return run
        problems = problems_of(call)
        self.plan_table.new_inputs.note(self.name, call, problems, self.plan_table)
        if not self.plan_table.ready(problems.values(), call.deterministic, call.device):
            return None
        run = self._runs[call] = self._run_of(self.name, call, problems)
        when_there(self)
        if run.planned and self.activation == "none" and self.plan_table.traced and len(self.known) < MOST_CALLS:
            # Layers of equal plans share what is published, so that it has no layer's name.
            known = publish(self._run_of("", call, problems) if self.name else run)
            if known is not None and known not in self.known:
                self.known.append(known)
                self.plan_table.published.add(known.plans)
        return run

    def _run_of(self, name: str, call: LinearCall, problems: Mapping[str, GemmProblem]) -> LinearRun:
        """What runs a call whose plans are bound. A profiler shows its passes as those of a layer ``name``."""
        bound = {
            role: self.plan_table.bound(problem, call.deterministic, call.device) for role, problem in problems.items()
        }
        named = {role: None if found is None else found.named(name, role) for role, found in bound.items()}
        several = call.device.type == "cuda" and torch.cuda.device_count() > 1
        return LinearRun(call, named["forward"], named.get("grad_input"), named.get("grad_weight"), several)

    def use_native(self) -> None:
        """Run by native code what can be: it has come to be there."""
        self._entries.clear()
        self.latest = None

    def forget(self) -> None:
        """Forget all resolved calls, as the plan table's plans have changed."""
        self._runs.clear()
        self._entries.clear()
        self.known.clear()
        self.latest = None
        for inner in self._inner.values():
            inner.forget()


def _entry_of(
    run: Run | None, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, call: LinearCall | None = None
) -> Entry:
    """The entry of calls like this one, which ``run`` computes. Where torch does, addresses make no difference."""
    aligned = call is not None and run is not None and call.alignment == (ALIGNMENT, ALIGNMENT)
    asks = call is not None and call.device.type == "cuda" and call.dtype is torch.float32
    return Entry(
        run=run,
        guard=guard_of(x, w, b),
        has_bias=b is not None,
        grad=torch.is_grad_enabled(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        precision=call.precision if call is not None and asks else None,
        misaligned=ALIGNMENT - 1 if aligned else 0,
        autocast=autocast_dtype(x.device),
        device_type=x.device.type,
    )
