"""The modules of one model that are planned: which they are, their recorded calls, their plans, and their report."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tilewise.nn.example_errors import explained
from tilewise.nn.layers.kinds import ModuleKind, is_planned, kind_of, offer_plans, run_by_plans
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.swaps import own_attributes, swap_back
from tilewise.nn.layers.weights import Weights
from tilewise.nn.memory.step_planner import Choices
from tilewise.nn.record import Recorded, record
from tilewise.nn.report import CallReport, LayerReport, passes_of
from tilewise.nn.step.modelled import Cost
from tilewise.problems.base import Problem

__all__ = ["PlannedModules", "workspaces_of"]

LEFT_OUT = "left out by filter_fn"
Filter = Callable[[str, nn.Module], bool]
Key = tuple[Problem, bool]
"""A problem, and torch's deterministic flag in its calls."""


class PlannedModules:
    """The modules of ``model`` of which there is a kind, which of them may be planned, and their recorded calls.

    ``plan_table`` holds the plans. Under a memory limit for a whole step a plan depends on the module as well as on the
    problem: ``separate`` then gives each module a plan table of its own, which follows ``plan_table``. ``filter_fn`` is
    the caller's choice of modules, ``None`` for all. Gradients are planned where ``weights`` change, as they do in
    training. ``scheduled`` has the kinds of problems of the schedule that is followed, ``None`` without one.
    ``elsewhere`` has the names of modules that run otherwise, with what is said of them.
    """

    def __init__(
        self,
        model: nn.Module,
        plan_table: PlanTable,
        weights: Weights,
        filter_fn: Filter | None = None,
        *,
        separate: bool = False,
        scheduled: Collection[str] | None = None,
        elsewhere: Mapping[str, str] | None = None,
    ) -> None:
        self.model, self.plan_table = model, plan_table
        self.training = weights is Weights.CHANGING
        self.modules = {name: module for name, module in model.named_modules() if kind_of(module)}
        limited = separate or plan_table.options.workspace is not None
        self.reasons = {
            name: (elsewhere or {}).get(name, "")
            or _why_left_out(name, module, filter_fn)
            or _why_not_now(module, limited, scheduled)
            for name, module in self.modules.items()
        }
        """Why a module is not to be planned, empty where it may be."""
        plan_table.left_out = tuple(
            name
            for name, module in self.modules.items()
            if self.reasons[name] == LEFT_OUT and isinstance(module, nn.Conv2d)
        )
        self.candidates = {name: module for name, module in self.modules.items() if not self.reasons[name]}
        self.plan_tables = {
            name: PlanTable(plan_table.options, plan_table.unplanned, plan_table.planner) if separate else plan_table
            for name in self.candidates
        }
        plan_table.new_inputs.kinds = {name: type(module).__name__ for name, module in self.candidates.items()}
        for table in self.plan_tables.values():
            table.new_inputs = plan_table.new_inputs
        self.calls: list[Recorded] = []
        """The different calls of the candidates on the examples, in the order in which they ran."""
        self._layers = {
            name: _kind(module).layers(self.plan_tables[name], weights) for name, module in self.candidates.items()
        }
        for name, layers in self._layers.items():
            if _kind(self.candidates[name]).named:
                layers.name = name  # type: ignore[attr-defined]
        self._left: dict[str, str] = {}
        self._all_torchs = False
        """Whether all plans were taken back: then no module has a way of its own either."""

    def record(self, examples: Sequence[object]) -> None:
        """Run the model on each example and record the calls of its candidates.

        Raises what the model raises, with a note of what it was given, as :func:`explained` does.
        """
        recorded = []
        for number, example in enumerate(examples):
            with explained(self.model, examples, number):
                recorded.append(
                    record(self.model, self.candidates, example, self._layers, training=self.training, left=self._left)
                )
        self.calls = list(dict.fromkeys(call for calls in recorded for call in calls))
        self.plan_table.uses = {problem: len(names) for problem, names in self.names().items()}

    def problems(self) -> list[Problem]:
        """The problems of the recorded calls, one for every pass of each call."""
        return [problem for call in self.calls for problem in call.problems(self.training).values()]

    def problems_of(self, name: str) -> list[Problem]:
        """The problems of the recorded calls of one module."""
        return [problem for call in self._calls_of(name) for problem in call.problems(self.training).values()]

    def names(self) -> dict[Problem, list[str]]:
        """The names of the layers that have each problem, one name for every call."""
        names: dict[Problem, list[str]] = {}
        for call in self.calls:
            every = [call.name, *(f"{call.name} (call {n})" for n in range(2, call.times + 1))]
            for problem in call.problems(self.training).values():
                names.setdefault(problem, []).extend(every)
        return names

    def install(self, choices: Choices) -> None:
        """Let every candidate run by the plans of ``choices``, or by those of the plan table where it names none.

        A module of which no pass gains computes as torch does.
        """
        for name in self.candidates:
            plan_table = self.plan_tables[name]
            if plan_table is not self.plan_table:
                plan_table.follow(self.plan_table, {key[1:]: plan for key, plan in choices.items() if key[0] == name})
                self._layers[name].forget()
            self.change_over(name)

    def change_over(self, name: str) -> None:
        """Let one candidate run by the plans in its table. Where no pass gains, it computes as torch does.

        Where it runs by plans already, what ran its calls is looked up anew.
        """
        module = self.candidates[name]
        if is_planned(module):
            self._layers[name].forget()
        swap_back(module)
        if self._gains(name) and "forward" not in module.__dict__:  # one that others have set meanwhile stays
            run_by_plans(module, self._layers[name])
        else:
            offer_plans(module, self._layers[name])

    def leave(self, name: str, reason: str) -> None:
        """Let one candidate compute as torch does, for ``reason``."""
        swap_back(self.candidates[name])
        offer_plans(self.candidates[name], self._layers[name])
        self.reasons[name] = reason

    def gains(self) -> dict[Key, float]:
        """The milliseconds that a step gains by each problem that runs by plan, as measured for its passes alone.

        ``nan`` where torch's time or the plan's is not known: the plan was not chosen by time.
        """
        gains: dict[Key, float] = {}
        self.plan_table.torch_times(self.problems())
        for recorded in self.calls:
            deterministic = recorded.call.deterministic
            for problem in recorded.problems(self.training).values():
                plan = self.plan_tables[recorded.name].replacement(problem, deterministic)
                if plan is not None and is_planned(self.candidates[recorded.name]):
                    torch_ms = self.plan_table.times.get(problem, math.nan)
                    gain = recorded.times * (torch_ms - plan.time_ms)
                    gains[problem, deterministic] = gains.get((problem, deterministic), 0.0) + gain
        return gains

    def keys_of_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Key], list[Key]]:
        """The problems of a call of one candidate as it is made now: those of its forward, and of its gradients."""
        module, layers = self.candidates[name], self._layers[name]
        later = self.training and not torch.is_grad_enabled()
        forward: list[Key] = []
        gradients: list[Key] = []
        for layer, call in _kind(module).calls(module, layers, args, kwargs, gradients_later=later)[0]:
            for role, problem in Recorded(name, layer, call).problems(self.training).items():
                (forward if role == "forward" else gradients).append((problem, call.deterministic))
        return forward, gradients

    def costs(self) -> dict[Key, Cost]:
        """What each plan that runs takes more than torch's choice in one call. The host's part is 0 where unknown."""
        costs: dict[Key, Cost] = {}
        for problem, deterministic in self.gains():
            plan = self.plan_table.replacement(problem, deterministic)
            torch_host_ms = self.plan_table.host_times.get(problem)
            if plan is not None:
                known = plan.host_ms is not None and torch_host_ms is not None
                host_ms = plan.host_ms - torch_host_ms if known else 0.0  # type: ignore[operator]
                device_ms = plan.time_ms - self.plan_table.times.get(problem, math.nan)
                costs[problem, deterministic] = Cost(host_ms, device_ms)
        return costs

    def withhold(self, keys: Collection[Key], note: str) -> None:
        """Let torch compute these problems although they have plans, and no others; ``note`` says why in reports."""
        self.plan_table.withhold(keys, note)
        for layers in self._layers.values():
            layers.forget()
        self._all_torchs = bool(keys) and not any(
            self.plan_tables[recorded.name].replacement(problem, recorded.call.deterministic)
            for recorded in self.calls
            for problem in recorded.problems(self.training).values()
        )
        self.install({})

    def switches(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Two functions: one lets all candidates compute as torch does, the other as they do now."""
        attributes = {name: own_attributes(module) for name, module in self.candidates.items()}

        def by_torch() -> None:
            """Let every candidate compute as its class does."""
            for module in self.candidates.values():
                swap_back(module)

        def by_plans() -> None:
            """Let every candidate compute as it did."""
            for name, module in self.candidates.items():
                if "forward" in attributes[name] and "forward" not in module.__dict__:
                    module.__dict__.update(attributes[name])  # the same objects: captures are told apart by them

        return by_torch, by_plans

    def _gains(self, name: str) -> bool:
        """Whether a plan beats torch on any pass of the module. If so, all its passes are bound now, ready for use.

        A kind may have a way of its own where no plan does.
        """
        plan_table, runners = self.plan_tables[name], []
        own = _kind(self.candidates[name]).in_its_own_way and not self._all_torchs
        for recorded in self._calls_of(name):
            problems = set(recorded.problems(self.training).values())
            if own or any(plan_table.replacement(problem, recorded.call.deterministic) for problem in problems):
                kinds = recorded.kinds(self.training)  # those with other problems are planned when they come
                known = [call for call in kinds if problems.issuperset(recorded.layer.problems(call).values())]
                runners += [recorded.layer.resolve(call) for call in known]
        return any(runner is not None and runner.planned for runner in runners)

    def report(self) -> tuple[LayerReport, ...]:
        """The report of every module that is of a kind."""
        return tuple(self._report(name) for name in self.modules)

    def _report(self, name: str) -> LayerReport:
        """The report of one module, with the reason where nothing was planned for it."""
        module, plan_table = self.modules[name], self.plan_tables.get(name, self.plan_table)
        calls = tuple(self._call_report(recorded, module, plan_table) for recorded in self._calls_of(name))
        reason = self.reasons[name]
        if not reason and not any(call.passes for call in calls):
            unseen = self._left.get(name, "") or "not called with tensors that can be planned"
            reason = "not a call that can be planned" if calls else unseen
        return LayerReport(name, type(module).__name__, calls, reason)

    def _call_report(self, recorded: Recorded, module: nn.Module, plan_table: PlanTable) -> CallReport:
        """The report of one recorded call, pass by pass."""
        problems = recorded.problems(self.training)
        passes = passes_of(problems, plan_table, recorded.call.deterministic, planned=is_planned(module))
        return CallReport(recorded.call.shape, passes)

    def _calls_of(self, name: str) -> list[Recorded]:
        """The recorded calls of one module."""
        return [recorded for recorded in self.calls if recorded.name == name]


def workspaces_of(layers: Sequence[LayerReport]) -> Mapping[str, int]:
    """The largest workspace in bytes of each layer's plans."""
    most: dict[str, int] = {}
    for layer in layers:
        for pass_report in layer.passes():
            most[layer.name] = max(
                most.get(layer.name, 0), 0 if pass_report.plan is None else pass_report.plan.workspace
            )
    return most


def _why_left_out(name: str, module: nn.Module, filter_fn: Filter | None) -> str:
    """Why a module is not planned; empty where it may be."""
    if filter_fn is not None and not filter_fn(name, module):
        return LEFT_OUT
    return _kind(module).obstacle(module)


def _why_not_now(module: nn.Module, limited: bool, scheduled: Collection[str] | None) -> str:
    """Why modules of this kind are not planned under these options; empty where they are."""
    kind = _kind(module)
    if limited and not kind.under_limits:
        return "is planned without memory limits alone"
    if scheduled is not None and kind.problems and kind.problems not in scheduled:
        return "the schedule has none of its kind"
    return ""


def _kind(module: nn.Module) -> ModuleKind:
    """The kind of a module that has one."""
    kind = kind_of(module)
    assert kind is not None
    return kind
