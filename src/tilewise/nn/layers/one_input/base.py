"""What layers without weights share whose call is one problem: those of one tensor, as pooling and normalization.

A call with gradients is one problem, forward and backward together, since a plan decides what is kept between.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tilewise.machine.recent import Recent
from tilewise.nn.layers.bound_pass import BoundPass
from tilewise.nn.layers.call import disturbed
from tilewise.nn.layers.kinds import Call, Layer, ModuleKind
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.swaps import copies_itself, swapped
from tilewise.nn.layers.weights import Weights
from tilewise.problems.base import Problem

__all__ = ["OneInputCall", "OneInputKind", "OneInputLayer", "Run"]

MOST_CALLS = 256
"""Kinds of call of which a layer remembers what runs them."""


@runtime_checkable
class OneInputCall(Call, Protocol):
    """One call: a frozen, hashable dataclass. ``problem`` is forward and backward where ``needs`` says so."""

    @property
    def problem(self) -> Any: ...
    @property
    def device(self) -> torch.device: ...


class Run(Protocol):
    """What runs one kind of call: a plan, or torch unless ``planned``."""

    @property
    def planned(self) -> bool: ...
    def __call__(self, x: Tensor) -> Tensor: ...


class OneInputLayer(abc.ABC):
    """Calls with plans in a table: ``layer(asked, x)`` is the result, or ``NotImplemented`` where it is torch's.

    ``asked`` has the attributes of torch's module. Copies of a module share the layer. It holds no tensor. ``name`` is
    the module's in its model, for a profiler to show.
    """

    def __init__(self, plan_table: PlanTable) -> None:
        self.plan_table, self.name = plan_table, ""
        self._runs: Recent[Any, Run] = Recent(MOST_CALLS)

    @abc.abstractmethod
    def described(self, asked: Any, x: object) -> OneInputCall | str:
        """The call of what is ``asked`` on ``x``, or why it is left to torch."""

    @abc.abstractmethod
    def made(self, call: Any, bound: BoundPass | None) -> Run | str:
        """What runs such a call by its bound plan, or by torch where that is ``None``; or why the plan cannot."""

    def seen(self, asked: Any, x: object) -> OneInputCall | str:
        """As :meth:`described`; an empty text while a transform or a mode watches what is called."""
        return "" if disturbed() else self.described(asked, x)

    def __call__(self, asked: Any, x: Any) -> Any:
        call = self.seen(asked, x)
        if isinstance(call, str):
            return NotImplemented
        run = self.resolve(call)
        return NotImplemented if run is None or not run.planned else run(x)

    def problems(self, call: OneInputCall) -> Mapping[str, Problem]:
        """The problem of a call. That of a call with gradients is the backward's as well: one plan runs both."""
        return {"forward": call.problem}

    def knows(self, call: OneInputCall) -> bool:
        """Whether such a call was resolved already."""
        return call in self._runs

    def resolve(self, call: OneInputCall) -> Run | None:
        """What runs such a call; ``None`` where it cannot be planned at this moment."""
        run = self._runs.get(call)
        if run is not None:
            return run
        problem = call.problem
        self.plan_table.new_inputs.note(self.name, call, self.problems(call), self.plan_table)
        if not self.plan_table.ready([problem], call.deterministic, call.device):
            return None
        found = self.made(call, self.plan_table.bound(problem, call.deterministic, call.device))
        if isinstance(found, str):
            self.plan_table.refuse(problem, call.deterministic, found)
            found = self.made(call, None)
        assert not isinstance(found, str)
        self._runs[call] = found
        return found

    def forget(self) -> None:
        """Forget all resolved calls, as the plan table's plans have changed."""
        self._runs.clear()


class OneInputKind(ModuleKind):
    """torch's own modules whose call is a function of one tensor. Classes derived from them may compute anything."""

    under_limits = False  # torch's own choice keeps more for its backward than most limits allow
    layer: ClassVar[type[OneInputLayer]]
    named = True

    @abc.abstractmethod
    def runs_torch(self, kind: type[nn.Module]) -> bool:
        """Whether modules of this class run torch's own code and function."""

    def special(self, module: Any) -> str:
        """Why a module of torch's own class is left to torch whatever it is called with; empty where it is not."""
        return ""

    def obstacle(self, module: nn.Module) -> str:
        """Why this module cannot be swapped: another class, or a forward or a function that is not torch's own."""
        kind = type(module)
        if kind not in self.classes:
            return f"is a {kind.__name__}, which may compute otherwise than the class it is derived from"
        if reason := self.special(module):
            return reason
        if not self.runs_torch(kind):
            return f"nn.{kind.__name__}.forward or the function of torch that it calls is not torch's own"
        if "forward" in module.__dict__ and swapped(module) is None:
            return "has a forward set on the instance"
        return copies_itself(module)

    def layers(self, plan_table: PlanTable, weights: Weights) -> OneInputLayer:
        """The layer of a module, which has no weights."""
        return self.layer(plan_table)

    def calls(
        self,
        module: Any,
        layers: OneInputLayer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        gradients_later: bool,
    ) -> tuple[list[tuple[Layer, Call]], str]:
        """The one call of a module, or why it is left to torch."""
        call: Any = layers.described(module, _argument(*args, **kwargs))
        if isinstance(call, str):
            return [], call
        return [(layers, replace(call, needs=(True,)) if gradients_later else call)], ""

    def forward(self, module: Any, layers: OneInputLayer) -> Callable[..., Any]:
        """The module's ``forward``, by plans where it still runs torch's own code."""
        classes, runs_torch = self.classes, self.runs_torch

        def forward(self: Any, input: Any) -> Any:
            kind = type(self)
            if not torch.compiler.is_dynamo_compiling() and kind in classes and runs_torch(kind):
                y = layers(self, input)
                if y is not NotImplemented:
                    return y
            return kind.forward(self, input)

        return forward


def _argument(input: Any) -> Any:
    """The argument of a forward."""
    return input
