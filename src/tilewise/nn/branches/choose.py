"""The choice of branches that run on streams: those measured to be faster so, with the layers' plans in place."""

from __future__ import annotations

import statistics
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tilewise.comm.agreement import several_ranks
from tilewise.machine import random_states
from tilewise.nn.branches.find import Found, Program, find
from tilewise.nn.branches.streams import (
    InSequence,
    LanesOf,
    execute,
    fork,
    in_sequence,
    is_forked,
    lanes_for,
    program_in,
)
from tilewise.nn.layers.call import is_plain
from tilewise.nn.layers.swaps import swap_back
from tilewise.nn.record import arguments_of, state_kept
from tilewise.plan import format_bytes
from tilewise.planner.measuring.replacing import MARGIN, median_ms, time_ratio, wins
from tilewise.planner.measuring.times import rounds

__all__ = ["BranchReport", "choose_branches", "groups", "unfork"]

BUDGET_MS = 400.0
"""Most milliseconds for timing one region both ways, and for timing the whole step afterwards."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}
"""Relative L2 distance within which a traced forward gives what the forward gives: nondeterminism is less, another
computation is more. Of 16-bit types 0.02."""


@dataclass(frozen=True)
class BranchReport:
    """A module whose forward forks into branches, and how the branches run.

    ``regions`` holds, for each fork, the names of the convolutions of each branch that may run at once with others.
    Times are medians in milliseconds of the module's forward and, in training, backward pass. ``workspace`` is the
    bytes of its convolutions' plans that are needed at once. ``streams_peak`` and ``sequence_peak`` are the bytes that
    the allocator reserves for it at most; streams need more, since they share no memory. All are ``None`` where nothing
    was measured, for ``reason``.

    >>> from tilewise.nn import BranchReport
    >>> BranchReport("inception", "Inception", reason="its branches are on a CPU, which has no streams").on_streams
    False
    """

    name: str
    kind: str
    regions: tuple[tuple[tuple[str, ...], ...], ...] = ()
    on_streams: bool = False
    streams_ms: float | None = None
    sequence_ms: float | None = None
    workspace: int | None = None
    streams_peak: int | None = None
    sequence_peak: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        way = "on streams" if self.on_streams else "in sequence"
        count = " and ".join(str(len(branches)) for branches in self.regions)
        parts = [f"{self.name or self.kind}: {count} branches {way}" if count else f"{self.name or self.kind}: {way}"]
        if self.streams_ms is not None and self.sequence_ms is not None:
            parts.append(f"{self.streams_ms:.3f} ms on streams, {self.sequence_ms:.3f} ms in sequence")
        if self.streams_peak is not None and self.sequence_peak is not None:
            parts.append(f"{format_bytes(self.streams_peak)} against {format_bytes(self.sequence_peak)}")
        return ", ".join(parts) + (f" ({self.reason})" if self.reason else "")


def unfork(model: nn.Module) -> None:
    """Have every module of ``model`` run its branches in sequence."""
    for module in model.modules():
        if is_forked(module):
            swap_back(module)


def groups(model: nn.Module) -> list[list[list[str]]]:
    """The regions of ``model`` that run on streams now.

    Each region is a list of branches, and each branch a list of the names of its convolutions. Branches of one region
    may run at once. Kernels of one branch, and of different regions, never overlap.

    >>> model = tilewise.optimize(torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16), rigor="estimate")
    >>> tilewise.nn.groups(model)
    []
    """
    programs = ((name, module, program_in(module)) for name, module in model.named_modules())
    return [region for name, module, program in programs if program for region in Found(name, module, program).groups]


def choose_branches(
    model: nn.Module,
    examples: Sequence[object],
    branches: str,
    *,
    training: bool,
    workspaces: Mapping[str, int],
    budget: int | None = None,
    lanes_of: LanesOf = lanes_for,
) -> tuple[BranchReport, ...]:
    """Run branches on streams where that is measured to be faster, all others in sequence, and report every region.

    ``branches`` is the option: ``"sequence"`` measures nothing. ``workspaces`` has the most bytes that each
    convolution's plans take; a region whose branches take more than ``budget`` at once runs in sequence. ``model`` is
    run on ``examples`` and its state is restored. ``lanes_of`` gives the streams for an input.
    """
    unfork(model)
    if branches == "sequence":
        return ()
    found = find(model)
    reports = {module.name: _found(module, workspaces, budget) for module in found}
    candidates = {module.name: module for module in found if not reports[module.name].reason}
    if not candidates:
        return tuple(reports.values())
    if several_ranks():
        return _left(reports, candidates, "several ranks: not measured, as they must call the same")
    for name, report in _measured(model, candidates, examples, training, lanes_of).items():
        reports[name] = replace(report, workspace=reports[name].workspace)
    for name in candidates:
        if not reports[name].reason and reports[name].sequence_ms is None:
            reports[name] = replace(reports[name], reason="not called with one tensor")
    faster = _outermost([name for name in candidates if reports[name].on_streams])
    for name in candidates:
        if reports[name].on_streams and name not in faster:
            reports[name] = replace(reports[name], on_streams=False, reason="is part of a branch")
    for name in faster:
        program = candidates[name].program
        assert program is not None
        fork(candidates[name].module, program, lanes_of)
    reason = _whole(model, examples[0], training) if faster else ""
    if reason:
        unfork(model)
        for name in faster:
            reports[name] = replace(reports[name], on_streams=False, reason=reason)
    return tuple(reports.values())


def _found(candidate: Found, workspaces: Mapping[str, int], budget: int | None) -> BranchReport:
    """The report of a module before anything is measured, with the reason where it must run in sequence."""
    regions = tuple(tuple(tuple(branch) for branch in region) for region in candidate.groups)
    at_once = max(
        (sum(max((workspaces.get(n, 0) for n in branch), default=0) for branch in region) for region in regions),
        default=0,
    )
    reason = candidate.reason
    if not reason and budget is not None and at_once > budget:
        reason = f"its branches' workspaces are {format_bytes(at_once)} at once, the budget {format_bytes(budget)}"
    return BranchReport(
        candidate.name, type(candidate.module).__name__, regions, workspace=at_once if regions else None, reason=reason
    )


def _left(reports: dict[str, BranchReport], names: Mapping[str, object], reason: str) -> tuple[BranchReport, ...]:
    """The reports, with ``reason`` in those of ``names``."""
    return tuple(replace(report, reason=reason) if name in names else report for name, report in reports.items())


def _outermost(names: Sequence[str]) -> list[str]:
    """The names that are not inside another one of ``names``."""
    return [name for name in names if not any(_inside(name, outer) for outer in names)]


def _inside(name: str, other: str) -> bool:
    """Whether the module ``name`` is a submodule of ``other``, at any depth."""
    return name != other and (not other or name.startswith(f"{other}."))


def _measured(
    model: nn.Module,
    candidates: Mapping[str, Found],
    examples: Sequence[object],
    training: bool,
    lanes_of: LanesOf,
) -> dict[str, BranchReport]:
    """Time every candidate both ways, on the input of its first call in any example, and return the reports by name."""
    reports: dict[str, BranchReport] = {}

    def note(candidate: Found, x: torch.Tensor) -> None:
        """Measure a candidate at its first call."""
        if candidate.name not in reports and is_plain(x):
            reports[candidate.name] = measure(candidate, x, training=training, lanes_of=lanes_of)

    for example in examples:
        args, kwargs = arguments_of(example)
        with ExitStack() as stack:
            stack.enter_context(state_kept(model, example))
            stack.enter_context(_called(candidates.values(), note))
            stack.enter_context(torch.set_grad_enabled(training))
            try:
                model(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                reason = f"out of memory while measuring: {str(error).splitlines()[0]}"
                for candidate in candidates.values():
                    reports.setdefault(
                        candidate.name, BranchReport(candidate.name, type(candidate.module).__name__, reason=reason)
                    )
    return {name: replace(candidate, regions=_regions(candidates[name])) for name, candidate in reports.items()}


def _regions(candidate: Found) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """The names of the convolutions of each branch of each region."""
    return tuple(tuple(tuple(branch) for branch in region) for region in candidate.groups)


@contextmanager
def _called(candidates: Iterator[Found] | Any, note: Callable[[Found, torch.Tensor], None]) -> Iterator[None]:
    """Meanwhile have each module's ``forward`` call ``note`` first, where it is called with exactly one tensor."""
    modules = [candidate.module for candidate in candidates]
    saved = [module.__dict__.get("forward") for module in modules]

    def noting(candidate: Found) -> Callable[..., Any]:
        """The ``forward`` of one candidate."""

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
                note(candidate, args[0])
            return type(self).forward(self, *args, **kwargs)

        return forward

    try:
        for candidate in candidates:
            candidate.module.__dict__["forward"] = types.MethodType(noting(candidate), candidate.module)
        yield
    finally:
        for module, forward_before in zip(modules, saved, strict=True):
            module.__dict__.pop("forward", None)
            if forward_before is not None:
                module.__dict__["forward"] = forward_before


def measure(candidate: Found, x: torch.Tensor, *, training: bool, lanes_of: LanesOf = lanes_for) -> BranchReport:
    """Check that both ways compute the same for ``x``, then time the module on streams and in sequence.

    A report with a reason, and without times, where there are no streams or where the results differ.
    """
    assert candidate.program is not None
    report = BranchReport(candidate.name, type(candidate.module).__name__)
    lanes = lanes_of(x.detach())
    if lanes is None:
        where = "on a CPU" if not x.is_cuda else "on another device than the current, in a checkpoint or a transform"
        return replace(report, reason=f"there are no streams {where}")
    reason = disagreement(candidate.module, candidate.program, x, training=training, lanes_of=lanes_of)
    if reason:
        return replace(report, reason=reason)
    program = candidate.program
    step = Pass(candidate.module, x, training=training)
    calls = [
        lambda: step(lambda module, value: execute(program, module, value, lanes)),
        lambda: step(lambda module, value: type(module).forward(module, value)),
    ]
    peaks = [_held(call, x.device) if x.is_cuda else None for call in calls]
    times = rounds(calls, x.device, budget_ms=BUDGET_MS)
    ratios = sorted(
        time_ratio(on_streams, in_sequence_, x.device.type) for on_streams, in_sequence_ in zip(*times, strict=True)
    )
    return replace(
        report,
        on_streams=wins(ratios, x.device.type),
        streams_ms=median_ms(times[0]),
        sequence_ms=median_ms(times[1]),
        streams_peak=peaks[0],
        sequence_peak=peaks[1],
    )


class Pass:
    """One forward of a module and, in training, its gradients; ``grad`` of its parameters stays as it is.

    A call returns the results and the gradients, with ``None`` for a tensor without gradient. Afterwards ``wrote`` says
    whether the forward wrote into its input.
    """

    def __init__(self, module: nn.Module, x: torch.Tensor, *, training: bool) -> None:
        self._module, self._training = module, training
        self._x = x.detach().requires_grad_(training and x.requires_grad)
        self._weights = [p for p in module.parameters() if training and p.requires_grad]
        self.wrote = False

    def __call__(self, forward: Callable[[nn.Module, torch.Tensor], Any]) -> list[torch.Tensor | None]:
        """The results of ``forward(module, input)``, then in training the gradients of input and weights."""
        with torch.set_grad_enabled(self._training):
            # A copy: in a network it is no leaf either, and the forward may write into it.
            value = self._x.clone()
            before = value._version
            results = _floats(forward(self._module, value))
            self.wrote = value._version != before
            differentiable = [t for t in (self._x, *self._weights) if t.requires_grad]
            heads = [result for result in results if result.requires_grad]
            if not differentiable or not heads:
                return list(results)
            grads = torch.autograd.grad(heads, differentiable, [head.detach() for head in heads], allow_unused=True)
        return [*(result.detach() for result in results), *grads]


def _floats(value: object) -> list[torch.Tensor]:
    """Every floating-point tensor in ``value``, nested or not."""
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def disagreement(
    module: nn.Module, program: Program, x: torch.Tensor, *, training: bool, lanes_of: LanesOf = lanes_for
) -> str:
    """How the traced program differs from the module's forward of ``x``; empty where it does not.

    It is compared in sequence and on streams, with the same random numbers. A branch that writes into a tensor that
    branches share counts as a difference.
    """
    watching = InSequence()
    ways: list[tuple[str, Callable[[nn.Module, torch.Tensor], Any]]] = [
        ("forward", lambda m, v: type(m).forward(m, v)),
        ("in sequence", lambda m, v: execute(program, m, v, watching)),
    ]
    lanes = lanes_of(x.detach())
    if lanes is not None:
        ways.append(("on streams", lambda m, v: execute(program, m, v, lanes)))
    want: list[torch.Tensor | None] = []
    wrote = False
    for name, way in ways:
        with random_states.kept(module.modules()):
            try:
                step = Pass(module, x, training=training)
                outputs = step(way)
            except Exception as error:
                if name == "forward" or isinstance(error, torch.OutOfMemoryError):
                    raise
                return f"its traced forward, {name}, raised {type(error).__name__}: {error}"
        if watching.wrote:
            return "a branch writes into what branches share"
        if name == "forward":
            want, wrote = outputs, step.wrote
        elif wrote and not step.wrote:
            return "its forward writes into its input, which a trace does not repeat"
        elif len(outputs) != len(want) or not all(map(_close, outputs, want)):
            return f"its traced forward, {name}, gives something else"
    return ""


def _close(result: torch.Tensor | None, want: torch.Tensor | None) -> bool:
    """Whether two results are equal within :data:`TOLERANCE`, or both ``None``."""
    if result is None or want is None:
        return result is want
    if result.shape != want.shape or result.dtype != want.dtype:
        return False
    if torch.equal(result, want):
        return True
    apart = float((result.double() - want.double()).norm())
    return apart <= TOLERANCE.get(result.dtype, 2e-2) * float(want.double().norm())


def _held(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that the allocator reserves on the device for one run. Memory freed on one stream cannot serve another."""
    call()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    call()
    return torch.cuda.max_memory_reserved(device) - before


def _whole(model: nn.Module, example: object, training: bool) -> str:
    """Why all branches must run in sequence: the model's whole step is slower on streams. Empty where it is not."""
    args, kwargs = arguments_of(example)
    weights = [p for p in model.parameters() if training and p.requires_grad]
    tensors = [t for t in (*_floats((args, kwargs)), *model.parameters()) if t.device.type in MARGIN]
    device = max((t.device for t in tensors), key=lambda device: device.type)

    def step() -> None:
        with torch.set_grad_enabled(training):
            heads = [t for t in _floats(model(*args, **kwargs)) if t.requires_grad]
            if weights and heads:
                torch.autograd.grad(heads, weights, [head.detach() for head in heads], allow_unused=True)

    def sequence() -> None:
        with in_sequence():
            step()

    with state_kept(model, example):
        try:
            times = rounds([step, sequence], device, budget_ms=BUDGET_MS)
        except torch.OutOfMemoryError as error:
            return f"the whole step on streams ran out of memory: {str(error).splitlines()[0]}"
    streams_ms, sequence_ms = median_ms(times[0]), median_ms(times[1])
    if statistics.median(time_ratio(a, b, device.type) for a, b in zip(*times, strict=True)) <= 1.0:
        return ""
    return f"the whole step took {streams_ms:.3f} ms on streams, {sequence_ms:.3f} ms in sequence"
