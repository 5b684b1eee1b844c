"""A pass over a graph that Inductor has frozen: each convolution runs by plan where that is faster with its epilogue.

Both sides are timed with bias, residual and activation, on tensors as they lie in Inductor's graph, so that no layer
loses what Inductor would have fused. Within a graph, caches hold a part of what a layer reads. So a plan must be faster
over cold caches and over warm ones, twice. Where oneDNN is as fast, the graph is left as it was.
"""

from __future__ import annotations

import functools
import statistics
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph

from tilewise.machine.torch_state import undisturbed
from tilewise.nn.layers.inductor.matches import Match, matches
from tilewise.nn.layers.inductor.operator import publish
from tilewise.nn.layers.inductor.pointwise import as_onednn_calls_it
from tilewise.nn.layers.inductor.settings import after, each_pass, settings_of
from tilewise.nn.layers.plan_table import PlanTable, planning, table_of
from tilewise.planner.measuring.times import Timer, interleaved
from tilewise.problems.base import Problem, dense_strides
from tilewise.problems.operands import make_bias, make_operands, make_residual

__all__ = ["FACT", "FrozenPass", "install"]

MARGIN = 0.95
"""A convolution runs by plan where that takes less than this share of what oneDNN takes with the same epilogue, over
cold caches and over warm ones."""
TIMES = 2
"""A plan must win so many times in a row: of dozens of layers that are even, some win once by chance."""
BUDGET_MS, LEAST, MOST = 100.0, 5, 15
"""Milliseconds for timing one problem, and the least and most rounds."""
FACT = "fused"
"""The name under which the report tells how many convolutions were matched and how many run by plan."""
SETTING = "post_grad_custom_pre_pass"
"""Inductor's setting for passes after freezing, before it fuses what follows a convolution into oneDNN's call."""

_tables: weakref.WeakKeyDictionary[PlanTable, PlanTable] = weakref.WeakKeyDictionary()
"""For each model's plan table one for what is planned here, so that its reports and schedules stay the model's."""


def install(compiler: Any, number: int) -> bool:
    """Have ``compiler``, a backend as Dynamo holds it, run the pass for the plan table ``number``.

    Passes that the user has set run before it. Returns whether the backend takes passes; a graph of another is left
    as it is.
    """
    settings = settings_of(compiler)
    if settings is None:
        return False
    before = after(settings, SETTING)
    if isinstance(before, FrozenPass):
        before = before.before
    settings[SETTING] = FrozenPass(number, before)
    return True


class FrozenPass:
    """What Inductor calls with a graph: first the passes ``before`` that the user has set, then this one."""

    def __init__(self, number: int, before: Any) -> None:
        self.number, self.before = number, before

    def uuid(self) -> None:
        """No name: a graph with plans of this process is in no cache on disk."""
        return

    def __call__(self, graph: Graph, is_inference: bool = True) -> None:
        for each in each_pass(self.before):
            takes_more = any(kind.__name__ == "CustomInferenceAwareGraphPass" for kind in type(each).__mro__)
            each(graph, is_inference) if takes_more else each(graph)
        table = table_of(self.number)
        if table is not None and not torch.is_grad_enabled():
            replace_faster(graph, table)


def replace_faster(graph: Graph, table: PlanTable) -> None:
    """Replace the convolutions of ``graph`` that a plan runs faster, under the options of ``table``.

    By now no node says reliably of which module it is. So where the caller's ``filter_fn`` leaves out a convolution,
    all stay Inductor's, and the report says why.
    """
    found = list(matches(graph))
    if table.left_out:
        reason = f"filter_fn leaves out {table.left_out[0]!r}, and convolutions in a frozen graph have no names"
        table.facts[FACT] = {"matched": len(found), "by_plan": 0, "reason": reason}
        return
    deterministic = torch.are_deterministic_algorithms_enabled()
    own = _tables.get(table)
    if own is None:
        own = _tables[table] = PlanTable(table.options, "plan", table.planner)
    names: dict[Problem, str | None] = {}
    with torch.utils._python_dispatch._disable_current_modes(), planning(), undisturbed(), torch.no_grad():
        own.plan([match.problem for match in found], deterministic)
        for match in found:
            if match.problem not in names:
                names[match.problem] = _faster(match, own, deterministic)
    kept = [match for match in found if names[match.problem] is not None]
    for match in kept:
        _replace(graph, match, names[match.problem])
    table.facts[FACT] = {"matched": len(found), "by_plan": len(kept)}


def _faster(match: Match, table: PlanTable, deterministic: bool) -> str | None:
    """The name of the published plan; ``None`` where oneDNN is as fast, or no plan could be bound."""
    problem, device = match.problem, torch.device("cpu")
    if not table.ready([problem], deterministic, device):
        return None
    bound = table.bound(problem, deterministic, device)
    name = None if bound is None else publish(bound)
    if name is None:
        return None
    (x, _), bias, residual = make_operands(problem), make_bias(problem), make_residual(problem)
    ours = functools.partial(torch.ops.tilewise.fused_conv, x, match.weight, bias, residual, name)
    calls: list[Callable[[], object]] = [ours, _by_onednn(match, x, bias, residual)]
    return name if all(_wins(calls, device) for _ in range(TIMES)) else None


def _wins(calls: Sequence[Callable[[], object]], device: torch.device) -> bool:
    """Whether the first of two calls is surely faster, over cold caches and over warm ones."""
    cold = interleaved(calls, device, budget_ms=BUDGET_MS, least=LEAST, most=MOST)
    return all(ours_ms < MARGIN * theirs_ms for ours_ms, theirs_ms in (cold, _warm(calls, device)))


def _warm(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Median milliseconds of each call when it has just run, in turns."""
    timer = Timer(device)
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(MOST):
        for call, into in zip(calls, taken, strict=True):
            call()
            into.append(timer.time_ms(call))
    return [statistics.median(each) for each in taken]


def _by_onednn(
    match: Match, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> Callable[[], object]:
    """The same by oneDNN as Inductor would call it; a residual is added in its place."""
    operation, numbers, algorithm = as_onednn_calls_it(match.problem.activation)
    if residual is None:
        return functools.partial(
            torch.ops.mkldnn._convolution_pointwise.default, x, match.packed, bias, *match.options,
            operation, numbers, algorithm,
        )  # fmt: skip
    after = None if operation == "none" else operation
    return functools.partial(
        torch.ops.mkldnn._convolution_pointwise_.binary, residual.clone(), x, match.packed, bias, *match.options,
        "add", 1.0, after, [], None,
    )  # fmt: skip


def _replace(graph: Graph, match: Match, name: str | None) -> None:
    """Put the operator in the place of the match's nodes."""
    module, attribute = graph.owning_module, f"_tilewise_{match.first.name}"
    assert module is not None
    module.register_buffer(attribute, match.weight, persistent=False)
    with graph.inserting_before(match.last):
        weight = graph.get_attr(attribute)
        weight.meta["val"] = _described(match.x, match.weight)
        node = graph.call_function(
            torch.ops.tilewise.fused_conv.default, (match.x, weight, match.bias, match.residual, name)
        )
    node.meta.update(match.last.meta)
    value = match.last.meta["val"]
    strides = dense_strides(tuple(value.shape), match.problem.layout("y"))
    node.meta["val"] = value.new_empty_strided(tuple(value.shape), strides)
    match.last.replace_all_uses_with(node)
    graph.eliminate_dead_code()


def _described(like: torch.fx.Node, t: torch.Tensor) -> torch.Tensor:
    """``t`` without its memory, as the graph describes its values."""
    value: torch.Tensor = like.meta["val"]
    return value.new_empty_strided(tuple(t.shape), t.stride())
