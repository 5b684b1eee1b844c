"""Binding candidates. Where one has to be compiled for a GPU, later ones are compiled at the same time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tilewise import execute
from tilewise.kernels.building import workers
from tilewise.kernels.building.ahead import compiled_apart, side_by_side
from tilewise.kernels.building.kept import NotKept, kept_only, only_kept
from tilewise.machine.turns import beside, in_turns, pause
from tilewise.plan import Config, Plan
from tilewise.problems.base import Problem
from tilewise.problems.operands import Tensors

__all__ = ["Binder"]


@dataclass
class Binder:
    """Binds plans of ``problem`` to ``tensors``."""

    problem: Problem
    tensors: Tensors
    _ahead: dict[tuple[str, Config], execute.Bound] = field(default_factory=dict)
    """Bound plans that were compiled ahead and are still to be measured."""

    def bind(self, plan: Plan, later: Callable[[], Sequence[Plan]] | None = None) -> execute.Bound:
        """Bind ``plan``. Where that compiles kernels for a GPU, the plans that ``later`` gives are bound beside it.

        What fails beside it fails again when it is measured, and is lost there with its reason.
        """
        key = plan.solver, plan.config
        if key not in self._ahead and in_turns() and self.problem.device_type == "cuda":
            plans = [plan, *(() if later is None else later())]
            if only_kept():
                self._bind_kept(plans)
            else:
                self._bind_apart(plans)
            return self._ahead.pop(key, None) or self._bound(plan)
        if key not in self._ahead and self.problem.device_type == "cuda":
            try:
                with kept_only():
                    return self._bound(plan)
            except NotKept:
                if only_kept():
                    raise
                self._bind_side_by_side([plan, *(() if later is None else later())])
        return self._ahead.pop(key, None) or self._bound(plan)

    def lacking(self, plans: Sequence[Plan]) -> list[str]:
        """What workers would compile for ``plans``, each as far as it can be told now. Nothing is compiled here."""
        found: dict[str, None] = {}
        with beside():
            for plan in plans:
                pause()
                with contextlib.suppress(Exception), workers.collecting() as wanted:  # it fails again when measured
                    self._bound(plan)
                found |= dict.fromkeys(wanted)
        return list(found)

    def _bind_kept(self, plans: Sequence[Plan]) -> None:
        """Bind those of ``plans`` whose kernels are there, for :meth:`bind` to take them from, beside the program."""
        with beside():
            for plan in plans:
                pause()
                if (plan.solver, plan.config) not in self._ahead:
                    with contextlib.suppress(NotKept, Exception):  # said where it is measured
                        self._ahead[plan.solver, plan.config] = self._bound(plan)

    def _bind_apart(self, plans: Sequence[Plan]) -> None:
        """Bind several plans, for :meth:`bind` to take them from, while the program goes on beside their compiling."""

        def bind(plan: Plan) -> None:
            self._ahead[plan.solver, plan.config] = self._bound(plan)

        compiled_apart([functools.partial(bind, p) for p in plans if (p.solver, p.config) not in self._ahead])

    def _bind_side_by_side(self, plans: Sequence[Plan]) -> None:
        """Bind several plans at once, for :meth:`bind` to take them from."""

        def bind(plan: Plan) -> None:
            if (plan.solver, plan.config) not in self._ahead:
                self._ahead[plan.solver, plan.config] = self._bound(plan)

        side_by_side([functools.partial(bind, plan) for plan in plans], self.tensors.device)

    def _bound(self, plan: Plan) -> execute.Bound:
        return execute.bind(plan, self.problem, *self.tensors.all)
