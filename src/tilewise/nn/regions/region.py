"""Planning one region: from a trace to a program with the chosen plans, formats and constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor, fx

from tilewise.machine.turns import pause
from tilewise.nn.layers.weights import Weights
from tilewise.nn.programs.program import Program, where_expected
from tilewise.nn.progress import Late, showing
from tilewise.nn.regions.build import Builder
from tilewise.nn.regions.constants import Constants
from tilewise.nn.regions.exactness.gains import gains_of
from tilewise.nn.regions.exactness.limits import Limits
from tilewise.nn.regions.exactness.local import local_errors
from tilewise.nn.regions.gates import pooling_products
from tilewise.nn.regions.in_place import plain_ways, steps_in_place, timed_in_place
from tilewise.nn.regions.layouts import Choice, Part, Way, choose_ways
from tilewise.nn.regions.operators import constants_of, tensor_of
from tilewise.nn.regions.products import products_of
from tilewise.nn.regions.rewrite import rewrite
from tilewise.nn.regions.together.blocks import Block, blocks_of, with_blocks
from tilewise.nn.regions.together.gated import Gated, gated_of, with_gated
from tilewise.nn.regions.trace import Traced, Untraceable
from tilewise.nn.regions.units import PRODUCT, VIEW, Strides, Unit, formats, normal, units_of, value_of
from tilewise.nn.regions.ways import Deferred, OnFilter, Planned, Times, ways_of
from tilewise.plan import Plan
from tilewise.problems.base import Problem, layout_of

__all__ = ["Line", "Planning", "Plans", "plan_region"]


class Plans(Protocol):
    """What a region asks of planning."""

    def all(self, problems: Sequence[Problem]) -> Mapping[Problem, Sequence[Plan]]:
        """Plans of problems, the best first; those that no solver can compute are left out."""
        ...

    def some(self, problems: Sequence[Problem]) -> Mapping[Problem, Sequence[Plan]]:
        """As :meth:`all`, without those that the limits leave without a plan."""
        ...

    def error(self, problem: Problem, plan: Plan) -> float | None:
        """The relative L2 error of a plan, which is checked; ``None`` where it must not be used."""
        ...

    def kinds(self, problem: Problem) -> Sequence[Plan]:
        """The fastest measured plan of each kind, fastest first. Plans of one kind have similar errors."""
        ...

    def running(self, problem: Problem, plans: Sequence[Plan]) -> Sequence[Plan]:
        """What ``plans`` of another problem run, as plans of ``problem``, which are not measured: their times stay."""
        ...


Judge = Callable[[Program], float]
"""The error of a whole program, as a multiple of what is allowed."""


MOST_ROUNDS, MOST_JUDGED = 16, 7
"""How often plans give way to others that are more exact, or again less; how many programs are run for it."""
ENOUGH = 0.93
"""The share of what is allowed above which the error of the whole is near enough to it."""
SLOWEST = 4.0
"""For a product whose error counts, plans of other kinds are looked at that take up to so many times as long."""
COUNTS = 0.02
"""The share of an even part of all squares from which on a product's error counts."""


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
    traced: Traced,
    tensors: Sequence[Tensor],
    source: Plans,
    judge: Judge,
    times: Times,
    weights: Weights,
    tell: Late | None = None,
) -> Planning:
    """Plan what was traced for inputs that lie as ``tensors`` do. ``traced`` is rewritten in place.

    On a CPU, where a product has several plans, or several layouts, all are timed in their place in the whole region.
    Where the errors of all together are too large, more exact plans are asked for, and the sum of the squares of the
    plans' own errors gets a limit: errors of layers add up as independent ones do. Within it the fastest are chosen,
    and so on until the whole is exact enough. ``tell`` shows how far the timing is.

    Raises :class:`Untraceable` where a part cannot be a step, or nothing is planned.
    """
    fused = rewrite(traced.graph)
    units = units_of(traced.graph, traced.names)
    problems = [product.problem for unit in units if unit.kind == PRODUCT for product in products_of(unit)]
    if not problems:
        raise Untraceable("has no convolution or linear layer that can be planned")
    plans = source.all(list(dict.fromkeys(problems)))
    blocks, gates = blocks_of(units), gated_of(units)
    region = _Region(traced, tensors, units, weights)
    poolings = [product.problem for unit in units for product in pooling_products(unit)]
    plans = {**plans, **source.some(poolings)}
    together = dict(source.some([block.product.problem for block in blocks]))
    if times.device.type == "cpu":  # where they are timed in their place
        together |= {
            each.product.problem: source.running(each.product.problem, plans.get(each.kept, ())) for each in gates
        }
    region.find_ways(times, plans, blocks, gates, together)
    if times.device.type == "cpu":  # a GPU's caches hold little from one layer to the next
        with showing(tell):
            region.time_in_place(times, tell)
    chosen = _exact_enough(region, source, judge, lambda choice: region.planned(choice, fused), times, tell)
    chosen.program.use_native()  # where it cannot, it runs step by step from Python and says why
    return chosen


def _exact_enough(
    region: _Region,
    source: Plans,
    judge: Judge,
    planned: Callable[[Choice], Planning],
    times: Times,
    tell: Late | None,
) -> Planning:
    """The fastest choice whose whole is exact enough; where none is found, that with the least error times time.

    The squares of the plans' errors get a lower limit until the whole is exact enough, and then a higher one again,
    between what was enough and what was not.
    """
    most, limits = math.inf, Limits()
    best: tuple[Choice, Planning] | None = None
    tried: list[tuple[float, Planning]] = []
    last: tuple[int, ...] = ()
    for rounds in range(MOST_ROUNDS):
        choice = region.choose(times, most=most)
        while region.settle(choice, source):
            choice = region.choose(times, most=most)
        if choice.ways == last and best is None:  # no plans are more exact
            break
        if best is not None and choice.ways == best[0].ways:
            limits.allowed = max(limits.allowed, most)
        elif choice.ways == last:
            limits.refused = min(limits.refused, most)
        else:
            found, last = planned(choice), choice.ways
            excess = judge(found.program)
            tried.append((excess * choice.ms, found))
            if excess > 1.0 and not rounds:
                region.learn_errors(choice, source, times, tell)
            squares = region.squares(choice)
            limits.note(squares, excess)
            if excess <= 1.0 and (best is None or choice.ms < best[0].ms):
                best = choice, found
            if not squares or (excess <= 1.0 and (not rounds or excess > ENOUGH)):
                break
        if limits.empty or len(limits.tried) == MOST_JUDGED:
            break
        most = limits.next()
    return min(tried, key=lambda each: each[0])[1] if best is None else best[1]


class _Region:
    """A region while it is planned."""

    def __init__(self, traced: Traced, tensors: Sequence[Tensor], units: Sequence[Unit], weights: Weights) -> None:
        self._traced, self._tensors, self._units, self._weights = traced, tensors, units, weights
        self._constant = constants_of(traced.graph)
        self._given = [node for node in traced.graph.nodes if node.op == "placeholder"]
        (output,) = (node for node in traced.graph.nodes if node.op == "output")
        self._results = [(node, _format(node)) for node in output.args[0]]
        self._ways: list[tuple[Way, ...]] = []
        self._gains = [1.0] * len(units)

    def find_ways(
        self,
        times: Times,
        plans: Mapping[Problem, Sequence[Plan]],
        blocks: Sequence[Block],
        gates: Sequence[Gated],
        together: Mapping[Problem, Sequence[Plan]],
    ) -> None:
        """Find the ways of each part in order, since its formats are those in which its inputs may come.

        ``together`` are the plans of ``blocks`` and of ``gates``, which compute several parts.
        """
        known: dict[fx.Node, set[Strides]] = {}
        for node in self._constant:
            value = tensor_of(node)  # none of what gives several, as the norm of a weight does
            known[node] = {()} if value is None else {tuple(value.stride())}
        for node, tensor in zip(self._given, self._tensors, strict=True):
            known[node] = {normal(tensor.shape, tensor.stride()), *formats(tensor.shape)}
        for unit in self._units:
            ways = ways_of(unit, known, times, plans)
            self._ways.append(ways)
            known[unit.node] = {way.gives for way in ways} | set(formats(unit.value.shape))
        self._ways = with_blocks(self._units, self._ways, blocks, together)
        self._ways = with_gated(self._units, self._ways, gates, together, times)

    def time_in_place(self, times: Times, tell: Late | None) -> None:
        """Give ways the times that they take within the whole region."""
        tensors = where_expected(self._tensors)

        def built(allowed: Sequence[Sequence[int]]) -> tuple[Program, Sequence[int], Sequence[int]]:
            choice = self.choose(times, allowed)
            builder, steps = self._built(choice, Constants(self._traced.sources, self._weights))
            program = builder.finish(self._results)
            program.use_native(checked=False)  # what is chosen is checked
            return program, choice.ways, steps

        self._ways = timed_in_place(self._units, self._ways, tensors, built, tell)

    def settle(self, choice: Choice, source: Plans) -> bool:
        """Take away the ways of a choice whose plans must not be used, and note the errors of others.

        The last way of a part stays. Returns whether anything changed, so that another choice may be better.
        """
        changed = False
        for part, index in enumerate(choice.ways):
            ways = self._ways[part]
            way = ways[index]
            if not isinstance(way.what, Planned):
                continue
            error = source.error(way.what.product.problem, way.what.plan)
            if error is None and len(ways) == 1:
                continue
            known = () if error is None else (replace(way, error=error),)
            if known != (way,):
                self._ways[part] = (*ways[:index], *known, *ways[index + 1 :])
                changed = True
        return changed

    def learn_errors(self, choice: Choice, source: Plans, times: Times, tell: Late | None) -> None:
        """Find out how errors grow, and what plans err in their place; add plans where the errors of a choice count."""
        self.weigh()
        with showing(tell):
            self.measure_errors(times, tell)
        self.add_kinds(choice, source)
        with showing(tell):
            self.measure_errors(times, tell, timed=times.device.type == "cpu")

    def weigh(self) -> None:
        """From now on count each part's errors as they grow until the region's results, where that can be derived."""
        nodes = [unit.node for unit in self._units if unit.kind == PRODUCT]
        gains = gains_of(self._traced, nodes, self._tensors)
        if gains is not None:
            self._gains = [gains.get(unit.node, 1.0) for unit in self._units]

    def measure_errors(self, times: Times, tell: Late | None, *, timed: bool = False) -> None:
        """Measure the errors of all ways by plans where they run, in as many programs as a layer has such ways.

        With ``timed`` their times as well; ``tell`` hears how many programs there are. Of plans that compute several
        layers at once the errors of checks stay.
        """
        tensors = where_expected(self._tensors)
        total = max(map(len, map(_unmeasured, self._units, self._ways)))
        for done in range(total):
            pause()
            if tell is not None:
                tell(done, total, "")
            allowed = [
                _unmeasured(unit, ways)[:1] or plain_ways(ways) or range(len(ways))
                for unit, ways in zip(self._units, self._ways, strict=True)
            ]
            choice = self.choose(times, allowed)
            builder, steps = self._built(choice, Constants(self._traced.sources, self._weights))
            program = builder.finish(self._results)
            errors, taken = local_errors(program, tensors), None
            if timed:
                program.use_native(checked=False)
                taken = steps_in_place(program, tensors)
            for part, (index, step) in enumerate(zip(choice.ways, steps, strict=True)):
                ways = self._ways[part]
                if index in _unmeasured(self._units[part], ways):
                    ms = ways[index].ms if taken is None else taken[step]
                    measured = replace(ways[index], local_error=errors[step], ms=ms)
                    self._ways[part] = (*ways[:index], measured, *ways[index + 1 :])

    def squares(self, choice: Choice) -> float:
        """The sum of the squares of a choice's errors, as they count."""
        chosen = [self._ways[part][index] for part, index in enumerate(choice.ways)]
        return sum((gain * way.expected_error) ** 2 for gain, way in zip(self._gains, chosen, strict=True))

    def add_kinds(self, choice: Choice, source: Plans) -> None:
        """Add ways by plans of other kinds to those parts of a choice whose errors count among its squares.

        A plan that takes another's place takes as much more time there as by itself.
        """
        squares = self.squares(choice)
        chosen = [self._ways[part][index] for part, index in enumerate(choice.ways)]
        products = [part for part, way in enumerate(chosen) if isinstance(way.what, Planned)]
        for part in products:
            way = chosen[part]
            assert isinstance(way.what, Planned)
            if (self._gains[part] * way.expected_error) ** 2 * len(products) <= COUNTS * squares:
                continue
            problem, plan = way.what.product.problem, way.what.plan
            for other in source.kinds(problem):
                ms = way.ms * other.time_ms / plan.time_ms
                new = replace(way, ms=ms, what=replace(way.what, plan=other), error=0.0, local_error=None)
                if ms <= SLOWEST * way.ms and all(known.what != new.what for known in self._ways[part]):
                    self._ways[part] += (new,)

    def choose(self, times: Times, allowed: Sequence[Sequence[int]] | None = None, most: float = math.inf) -> Choice:
        """The ways with the least time together, of those that are ``allowed``, by index.

        The squares of their errors sum up to ``most`` or less.
        """
        given = {
            node: normal(tensor.shape, tensor.stride()) for node, tensor in zip(self._given, self._tensors, strict=True)
        }
        parts = []
        allowed = allowed or [range(len(ways)) for ways in self._ways]
        for unit, every, indices, gain in zip(self._units, self._ways, allowed, self._gains, strict=True):
            ways = [every[index] for index in indices]
            reads = [index for index, node in enumerate(unit.inputs) if node not in self._constant]
            parts.append(
                Part(
                    tuple(unit.inputs[index] for index in reads),
                    unit.node,
                    tuple(
                        Way(tuple(way.reads[i] for i in reads), way.gives, way.ms, error=gain * way.expected_error)
                        for way in ways
                    ),
                )
            )
        for number, (node, strides) in enumerate(self._results):
            parts.append(Part((node,), ("result", number), (Way((strides,), strides, 0.0),)))
        found = choose_ways(parts, given, lambda node: times.conversion(value_of(node)), most)  # type: ignore[arg-type]
        taken = tuple(indices[index] for indices, index in zip(allowed, found.ways, strict=False))
        return replace(found, ways=taken)

    def _built(self, choice: Choice, constants: Constants) -> tuple[Builder, list[int]]:
        """What makes the program of a choice, and the number of each part's step, -1 for a view."""
        builder, steps = Builder(constants, self._tensors[0].device), []
        for node, tensor in zip(self._given, self._tensors, strict=True):
            builder.give(node, tensor)
        for unit, ways, index in zip(self._units, self._ways, choice.ways, strict=True):
            builder.add(unit, ways[index], self._constant)
            has_step = unit.kind != VIEW and not isinstance(ways[index].what, Deferred)
            steps.append(builder.last_step if has_step else -1)
        return builder, steps

    def planned(self, choice: Choice, fused: int) -> Planning:
        """The program of a choice, with what there is to tell of it. It runs from Python, as most are tried only."""
        constants = Constants(self._traced.sources, self._weights)
        builder, _ = self._built(choice, constants)
        chosen = [(unit, ways[i]) for unit, ways, i in zip(self._units, self._ways, choice.ways, strict=True)]
        lines = [_line(unit, way) for unit, way in chosen if unit.kind != VIEW]
        program = builder.finish(self._results)
        constants.settle()
        layouts: dict[str, int] = {}
        for line in lines:
            if line.layout:
                layouts[line.layout] = layouts.get(line.layout, 0) + 1
        return Planning(
            program, constants, tuple(lines), fused, builder.conversions, choice.ms, choice.optimal, layouts
        )


def _unmeasured(unit: Unit, ways: Sequence[Way]) -> list[int]:
    """The indices of a product's ways by plans of its own whose errors in the region are not known."""
    if unit.kind != PRODUCT:
        return []
    return [i for i in plain_ways(ways) if isinstance(ways[i].what, Planned) and ways[i].local_error is None]


def _format(node: fx.Node) -> Strides:
    """The format in which a result was traced."""
    value = value_of(node)
    return normal(value.shape, value.stride())


def _line(unit: Unit, way: Way) -> Line:
    """What is told of one part."""
    if isinstance(way.what, Deferred):
        return Line(unit.name, f"within {way.what.reader}", "", 0.0)
    if isinstance(way.what, OnFilter):
        return Line(unit.name, f"factors of the filter of {way.what.reader}", "", way.ms)
    layout = layout_of(unit.value.shape, way.gives)
    if isinstance(way.what, Planned):
        plan, problem = way.what.plan, way.what.product.problem
        return Line(unit.name, f"{plan.solver}: {problem.key}", layout, way.ms, problem, plan)
    return Line(unit.name, str(unit.overload or unit.node.name), layout, way.ms)
