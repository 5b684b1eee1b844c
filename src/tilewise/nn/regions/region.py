"""Planning one region: from a trace to a program with the chosen plans, formats and constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx

from tilewise.nn.layers.weights import Weights
from tilewise.nn.regions.build import Builder
from tilewise.nn.regions.constants import Constants
from tilewise.nn.regions.layouts import Choice, Part, Way, choose_ways
from tilewise.nn.regions.products import products_of
from tilewise.nn.regions.program import Program
from tilewise.nn.regions.rewrite import constants_of, rewrite
from tilewise.nn.regions.trace import Traced, Untraceable
from tilewise.nn.regions.units import PRODUCT, VIEW, Strides, Unit, formats, normal, units_of, value_of
from tilewise.nn.regions.ways import Planned, Times, ways_of
from tilewise.plan import Plan
from tilewise.problems.base import Problem, layout_of

__all__ = ["Line", "PlanAll", "Planning", "plan_region"]

PlanAll = Callable[[Sequence[Problem]], Mapping[Problem, Plan]]
"""Gives plans of problems; those that no solver can compute are left out."""


@dataclass(frozen=True)
class Line:
    """One part of a region for reports: the layer or operator, what runs it, the layout that it gives, and its time."""

    name: str
    runs: str
    layout: str
    ms: float
    problem: Problem | None = None
    plan: Plan | None = None


@dataclass(frozen=True)
class Planning:
    """A planned region: its program and constants, and what there is to tell of it."""

    program: Program
    constants: Constants
    lines: tuple[Line, ...]
    fused: int
    conversions: int
    ms: float
    optimal: bool
    layouts: Mapping[str, int] = field(default_factory=dict)


def plan_region(
    traced: Traced, tensors: Sequence[Tensor], plan_all: PlanAll, times: Times, weights: Weights
) -> Planning:
    """Plan what was traced for inputs that lie as ``tensors`` do. ``traced`` is rewritten in place.

    Raises :class:`Untraceable` where a part cannot be a step, or nothing is planned.
    """
    fused = rewrite(traced.graph)
    units = units_of(traced.graph, traced.names)
    problems = [product.problem for unit in units if unit.kind == PRODUCT for product in products_of(unit)]
    if not problems:
        raise Untraceable("has no convolution or linear layer that can be planned")
    plans = plan_all(list(dict.fromkeys(problems)))
    region = _Region(traced, tensors, units)
    region.find_ways(times, plans)
    choice = region.choose(times)
    return region.built(choice, weights, fused)


class _Region:
    """A region while it is planned."""

    def __init__(self, traced: Traced, tensors: Sequence[Tensor], units: Sequence[Unit]) -> None:
        self._traced, self._tensors, self._units = traced, tensors, units
        self._constant = constants_of(traced.graph)
        self._given = [node for node in traced.graph.nodes if node.op == "placeholder"]
        (output,) = (node for node in traced.graph.nodes if node.op == "output")
        self._results = [(node, _format(node)) for node in output.args[0]]
        self._ways: list[tuple[Way, ...]] = []

    def find_ways(self, times: Times, plans: Mapping[Problem, Plan]) -> None:
        """Find the ways of each part in order, since its formats are those in which its inputs may come."""
        known: dict[fx.Node, set[Strides]] = {}
        for node in self._constant:
            value = node.meta.get("val")
            known[node] = {()} if value is None else {tuple(value.stride())}
        for node, tensor in zip(self._given, self._tensors, strict=True):
            known[node] = {normal(tensor.shape, tensor.stride()), *formats(tensor.shape)}
        for unit in self._units:
            ways = ways_of(unit, known, times, plans)
            self._ways.append(ways)
            known[unit.node] = {way.gives for way in ways} | set(formats(unit.value.shape))

    def choose(self, times: Times) -> Choice:
        """The ways with the least time together."""
        given = {
            node: normal(tensor.shape, tensor.stride()) for node, tensor in zip(self._given, self._tensors, strict=True)
        }
        parts = []
        for unit, ways in zip(self._units, self._ways, strict=True):
            reads = [index for index, node in enumerate(unit.inputs) if node not in self._constant]
            parts.append(
                Part(
                    tuple(unit.inputs[index] for index in reads),
                    unit.node,
                    tuple(Way(tuple(way.reads[i] for i in reads), way.gives, way.ms) for way in ways),
                )
            )
        for number, (node, strides) in enumerate(self._results):
            parts.append(Part((node,), ("result", number), (Way((strides,), strides, 0.0),)))
        return choose_ways(parts, given, lambda node: times.conversion(value_of(node)))  # type: ignore[arg-type]

    def built(self, choice: Choice, weights: Weights, fused: int) -> Planning:
        """The program of a choice."""
        constants = Constants(self._traced.sources, weights)
        builder = Builder(constants)
        for node, tensor in zip(self._given, self._tensors, strict=True):
            builder.give(node, tensor)
        lines = []
        for unit, ways, index in zip(self._units, self._ways, choice.ways, strict=False):
            builder.add(unit, ways[index], self._constant)
            if unit.kind != VIEW:
                lines.append(_line(unit, ways[index]))
        program = builder.finish(self._results)
        constants.settle()
        program.use_native()  # where it cannot, it runs step by step from Python and says why
        layouts: dict[str, int] = {}
        for line in lines:
            layouts[line.layout] = layouts.get(line.layout, 0) + 1
        return Planning(
            program, constants, tuple(lines), fused, builder.conversions, choice.ms, choice.optimal, layouts
        )


def _format(node: fx.Node) -> Strides:
    """The format in which a result was traced."""
    value = value_of(node)
    return normal(value.shape, value.stride())


def _line(unit: Unit, way: Way) -> Line:
    """What is told of one part."""
    layout = layout_of(unit.value.shape, way.gives)
    if isinstance(way.what, Planned):
        plan, problem = way.what.plan, way.what.product.problem
        return Line(unit.name, f"{plan.solver}: {problem.key}", layout, way.ms, problem, plan)
    return Line(unit.name, str(unit.overload or unit.node.name), layout, way.ms)
