"""Runs plan trees: binds every leaf to its tensors once, then calls them with no decision left to take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import solvers
from tilewise.kept_filter import kept_filter
from tilewise.plan import Plan
from tilewise.problem import ConvProblem, Part, Range, Write, dense_strides
from tilewise.solvers import Run, Solver, Split, mismatch
from tilewise.threads import at_once
from tilewise.workspaces import GRAIN, Workspaces

__all__ = ["Bound", "PlanMismatch", "adds_bias", "bind", "release_workspaces"]

Addressed = Callable[..., None]
"""``run(a, b, out, workspace)`` over addresses, and that of the bias where the node adds one."""


class PlanMismatch(ValueError):
    """A plan that does not fit the problem or the solvers of this version; the message says which and how."""


_workspaces = Workspaces()


def touch_workspace(size: int, device: torch.device) -> None:
    """Have a workspace's pages resident before the memory of a CPU is measured."""
    if device.type == "cpu":
        _workspaces.touch(size)


def release_workspaces() -> None:
    """Give this thread's CPU workspace back."""
    _workspaces.release()


class Bound:
    """A plan bound to tensors of fixed shapes and strides.

    ``bound(a, b, bias=None, out=None)`` computes the problem from operands in the order of ``problem.operands`` and
    returns the result. ``workspace`` is in bytes, allocations hidden inside libraries not counted. ``ValueError`` for a
    bias of another length or device, where the plan's solvers add it.
    """

    __slots__ = (
        "_addressed",
        "_adds",
        "_bias_shape",
        "_dtype",
        "_fresh",
        "_like_a",
        "_run",
        "_shape",
        "_strides",
        "plan",
        "problem",
        "workspace",
    )

    def __init__(self, plan: Plan, problem: ConvProblem, node: Node, strides: tuple[int, ...]) -> None:
        self.plan, self.problem = plan, problem
        self.workspace = node.workspace
        self._shape = problem.shape(problem.result)
        self._strides = strides  # the solvers have been bound to these
        self._dtype = problem.torch_dtype(problem.result)
        self._bias_shape = (1, -1, *([1] * problem.dims))
        self._adds = node.adds
        self._fresh = isinstance(node, Leaf) and node.returns_new
        self._run = node.shortest()
        self._addressed = node.addressed()
        self._like_a = self._dtype is problem.torch_dtype(problem.operands[0])

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        size = self.workspace
        workspace = _workspaces.take(size, a.device) if size else None
        if out is None and not self._fresh:
            if self._like_a:
                out = a.new_empty_strided(self._shape, self._strides)
            else:
                out = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=a.device)
        added = (self._fitting(bias, a),) if self._adds else ()
        if self._addressed is not None and out is not None:
            address = 0 if workspace is None else workspace.data_ptr()
            self._addressed(a.data_ptr(), b.data_ptr(), out.data_ptr(), address, *map(Tensor.data_ptr, added))
        else:
            computed = self._run(a, b, out, workspace, *added)
            out = computed if out is None else out
        return out if bias is None or added else out.add_(bias.view(self._bias_shape))

    def _fitting(self, bias: Tensor | None, a: Tensor) -> Tensor:
        """A bias as solvers take it; zeros for none."""
        channels = self._shape[1]
        if bias is None:
            return torch.zeros(channels, dtype=self._dtype, device=a.device)
        if bias.shape != (channels,) or bias.device != a.device:
            raise ValueError(f"bias of {tuple(bias.shape)} on {bias.device}: ({channels},) on {a.device} would do")
        return bias.to(self._dtype).contiguous()  # itself where it is so already


def bind(plan: Plan, problem: ConvProblem, a: Tensor, b: Tensor, out: Tensor | None = None) -> Bound:
    """Bind ``plan`` to tensors with the shapes, strides and dtypes of ``a``, ``b`` and ``out``.

    Results that a call allocates have the strides of ``out``, or without it those of the problem's layout. Raises
    :class:`PlanMismatch` for a plan of another problem or version and for tensors that are not the problem's,
    ``SolverUnavailable`` for a config that cannot run here.
    """
    if plan.problem != problem.key:
        raise PlanMismatch(f"the plan is for {plan.problem}, the problem is {problem.key}")
    first, second = problem.operands
    given = {first: a, second: b} if out is None else {first: a, second: b, problem.result: out}
    for role, tensor in given.items():
        _check(problem, role, tensor)
    if out is None:
        shape = problem.shape(problem.result)
        strides = dense_strides(shape, problem.layout(problem.result))
        out = torch.empty_strided(shape, strides, dtype=problem.torch_dtype(problem.result), device="meta")
    own = replace(problem, bias=problem.bias and adds_bias(plan, problem))
    return Bound(plan, problem, _node(plan, own, a, b, out), tuple(out.stride()))


def adds_bias(plan: Plan, problem: ConvProblem) -> bool:
    """Whether every part of the result gets its bias from the one leaf that writes it."""
    try:
        solver = solvers.get(plan.solver)
    except KeyError:
        return False  # which is said where the plan is bound
    if not isinstance(solver, Split):
        return solver.does_add_bias(problem, plan.config)
    if solver.at_once:
        return False
    parts, plans = parts_of(plan, problem, solver)
    whole = all(
        part.problem is not None and part.write is Write.SET and all(r.dim != 1 for r in part.ranges(problem.result))
        for part in parts
    )
    each = {(id(child), part.problem): child for part, child in zip(parts, plans, strict=True)}
    return whole and all(adds_bias(child, part) for (_, part), child in each.items() if part is not None)


def _check(problem: ConvProblem, role: str, tensor: Tensor) -> None:
    if reason := mismatch(problem, role, tensor):
        raise PlanMismatch(reason)
    if tensor.device.type != problem.device_type:
        raise PlanMismatch(f"{role} is on {tensor.device}, the problem on {problem.device}")


class Node:
    """One place in a bound plan tree: ``run(a, b, out, workspace)``, with ``workspace`` bytes at its call.

    One that ``adds`` takes the bias as well.
    """

    __slots__ = ("adds", "workspace")
    adds: bool
    workspace: int

    def run(self, a: Tensor, b: Tensor, out: Tensor | None, workspace: Tensor | None, *bias: Tensor) -> Tensor:
        raise NotImplementedError

    def taken(self, b: Tensor, workspace: Tensor | None) -> Tensor:
        """What :meth:`run` takes as its second operand, the same for all parts of one call that have it in common."""
        return b

    def shortest(self) -> Run:
        """:meth:`run` of an operand as it comes, with as few frames around it as there can be."""
        return self.run

    def addressed(self) -> Addressed | None:
        """The same over raw addresses where every leaf takes them: no tensor views are made then."""
        return None


class Leaf(Node):
    """A solver's callable, with a temporary where the solver cannot write the result as asked."""

    __slots__ = (
        "_accumulate",
        "_call",
        "_dtype",
        "_filter",
        "_own",
        "_shape",
        "_size",
        "_strides",
        "_temporary",
        "returns_new",
    )

    def __init__(self, solver: Solver, plan: Plan, problem: ConvProblem, a: Tensor, b: Tensor, out: Tensor) -> None:
        role = problem.result
        self._own = solver.own_output
        self.returns_new = solver.own_output and not problem.accumulate
        self._shape, self._dtype = problem.shape(role), problem.torch_dtype(role)
        layout = problem.layout(role)
        self._strides = dense_strides(self._shape, "contiguous" if layout == "view" else layout)
        is_view = layout == "view" or tuple(out.stride()) != self._strides
        apart = self._own or (is_view and not solver.writes_views)
        self._accumulate = problem.accumulate and (apart or not solver.accumulates)
        self._temporary = not self._own and (apart or self._accumulate)
        self._size = carved(problem.nbytes(role)) if self._temporary else 0
        target = out
        if self._temporary or self._own:
            target = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device="meta")
        self.adds = problem.bias
        inner = replace(problem, accumulate=problem.accumulate and not self._accumulate)
        self._call = solver.bind_checked(inner, plan.config, a, b, None if self._own else target)
        self.workspace = self._size + solver.workspace(inner, plan.config)
        self._filter = kept_filter(solver, inner, plan.config, b)

    def taken(self, b: Tensor, workspace: Tensor | None) -> Tensor:
        """The prepared filter where one is kept."""
        if self._filter is None:
            return b
        return self._filter.of(b, None if workspace is None else workspace[self._size :])

    def run(self, a: Tensor, b: Tensor, out: Tensor | None, workspace: Tensor | None, *bias: Tensor) -> Tensor:
        if not self._own and not self._temporary:
            return self._call(a, b, out, workspace, *bias)
        if self._own:
            result = self._call(a, b, None, workspace, *bias)
            if out is None:
                return result if result.dtype is self._dtype else result.to(self._dtype)
        else:
            assert workspace is not None
            result = _carve(workspace, self._size, self._shape, self._strides, self._dtype)
            self._call(a, b, result, workspace[self._size :], *bias)
        assert out is not None
        return out.add_(result) if self._accumulate else out.copy_(result)

    def shortest(self) -> Run:
        """The solver's own callable where nothing is to be done around it."""
        if self._filter is not None:
            return self._run_by_filter
        return self.run if self._own or self._temporary else self._call

    def _run_by_filter(
        self, a: Tensor, b: Tensor, out: Tensor | None, workspace: Tensor | None, *bias: Tensor
    ) -> Tensor:
        return self.run(a, self.taken(b, workspace), out, workspace, *bias)

    def addressed(self) -> Addressed | None:
        """The solver's own, when no temporary stands between."""
        if self._own or self._temporary or self._filter is not None:
            return None
        return getattr(self._call, "run_pointers", None)


class Parts(Node):
    """The parts of a split in sequence. Sums are kept in fp32; parts that meet no data leave zeros."""

    __slots__ = ("_add_back", "_by", "_firsts", "_shape", "_size", "_steps", "_strides", "_zero")

    def __init__(
        self,
        problem: ConvProblem,
        parts: Sequence[Part],
        plans: Sequence[Plan],
        a: Tensor,
        b: Tensor,
        out: Tensor,
    ) -> None:
        role = problem.result
        self.adds = problem.bias
        self._shape = problem.shape(role)
        layout = problem.layout(role)
        self._strides = dense_strides(self._shape, "contiguous" if layout == "view" else layout)
        sums = any(part.write is not Write.SET for part in parts)
        apart = sums and problem.torch_dtype(role) is not torch.float32
        self._size = carved(math.prod(self._shape) * 4) if apart else 0
        self._add_back = apart and problem.accumulate
        if apart:
            out = torch.empty_strided(self._shape, self._strides, dtype=torch.float32, device="meta")
        fresh = apart or not problem.accumulate
        first_sets = fresh and parts[0].problem is not None and not parts[0].ranges(role)
        empty = any(part.problem is None for part in parts)
        self._zero = fresh and not first_sets and (sums or empty)
        self._steps = []
        nodes: dict[tuple[Plan, ConvProblem], Node] = {}  # equal parts of one tensor have equal strides: bound once
        for index, (part, plan) in enumerate(zip(parts, plans, strict=True)):
            if part.problem is None:
                continue
            child = part.problem
            if fresh and (part.write is Write.SET or (index == 0 and first_sets)):
                child = replace(child, accumulate=False)
            if self.adds:
                child = replace(child, bias=True)
            roles = (*problem.operands, role)
            ranges = [part.ranges(name) for name in roles]
            views = [_narrow(t, r) for t, r in zip((a, b, out), ranges, strict=True)]
            node = nodes.get((plan, child))
            if node is None:
                node = nodes[plan, child] = _node(plan, child, views[0], views[1], views[2])
            self._steps.append((ranges[0], ranges[1], ranges[2], node))
        self._firsts = _firsts([(node, rb) for _, rb, _, node in self._steps])
        self._by = self._by_address((a, b, out)) if not apart else None
        self.workspace = self._size + max((step[3].workspace for step in self._steps), default=0)

    def _by_address(self, tensors: tuple[Tensor, ...]) -> list[tuple[int, int, int, Addressed]] | None:
        steps = []
        for *ranges, node in self._steps:
            call = node.addressed()
            if call is None:
                return None
            a, b, out = (
                sum(r.start * t.stride(r.dim) for r in rs) * t.element_size()
                for t, rs in zip(tensors, ranges, strict=True)
            )
            steps.append((a, b, out, call))
        return steps

    def addressed(self) -> Addressed | None:
        """All parts by address, when nothing must be zeroed or summed beside the result."""
        return None if self._by is None or self._zero else self._run_by_address

    def _run_by_address(self, a: int, b: int, out: int, workspace: int, *bias: int) -> None:
        assert self._by is not None
        for da, db, do, call in self._by:
            call(a + da, b + db, out + do, workspace, *bias)

    def run(self, a: Tensor, b: Tensor, out: Tensor | None, workspace: Tensor | None, *bias: Tensor) -> Tensor:
        assert out is not None
        if self._zero and not self._size:
            out.zero_()
        if self._by is not None:
            address = 0 if workspace is None else workspace.data_ptr()
            self._run_by_address(a.data_ptr(), b.data_ptr(), out.data_ptr(), address, *(t.data_ptr() for t in bias))
            return out
        target = out
        if self._size:
            assert workspace is not None
            target = _carve(workspace, self._size, self._shape, self._strides, torch.float32)
            workspace = workspace[self._size :]
            if self._zero:
                target.zero_()
        taken: list[Tensor] = []
        for index, (ra, rb, ro, node) in enumerate(self._steps):
            first = self._firsts[index]
            taken.append(taken[first] if first < index else node.taken(_narrow(b, rb), workspace))
            node.run(_narrow(a, ra), taken[index], _narrow(target, ro), workspace, *bias)
        if target is not out:
            return out.add_(target) if self._add_back else out.copy_(target)
        return out


class Step(NamedTuple):
    """One of several parts at once: its ranges of operands and result, and where its workspace begins.

    ``term``: where in the workspace it computes a term of a sum, ``None`` where it goes into the result itself.
    """

    a: tuple[Range, ...]
    b: tuple[Range, ...]
    out: tuple[Range, ...]
    term: int | None
    start: int
    node: Node


class AtOnce(Node):
    """The parts of a split at once, each with its share of torch's threads and its own stretch of the workspace.

    Terms of a sum but the first are computed apart, in fp32, and added in order: the result is the same every time.
    """

    __slots__ = ("_add_back", "_apart", "_dense", "_firsts", "_size", "_steps")

    def __init__(
        self,
        problem: ConvProblem,
        parts: Sequence[Part],
        plans: Sequence[Plan],
        a: Tensor,
        b: Tensor,
        out: Tensor,
    ) -> None:
        role = problem.result
        shape, layout = problem.shape(role), problem.layout(role)
        self._dense = shape, dense_strides(shape, "contiguous" if layout == "view" else layout), torch.float32
        self._size = carved(math.prod(shape) * 4)
        self._add_back = problem.accumulate
        self.adds = False
        sums = any(part.write is not Write.SET for part in parts)
        self._apart = sums and problem.torch_dtype(role) is not torch.float32
        self._steps: list[Step] = []
        self.workspace = 0
        nodes: dict[tuple[Plan, ConvProblem, tuple[int, ...]], Node] = {}  # as in Parts
        for index, (part, plan) in enumerate(zip(parts, plans, strict=True)):
            assert part.problem is not None
            child, target, ranges = part.problem, out, part.ranges(role)
            own = sums and (self._apart or index > 0)
            if own:
                target = torch.empty_strided(*self._dense[:2], dtype=torch.float32, device="meta")
                ranges = ()
            if own or not problem.accumulate:
                child = replace(child, accumulate=False)
            first, second = (part.ranges(name) for name in problem.operands)
            views = _narrow(a, first), _narrow(b, second), _narrow(target, ranges)
            key = plan, child, tuple(views[2].stride())
            if key not in nodes:
                nodes[key] = _node(plan, child, *views)
            term, start = self.workspace, self.workspace + self._size * own
            self.workspace = start + carved(nodes[key].workspace)
            self._steps.append(Step(first, second, ranges, term if own else None, start, nodes[key]))
        self._firsts = _firsts([(step.node, step.b) for step in self._steps])

    def run(self, a: Tensor, b: Tensor, out: Tensor | None, workspace: Tensor | None, *bias: Tensor) -> Tensor:
        assert out is not None
        result, steps = out, self._steps
        taken: list[Tensor] = []
        for index, (step, first) in enumerate(zip(steps, self._firsts, strict=True)):
            own = None if workspace is None else workspace[step.start :]
            taken.append(taken[first] if first < index else step.node.taken(_narrow(b, step.b), own))

        def one(index: int) -> None:
            step = steps[index]
            target = _narrow(result, step.out) if step.term is None else self._term(workspace, step.term)
            own = None if workspace is None else workspace[step.start :]
            step.node.run(_narrow(a, step.a), taken[index], target, own)

        at_once(one, len(steps), torch.get_num_threads())
        terms = [self._term(workspace, step.term) for step in steps if step.term is not None]
        total = terms.pop(0) if self._apart else out
        for term in terms:
            total.add_(term)
        if total is out:
            return out
        return out.add_(total) if self._add_back else out.copy_(total)

    def _term(self, workspace: Tensor | None, start: int) -> Tensor:
        assert workspace is not None
        return _carve(workspace[start:], self._size, *self._dense)


def _node(plan: Plan, problem: ConvProblem, a: Tensor, b: Tensor, out: Tensor) -> Node:
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
        return Leaf(solver, plan, problem, a, b, out)
    kind = AtOnce if solver.at_once else Parts
    return kind(problem, *parts_of(plan, problem, solver), a, b, out)


def parts_of(plan: Plan, problem: ConvProblem, split: Split) -> tuple[tuple[Part, ...], list[Plan]]:
    """The parts that ``split`` cuts by ``plan`` and the plan of each. Raises :class:`PlanMismatch`."""
    try:
        parts = split.children(problem, plan.config)
    except (KeyError, ValueError) as error:
        raise PlanMismatch(f"{plan.solver} {plan.config} does not cut {problem.key}: {error}") from error
    # Compared before they are spelled out: a plan from a file may count to any number.
    if len(plan.counts) != len(plan.children) or sum(plan.counts) != len(parts):
        raise PlanMismatch(f"{plan.solver} cuts {len(parts)} parts, the plan has {sum(plan.counts)}")
    return parts, [child for child, count in zip(plan.children, plan.counts, strict=True) for _ in range(count)]


def _narrow(tensor: Tensor, ranges: tuple[Range, ...]) -> Tensor:
    for r in ranges:
        tensor = tensor.narrow(r.dim, r.start, r.length)
    return tensor


def _firsts(steps: Sequence[tuple[Node, tuple[Range, ...]]]) -> list[int]:
    """For each step the first with its node and its ranges of the second operand, which are then taken once."""
    found: dict[tuple[int, tuple[Range, ...]], int] = {}
    return [found.setdefault((id(node), ranges), index) for index, (node, ranges) in enumerate(steps)]


def _carve(
    workspace: Tensor, size: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    return workspace[:size].view(dtype).as_strided(shape, strides)


def carved(size: int) -> int:
    """Bytes of a workspace that a temporary of ``size`` bytes takes."""
    return -(-size // GRAIN) * GRAIN
