"""A linear layer's table from calls to what runs them, with a short check for a call like the one before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from tilewise.machine.device import matmul_precision
from tilewise.machine.recent import Recent
from tilewise.nn.layers.call import disturbed, function_mode_watches, is_plain
from tilewise.nn.layers.layer import guard_of
from tilewise.nn.layers.linear.call import LinearCall, describe, problems_of
from tilewise.nn.layers.linear.run import LinearRun
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.problems.gemm.problem import GemmProblem

__all__ = ["Entry", "LinearLayer"]

MOST_CALLS = 128
"""Kinds of call of which a layer remembers what runs them."""


@dataclass(slots=True)
class Entry:
    """A kind of call and what runs it, ``None`` for torch. ``guard`` is that of the tensors."""

    run: LinearRun | None
    guard: Callable[..., bool]
    has_bias: bool
    grad: bool
    deterministic: bool
    precision: str | None

    def is_like(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> bool:
        """Whether a call is of this kind, as torch is set now."""
        return (
            (self.guard(x, w, b) if self.has_bias else b is None and self.guard(x, w))
            and torch.is_grad_enabled() is self.grad
            and torch._C._get_deterministic_algorithms() is self.deterministic
            and forward_ad._current_level < 0
            and (self.precision is None or matmul_precision() == self.precision)
            and not (torch._C._is_torch_function_mode_enabled() and function_mode_watches())
        )


class LinearLayer:
    """Linear layers with plans in one table: ``layer(x, w, b)`` is the result, or ``NotImplemented`` for torch's.

    Copies of a module share it. It holds no tensor.
    """

    __slots__ = ("__weakref__", "_entries", "_runs", "latest", "plan_table")

    def __init__(self, plan_table: PlanTable) -> None:
        self.plan_table = plan_table
        self._runs: Recent[LinearCall, LinearRun] = Recent(MOST_CALLS)
        self._entries: Recent[LinearCall, Entry] = Recent(MOST_CALLS)
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
        call = None if torch.compiler.is_compiling() or disturbed() else describe(x, w, b)
        if call is None:
            self.leave(x, w, b)
            return left(x, w, b)
        return self._entry(call, x, w, b)

    def leave(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> None:
        """Take note of a call that is left to torch. Nothing is done here; subclasses may."""

    def _entry(self, call: LinearCall, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Entry | None:
        """The entry of a call; ``None`` where it cannot be planned at this moment."""
        entry = self._entries.get(call)
        if entry is not None and entry.is_like(x, w, b):
            return entry
        run = self.resolve(call)
        if run is None:
            return None
        entry = self._entries[call] = Entry(
            run=run if run.planned else None,
            guard=guard_of(x, w, b),
            has_bias=b is not None,
            grad=torch.is_grad_enabled(),
            deterministic=call.deterministic,
            precision=call.precision if x.device.type == "cuda" and x.dtype is torch.float32 else None,
        )
        return entry

    def problems(self, call: LinearCall) -> dict[str, GemmProblem]:
        """The products of a call by the name of the pass."""
        return problems_of(call)

    def resolve(self, call: LinearCall) -> LinearRun | None:
        """What runs such a call; ``None`` where it cannot be planned at this moment."""
        run = self._runs.get(call)
        if run is not None:
            return run
        problems = problems_of(call)
        if not self.plan_table.ready(problems.values(), call.deterministic, call.device):
            return None
        bound = {
            role: self.plan_table.bound(problem, call.deterministic, call.device) for role, problem in problems.items()
        }
        several = call.device.type == "cuda" and torch.cuda.device_count() > 1
        run = LinearRun(call, bound["forward"], bound.get("grad_input"), bound.get("grad_weight"), several)
        self._runs[call] = run
        return run

    def forget(self) -> None:
        """Forget all resolved calls, as the plan table's plans have changed."""
        self._runs.clear()
        self._entries.clear()
        self.latest = None


def left(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Entry | None:
    """The entry of calls left to torch for what their tensors are, which need not be asked again; else ``None``."""
    tensors = (x, w) if b is None else (x, w, b)
    if torch.compiler.is_compiling() or disturbed() or not all(is_plain(t) for t in tensors):
        return None
    return Entry(
        run=None,
        guard=guard_of(x, w, b),
        has_bias=b is not None,
        grad=torch.is_grad_enabled(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        precision=None,
    )
