"""Which branches run on streams at once: those that are measured faster so, with the layers' plans in place."""

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

from tilewise import random_states
from tilewise.comm.agreement import several_ranks
from tilewise.nn.branches import Found, Program, find
from tilewise.nn.call import is_plain
from tilewise.nn.record import arguments_of, state_kept
from tilewise.nn.streams import InSequence, LanesOf, execute, fork, in_sequence, is_forked, lanes_for, program_in
from tilewise.nn.swaps import swap_back
from tilewise.plan import format_bytes
from tilewise.planner.measure import rounds
from tilewise.planner.replacing import MARGIN, median_ms, share, wins

__all__ = ["BRANCHES", "BranchReport", "check", "groups", "settle", "unfork"]

BRANCHES = ("sequence", "measured")
BUDGET_MS = 400.0
"""What timing one region may take, both ways together, and afterwards the whole step."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}
"""Relative L2 distance within which a traced forward gives what the forward gives: nondeterminism is less, another
computation is more. Of 16-bit types 0.02."""


@dataclass(frozen=True)
class BranchReport:
    """A module whose forward forks into branches, and how they run.

    ``regions`` names, for each fork and each of its branches that may run at once, the convolutions. Times are medians
    of its forward and, in training, its backward pass; ``workspace`` is what its convolutions' plans take at once, in
    bytes; ``streams_peak`` and ``sequence_peak`` what the allocator holds for it at its peak, as streams share nothing.
    All are ``None`` where nothing was measured, for ``reason``.
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


def check(branches: str) -> None:
    """Raise ``ValueError`` for a way to run branches that there is not."""
    if branches not in BRANCHES:
        raise ValueError(f"branches={branches!r}: one of {', '.join(BRANCHES)} would do")


def unfork(model: nn.Module) -> None:
    """Have every module of ``model`` run its branches in sequence."""
    for module in model.modules():
        if is_forked(module):
            swap_back(module)


def groups(model: nn.Module) -> list[list[list[str]]]:
    """Regions of ``model`` that run on streams now: branches that may run at once, as names of their convolutions.

    One list for each region, in it one for each branch. Kernels of one branch, and of different regions, never overlap.
    """
    programs = ((name, module, program_in(module)) for name, module in model.named_modules())
    return [region for name, module, program in programs if program for region in Found(name, module, program).groups]


def settle(
    model: nn.Module,
    examples: Sequence[object],
    branches: str,
    *,
    training: bool,
    workspaces: Mapping[str, int],
    budget: int | None = None,
    lanes_of: LanesOf = lanes_for,
) -> tuple[BranchReport, ...]:
    """Run on streams what is faster so, everything else in sequence, and tell of every region.

    ``workspaces`` has the bytes that each convolution's plans take at most; a region whose branches take more than
    ``budget`` at once runs in sequence. ``model`` is run on ``examples`` and its state put back; ``lanes_of`` gives the
    streams.
    """
    unfork(model)
    if branches == "sequence":
        return ()
    found = find(model)
    told = {one.name: _found(one, workspaces, budget) for one in found}
    candidates = {one.name: one for one in found if not told[one.name].reason}
    if not candidates:
        return tuple(told.values())
    if several_ranks():
        return _left(told, candidates, "several ranks: not measured, as they must call the same")
    for name, report in _measured(model, candidates, examples, training, lanes_of).items():
        told[name] = replace(report, workspace=told[name].workspace)
    for name in candidates:
        if not told[name].reason and told[name].sequence_ms is None:
            told[name] = replace(told[name], reason="not called with one tensor")
    faster = _outermost([name for name in candidates if told[name].on_streams])
    for name in candidates:
        if told[name].on_streams and name not in faster:
            told[name] = replace(told[name], on_streams=False, reason="is part of a branch")
    for name in faster:
        program = candidates[name].program
        assert program is not None
        fork(candidates[name].module, program, lanes_of)
    reason = _whole(model, examples[0], training) if faster else ""
    if reason:
        unfork(model)
        for name in faster:
            told[name] = replace(told[name], on_streams=False, reason=reason)
    return tuple(told.values())


def _found(one: Found, workspaces: Mapping[str, int], budget: int | None) -> BranchReport:
    regions = tuple(tuple(tuple(branch) for branch in region) for region in one.groups)
    at_once = max(
        (sum(max((workspaces.get(n, 0) for n in branch), default=0) for branch in region) for region in regions),
        default=0,
    )
    reason = one.reason
    if not reason and budget is not None and at_once > budget:
        reason = f"its branches' workspaces are {format_bytes(at_once)} at once, the budget {format_bytes(budget)}"
    return BranchReport(
        one.name, type(one.module).__name__, regions, workspace=at_once if regions else None, reason=reason
    )


def _left(told: dict[str, BranchReport], names: Mapping[str, object], reason: str) -> tuple[BranchReport, ...]:
    return tuple(replace(one, reason=reason) if name in names else one for name, one in told.items())


def _outermost(names: Sequence[str]) -> list[str]:
    return [name for name in names if not any(_inside(name, other) for other in names)]


def _inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _measured(
    model: nn.Module,
    candidates: Mapping[str, Found],
    examples: Sequence[object],
    training: bool,
    lanes_of: LanesOf,
) -> dict[str, BranchReport]:
    """Both ways timed on what each module is called with, at its first call in any example."""
    made: dict[str, BranchReport] = {}

    def note(one: Found, x: torch.Tensor) -> None:
        if one.name not in made and is_plain(x):
            made[one.name] = measure(one, x, training=training, lanes_of=lanes_of)

    for example in examples:
        args, kwargs = arguments_of(example)
        with ExitStack() as stack:
            stack.enter_context(state_kept(model))
            stack.enter_context(_called(candidates.values(), note))
            stack.enter_context(torch.set_grad_enabled(training))
            try:
                model(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                reason = f"out of memory while measuring: {str(error).splitlines()[0]}"
                for one in candidates.values():
                    made.setdefault(one.name, BranchReport(one.name, type(one.module).__name__, reason=reason))
    return {name: replace(one, regions=_regions(candidates[name])) for name, one in made.items()}


def _regions(one: Found) -> tuple[tuple[tuple[str, ...], ...], ...]:
    return tuple(tuple(tuple(branch) for branch in region) for region in one.groups)


@contextmanager
def _called(found: Iterator[Found] | Any, note: Callable[[Found, torch.Tensor], None]) -> Iterator[None]:
    """Every module's own ``forward`` calls ``note`` first, where it is called with one tensor."""
    modules = [one.module for one in found]
    saved = [module.__dict__.get("forward") for module in modules]

    def noting(one: Found) -> Callable[..., Any]:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
                note(one, args[0])
            return type(self).forward(self, *args, **kwargs)

        return forward

    try:
        for one in found:
            one.module.__dict__["forward"] = types.MethodType(noting(one), one.module)
        yield
    finally:
        for module, own in zip(modules, saved, strict=True):
            module.__dict__.pop("forward", None)
            if own is not None:
                module.__dict__["forward"] = own


def measure(one: Found, x: torch.Tensor, *, training: bool, lanes_of: LanesOf = lanes_for) -> BranchReport:
    """Both ways on input ``x``, after a check that they compute the same."""
    assert one.program is not None
    report = BranchReport(one.name, type(one.module).__name__)
    lanes = lanes_of(x.detach())
    if lanes is None:
        where = "on a CPU" if not x.is_cuda else "on another device than the current, in a checkpoint or a transform"
        return replace(report, reason=f"there are no streams {where}")
    reason = disagreement(one.module, one.program, x, training=training, lanes_of=lanes_of)
    if reason:
        return replace(report, reason=reason)
    program = one.program
    step = Pass(one.module, x, training=training)
    calls = [
        lambda: step(lambda module, value: execute(program, module, value, lanes)),
        lambda: step(lambda module, value: type(module).forward(module, value)),
    ]
    peaks = [_held(call, x.device) if x.is_cuda else None for call in calls]
    times = rounds(calls, x.device, budget_ms=BUDGET_MS)
    shares = sorted(share(own, its, x.device.type) for own, its in zip(*times, strict=True))
    return replace(
        report,
        on_streams=wins(shares, x.device.type),
        streams_ms=median_ms(times[0]),
        sequence_ms=median_ms(times[1]),
        streams_peak=peaks[0],
        sequence_peak=peaks[1],
    )


class Pass:
    """One module's forward of one input, in training with its gradients; ``p.grad`` is left alone.

    Calling it gives the results and the gradients, ``None`` for those that there are not; ``wrote`` then says whether
    the forward wrote into its input.
    """

    def __init__(self, module: nn.Module, x: torch.Tensor, *, training: bool) -> None:
        self._module, self._training = module, training
        self._x = x.detach().requires_grad_(training and x.requires_grad)
        self._weights = [p for p in module.parameters() if training and p.requires_grad]
        self.wrote = False

    def __call__(self, forward: Callable[[nn.Module, torch.Tensor], Any]) -> list[torch.Tensor | None]:
        with torch.set_grad_enabled(self._training):
            # A copy: in a network it is no leaf either, and the forward may write into it.
            value = self._x.clone()
            before = value._version
            results = _floats(forward(self._module, value))
            self.wrote = value._version != before
            wanted = [t for t in (self._x, *self._weights) if t.requires_grad]
            heads = [result for result in results if result.requires_grad]
            if not wanted or not heads:
                return list(results)
            grads = torch.autograd.grad(heads, wanted, [head.detach() for head in heads], allow_unused=True)
        return [*(result.detach() for result in results), *grads]


def _floats(value: object) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def disagreement(
    module: nn.Module, program: Program, x: torch.Tensor, *, training: bool, lanes_of: LanesOf = lanes_for
) -> str:
    """How the program, in sequence and on streams, differs from the module's forward of ``x``; empty where it does not.

    Random numbers are the same for all, and moved on; a branch that writes into what branches share is told too.
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
                found = step(way)
            except Exception as error:
                if name == "forward" or isinstance(error, torch.OutOfMemoryError):
                    raise
                return f"its traced forward, {name}, raised {type(error).__name__}: {error}"
        if watching.wrote:
            return "a branch writes into what branches share"
        if name == "forward":
            want, wrote = found, step.wrote
        elif wrote and not step.wrote:
            return "its forward writes into its input, which a trace does not repeat"
        elif len(found) != len(want) or not all(map(_close, found, want)):
            return f"its traced forward, {name}, gives something else"
    return ""


def _close(got: torch.Tensor | None, want: torch.Tensor | None) -> bool:
    if got is None or want is None:
        return got is want
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if torch.equal(got, want):
        return True
    apart = float((got.double() - want.double()).norm())
    return apart <= TOLERANCE.get(got.dtype, 2e-2) * float(want.double().norm())


def _held(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that the allocator takes from the device for one run: what one stream freed, another cannot have."""
    call()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    call()
    return torch.cuda.max_memory_reserved(device) - before


def _whole(model: nn.Module, example: object, training: bool) -> str:
    """Why all must run in sequence: the model's whole step is slower on streams. Empty where it is not."""
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

    with state_kept(model):
        try:
            times = rounds([step, sequence], device, budget_ms=BUDGET_MS)
        except torch.OutOfMemoryError as error:
            return f"the whole step on streams ran out of memory: {str(error).splitlines()[0]}"
    own, its = median_ms(times[0]), median_ms(times[1])
    if statistics.median(share(a, b, device.type) for a, b in zip(*times, strict=True)) <= 1.0:
        return ""
    return f"the whole step took {own:.3f} ms on streams, {its:.3f} ms in sequence"
