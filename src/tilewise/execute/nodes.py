"""The nodes of a bound plan: a leaf is a solver's callable, a split runs its parts in sequence or at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import solvers
from tilewise.execute.elsewhere import Elsewhere, check_elsewhere, example_there
from tilewise.execute.kept_filter import kept_filter
from tilewise.execute.node import Addressed, Node, PlanMismatch, Results, allocating_call, flat_call
from tilewise.execute.places import Place, carved, carved_places
from tilewise.execute.shared import Shared
from tilewise.kernels.native.sequence import LaunchSequence, joined
from tilewise.machine.threads import at_once
from tilewise.plan import Plan
from tilewise.problems.base import Part, Problem, Range, Tensors, Write, as_tuple, narrow
from tilewise.solvers import Run, Solver, Split

__all__ = ["AtOnce", "Leaf", "Parts", "Step", "node_of", "parts_of"]

MOST_LAUNCHES = 1024
"""Launches that one list describes. Parts with more are called one by one: what a list saves then is little."""
Ranges = tuple[tuple[Range, ...], ...]
"""The ranges that a part uses of each tensor, operands first."""


def _constant_index(problem: Problem) -> int:
    """The index of the operand that stays between calls; -1 where none does."""
    role = problem.constant_operand
    return problem.operands.index(role) if role else -1


class Leaf(Node):
    """A solver's callable, with temporaries where the solver cannot write the results as asked."""

    __slots__ = ("_accumulate", "_call", "_filter", "_own", "_places", "_problem", "_size", "_temporary", "returns_new")

    def __init__(self, solver: Solver, plan: Plan, problem: Problem, operands: Tensors, results: Tensors) -> None:
        self._problem = problem
        self._own = solver.own_output
        self.returns_new = solver.own_output and not problem.accumulate
        self._places = [Place(problem, role) for role in problem.results]
        is_view = any(
            problem.layout(role) == "view" or tuple(result.stride()) != place.strides
            for role, result, place in zip(problem.results, results, self._places, strict=True)
        )
        apart = self._own or (is_view and not solver.writes_views)
        self._accumulate = problem.accumulate and (apart or not solver.accumulates)
        self._temporary = not self._own and (apart or self._accumulate)
        self._size = sum(place.size for place in self._places) if self._temporary else 0
        """Bytes of temporaries at the beginning of the workspace."""
        targets: Results = results
        if self._temporary:
            targets = tuple(place.described() for place in self._places)
        elif self._own:
            targets = (None,) * len(results)
        self.adds, self.adds_residual, self.elsewhere = problem.bias, problem.residual, {}
        self.constant = _constant_index(problem)
        inner = problem.changed(accumulate=problem.accumulate and not self._accumulate)
        self._call = solver.bind_checked(inner, plan.config, *operands, *targets)
        self.workspace = self._size + solver.workspace(inner, plan.config)
        weight = operands[self.constant] if self.constant >= 0 else None
        self._filter = None if weight is None else kept_filter(solver, inner, plan.config, weight)
        if self._filter is None:
            self.constant = -1

    def taken(self, operand: Tensor, workspace: Tensor | None) -> Tensor:
        """The prepared filter where one is kept."""
        if self._filter is None:
            return operand
        return self._filter.of(operand, None if workspace is None else workspace[self._size :])

    def run(self, operands: Tensors, results: Results, workspace: Tensor | None, *bias: Tensor) -> Tensors:
        """Call the solver, into the results or by way of temporaries where it cannot write them itself."""
        if not self._own and not self._temporary:
            return as_tuple(self._call(*operands, *results, workspace, *bias))
        if self._own:
            computed = as_tuple(self._call(*operands, *(None for _ in results), workspace, *bias))
            if results[0] is None:
                places = zip(computed, self._places, strict=True)
                return tuple(t if t.dtype is place.dtype else t.to(place.dtype) for t, place in places)
        else:
            computed, rest = carved_places(self._places, workspace)
            self._call(*operands, *computed, rest, *bias)
        add = self._accumulate
        return tuple(_put(result, value, add) for result, value in zip(results, computed, strict=True))

    def shortest(self) -> Run:
        """The solver's own callable where it needs neither a temporary nor a kept filter."""
        flat = flat_call(self, self._problem)
        if self._filter is not None or self._temporary:
            return flat
        return allocating_call(self._call, flat, self._problem) if self._own else self._call

    def addressed(self) -> Addressed | None:
        """The solver's own callable on addresses; ``None`` where there is none or more must be done around it."""
        if self._own or self._temporary or self._filter is not None:
            return None
        return getattr(self._call, "run_pointers", None)

    def launches(self) -> LaunchSequence | None:
        """Those of the solver's own callable, where it tells."""
        return None if self.addressed() is None else getattr(self._call, "sequence", None)


def _put(result: Tensor | None, value: Tensor, add: bool) -> Tensor:
    """Copy ``value`` into ``result``, or with ``add`` add it."""
    assert result is not None
    return result.add_(value) if add else result.copy_(value)


class Step(NamedTuple):
    """One part: its node, the ranges it uses of each operand and result, and the byte where its workspace starts.

    ``term`` is for parts that run at once: the byte of the workspace where the part computes its terms of a sum;
    ``None`` where it writes into the results themselves.
    """

    node: Node
    operands: Ranges
    results: Ranges
    term: int | None = None
    start: int = 0

    def used(self, operands: Tensors) -> Tensors:
        """Views of the operands that the part uses."""
        return tuple(narrow(t, r) for t, r in zip(operands, self.operands, strict=True))


class _Split(Node):
    """What splits in sequence and at once have in common: one step for each part, and operands that parts share."""

    __slots__ = ("_firsts", "_problem", "_steps")
    _firsts: list[int]
    _problem: Problem
    _steps: list[Step]

    def shortest(self) -> Run:
        """The run as a flat call. Each part takes its constant operand by itself."""
        return flat_call(self, self._problem)

    def _added(self, step: Step, added: Tensors) -> Tensors:
        """What a step adds of bias and residual: the residual is cut as the result is."""
        return (*added[:-1], narrow(added[-1], step.results[-1])) if self.adds_residual else added

    def _used(self, index: int, operands: Tensors, workspace: Tensor | None, before: list[Tensors]) -> Tensors:
        """The operands of step ``index``. The constant one is prepared once for all steps that share it.

        ``before`` has the operands of the steps before this one.
        """
        step, first = self._steps[index], self._firsts[index]
        views = step.used(operands)
        constant = step.node.constant
        if constant < 0:
            return views
        prepared = before[first][constant] if first < index else step.node.taken(views[constant], workspace)
        return (*views[:constant], prepared, *views[constant + 1 :])


class Parts(_Split):
    """The parts of a split, run one after the other. Sums are kept in fp32; parts that meet no data leave zeros."""

    __slots__ = ("_add_back", "_by", "_calls", "_launches", "_places", "_zero")

    def __init__(
        self, problem: Problem, parts: Sequence[Part[Any]], plans: Sequence[Plan], operands: Tensors, results: Tensors
    ) -> None:
        self._problem = problem
        self.adds, self.adds_residual, self.constant = problem.bias, problem.residual, -1
        sums = any(part.write is not Write.SET for part in parts)
        sums_are_apart = sums and problem.out_dtype != "fp32"
        self._places = [Place(problem, role, torch.float32) for role in problem.results] if sums_are_apart else []
        self._add_back = sums_are_apart and problem.accumulate
        if sums_are_apart:
            results = tuple(place.described() for place in self._places)
        sets_results = sums_are_apart or not problem.accumulate
        whole = not any(parts[0].ranges(role) for role in problem.results)
        first_sets = sets_results and parts[0].problem is not None and whole
        empty = any(part.problem is None for part in parts)
        self._zero = sets_results and not first_sets and (sums or empty)
        self._steps = []
        nodes: dict[tuple[Plan, Problem], Node] = {}  # equal parts of one tensor have equal strides: bound once
        for index, (part, plan) in enumerate(zip(parts, plans, strict=True)):
            if part.problem is None:
                continue
            child = part.problem
            if sets_results and (part.write is Write.SET or (index == 0 and first_sets)):
                child = child.changed(accumulate=False)
            child = child.changed(
                bias=self.adds or None, residual=self.adds_residual or None, activation=problem.activation
            )
            step = _bound_step(nodes, (plan, child), problem, part, operands, results)
            self._steps.append(step)
        self._firsts = _firsts(self._steps)
        self._by = self._by_address((*operands, *results)) if not sums_are_apart else None
        self._launches = self._all_launches() if self._by is not None and not self._zero else None
        self._calls: list[tuple[Ranges, Run]] | None = None
        """Where no operand is kept: the ranges that each part uses of all tensors, and its shortest call."""
        if all(step.node.constant < 0 for step in self._steps) and not self.adds_residual:
            self._calls = [((*step.operands, *step.results), step.node.shortest()) for step in self._steps]
        temporary_bytes = sum(place.size for place in self._places)
        self.workspace = temporary_bytes + max((step.node.workspace for step in self._steps), default=0)
        self.elsewhere = _most([step.node.elsewhere for step in self._steps])

    def _all_launches(self) -> LaunchSequence | None:
        """The launches of all parts over the whole tensors; ``None`` where a part has none, or they are too many."""
        assert self._by is not None
        found = []
        for step, (offsets, _) in zip(self._steps, self._by, strict=True):
            launches = step.node.launches()
            if launches is None:
                return None
            found.append(launches.moved(offsets))
        whole = joined(found)
        return None if whole is None or len(whole.launches) > MOST_LAUNCHES else whole

    def launches(self) -> LaunchSequence | None:
        """Those of all parts, each over its piece of the tensors."""
        return self._launches

    def _by_address(self, tensors: Tensors) -> list[tuple[tuple[int, ...], Addressed]] | None:
        """Each part's offsets in bytes into the tensors, and its call; ``None`` unless all parts take addresses."""
        steps = []
        for step in self._steps:
            call = step.node.addressed()
            if call is None:
                return None
            offsets = tuple(
                sum(r.start * t.stride(r.dim) for r in ranges) * t.element_size()
                for t, ranges in zip(tensors, (*step.operands, *step.results), strict=True)
            )
            steps.append((offsets, call))
        return steps

    def addressed(self) -> Addressed | None:
        """A call of all parts by address; ``None`` where something must be zeroed, or summed beside the results."""
        if self._by is None or self._zero:
            return None
        three = len(self._problem.roles) == 3 and not self.adds_residual
        return self._run_three_by_address if three else self._run_by_address

    def _run_by_address(self, *addresses: int) -> None:
        """Run all parts, given the addresses of operands, results, workspace, bias and residual."""
        assert self._by is not None
        for offsets, call in self._by:
            count = len(offsets)
            moved = [address + offset for address, offset in zip(addresses, offsets, strict=False)]
            others = list(addresses[count:])
            if self.adds_residual:
                others[-1] += offsets[-1]  # it lies as the result does
            call(*moved, *others)

    def _run_three_by_address(self, a: int, b: int, out: int, workspace: int, *bias: int) -> None:
        """Like :meth:`_run_by_address`, but faster, for two operands and one result: there may be hundreds of parts."""
        assert self._by is not None
        for (da, db, do), call in self._by:
            call(a + da, b + db, out + do, workspace, *bias)

    def run(self, operands: Tensors, results: Results, workspace: Tensor | None, *bias: Tensor) -> Tensors:
        """Compute the parts one after the other, into the results or by way of temporaries."""
        outs = _given(results)
        if self._zero and not self._places:
            for out in outs:
                out.zero_()
        if self._by is not None:
            space = 0 if workspace is None else workspace.data_ptr()
            addresses = (t.data_ptr() for t in (*operands, *outs))
            self._run_by_address(*addresses, space, *(t.data_ptr() for t in bias))
            return outs
        targets = outs
        if self._places:
            targets, workspace = carved_places(self._places, workspace)
            if self._zero:
                for target in targets:
                    target.zero_()
        if self._calls is not None:
            tensors = (*operands, *targets)
            for ranges, call in self._calls:
                call(*map(narrow, tensors, ranges), workspace, *bias)
        else:
            self._run_with_kept(operands, targets, workspace, *bias)
        if self._places:
            return tuple(_put(out, target, self._add_back) for out, target in zip(outs, targets, strict=True))
        return outs

    def _run_with_kept(self, operands: Tensors, targets: Tensors, workspace: Tensor | None, *bias: Tensor) -> None:
        """Run all parts where some keep a filter, which parts with the same operand share."""
        taken: list[Tensors] = []
        for index, step in enumerate(self._steps):
            taken.append(self._used(index, operands, workspace, taken))
            into = tuple(narrow(t, r) for t, r in zip(targets, step.results, strict=True))
            step.node.run(taken[index], into, workspace, *self._added(step, bias))


class AtOnce(_Split):
    """The parts of a split, run at once, each with a share of torch's threads and a piece of the workspace of its own.

    All terms of a sum but the first are computed apart, in fp32, and added in order: so the result is the same every
    time.
    """

    __slots__ = ("_add_back", "_apart", "_places")

    def __init__(
        self, problem: Problem, parts: Sequence[Part[Any]], plans: Sequence[Plan], operands: Tensors, results: Tensors
    ) -> None:
        self._problem = problem
        self._places = [Place(problem, role, torch.float32) for role in problem.results]
        self._add_back = problem.accumulate
        self.adds, self.adds_residual, self.constant = problem.bias, problem.residual, -1
        sums = any(part.write is not Write.SET for part in parts)
        self._apart = sums and problem.out_dtype != "fp32"
        self._steps = []
        self.workspace = 0
        nodes: dict[tuple[Any, ...], Node] = {}  # as in Parts
        size = sum(place.size for place in self._places)
        for index, (part, plan) in enumerate(zip(parts, plans, strict=True)):
            assert part.problem is not None
            child, targets = part.problem, results
            is_apart = sums and (self._apart or index > 0)
            if is_apart:
                targets = tuple(place.described() for place in self._places)
            if is_apart or not problem.accumulate:
                child = child.changed(accumulate=False)
            child = child.changed(
                bias=self.adds or None, residual=self.adds_residual or None, activation=problem.activation
            )
            bound = _bound_step(nodes, (plan, child), problem, part, operands, targets, whole=is_apart)
            start = self.workspace + size * is_apart
            self._steps.append(bound._replace(term=self.workspace if is_apart else None, start=start))
            self.workspace = start + carved(bound.node.workspace)
        self.elsewhere = _sum([step.node.elsewhere for step in self._steps])
        self._firsts = _firsts(self._steps)

    def run(self, operands: Tensors, results: Results, workspace: Tensor | None, *bias: Tensor) -> Tensors:
        """Compute all parts at the same time, each on threads of its own."""
        outs, steps = _given(results), self._steps
        taken: list[Tensors] = []
        for index, step in enumerate(steps):
            space = None if workspace is None else workspace[step.start :]
            taken.append(self._used(index, operands, space, taken))

        def run_part(index: int) -> None:
            step = steps[index]
            if step.term is None:
                into = tuple(narrow(t, r) for t, r in zip(outs, step.results, strict=True))
            else:
                into = self._term(workspace, step.term)
            space = None if workspace is None else workspace[step.start :]
            step.node.run(taken[index], into, space, *self._added(step, bias))

        at_once(run_part, len(steps), torch.get_num_threads())
        terms = [self._term(workspace, step.term) for step in steps if step.term is not None]
        totals = terms.pop(0) if self._apart else outs
        for term in terms:
            for total, value in zip(totals, term, strict=True):
                total.add_(value)
        if totals is outs:
            return outs
        return tuple(_put(out, total, self._add_back) for out, total in zip(outs, totals, strict=True))

    def _term(self, workspace: Tensor | None, start: int) -> Tensors:
        """The tensors of a term of the sum, which lie in the workspace from byte ``start`` on."""
        assert workspace is not None
        return carved_places(self._places, workspace[start:])[0]


def _given(results: Results) -> Tensors:
    """The results, all of which are given: a split leaves none to a solver to allocate."""
    return tuple(result for result in results if result is not None)


def _bound_step(
    nodes: dict[tuple[Any, ...], Node],
    key: tuple[Plan, Problem],
    problem: Problem,
    part: Part[Any],
    operands: Tensors,
    results: Tensors,
    *,
    whole: bool = False,
) -> Step:
    """The step of a part: its plan bound to its views, or the node of an equal part from ``nodes``.

    With ``whole`` the part writes all of ``results``.
    """
    plan, child = key
    used = tuple(part.ranges(role) for role in problem.operands)
    written = ((),) * len(results) if whole else tuple(part.ranges(role) for role in problem.results)
    views = tuple(narrow(t, r) for t, r in zip((*operands, *results), (*used, *written), strict=True))
    inputs, outputs = views[: len(operands)], views[len(operands) :]
    known = (plan, child, *(tuple(t.stride()) for t in outputs))
    node = nodes.get(known)
    if node is None:
        here = child.device == problem.device
        node = nodes[known] = node_of(plan, child, inputs, outputs) if here else _node_elsewhere(plan, child)
    return Step(node, used, written)


def _node_elsewhere(plan: Plan, child: Problem) -> Node:
    """``plan`` bound on the device of ``child``, for tensors on another one."""
    check_elsewhere(child)
    alone = child.changed(accumulate=False)
    operands, results = (tuple(example_there(child, r) for r in roles) for roles in (child.operands, child.results))
    return Elsewhere(node_of(plan, alone, operands, results), child)


def node_of(plan: Plan, problem: Problem, operands: Tensors, results: Tensors) -> Node:
    """``plan`` bound to tensors like these.

    Raises :class:`PlanMismatch` where its solver is missing, has another version or cannot solve ``problem``.
    """
    try:
        solver = solvers.get(plan.solver)
    except KeyError as error:
        raise PlanMismatch(str(error.args[0])) from error
    if solver.version != plan.version:
        raise PlanMismatch(
            f"the plan is for {plan.solver} version {plan.version}, here is {solver.version}: plan again"
        )
    reasons = solver.why_not(problem)
    if reasons:
        raise PlanMismatch(f"{plan.solver} cannot solve {problem.key}: {'; '.join(reasons)}")
    if not isinstance(solver, Split):
        return Leaf(solver, plan, problem, operands, results)
    if solver.across:
        return Shared(problem, plan.config, *parts_of(plan, problem, solver), operands, results, node_of)
    kind = AtOnce if solver.at_once else Parts
    return kind(problem, *parts_of(plan, problem, solver), operands, results)


def parts_of(plan: Plan, problem: Problem, split: Split) -> tuple[tuple[Part[Any], ...], list[Plan]]:
    """The parts into which ``split`` cuts ``problem`` by ``plan``, and the plan of each.

    Raises :class:`PlanMismatch`.

    >>> from tilewise import solvers
    >>> from tilewise.execute import parts_of
    >>> from tilewise.plan import Config
    >>> whole, half = tilewise.GemmProblem(16, 32, 8), tilewise.GemmProblem(8, 32, 8)
    >>> child = tilewise.Planner().plan(half, tilewise.Options(rigor="estimate"))
    >>> split = solvers.get("row_blocks")
    >>> plan = tilewise.Plan(whole.key, split.name, split.version, Config(sizes=(8, 8)), (child,), (2,))
    >>> parts, plans = parts_of(plan, whole, split)
    >>> [part.problem.m for part in parts], plans == [child, child]
    ([8, 8], True)
    """
    try:
        parts = split.children(problem, plan.config)
    except (KeyError, ValueError) as error:
        raise PlanMismatch(f"{plan.solver} {plan.config} does not cut {problem.key}: {error}") from error
    # Compared before they are spelled out: a plan from a file may count to any number.
    if len(plan.counts) != len(plan.children) or sum(plan.counts) != len(parts):
        raise PlanMismatch(f"{plan.solver} cuts {len(parts)} parts, the plan has {sum(plan.counts)}")
    return parts, [child for child, count in zip(plan.children, plan.counts, strict=True) for _ in range(count)]


def _most(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """By device, the most bytes that one of the parts takes there: they run one after the other."""
    most: dict[str, int] = {}
    for part in parts:
        most.update({device: max(size, most.get(device, 0)) for device, size in part.items()})
    return most


def _sum(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """By device, the bytes that all parts take there: they run at once."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def _firsts(steps: Sequence[Step]) -> list[int]:
    """For each step the index of the first one with the same node and ranges of the constant operand."""
    first_of: dict[tuple[int, tuple[Range, ...]], int] = {}
    firsts = []
    for index, step in enumerate(steps):
        constant = step.node.constant
        ranges = step.operands[constant] if constant >= 0 else ()
        firsts.append(first_of.setdefault((id(step.node), ranges), index))
    return firsts
