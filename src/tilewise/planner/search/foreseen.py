"""Which candidates a search may look at, told without running anything, so that their kernels can be compiled before.

A search decides by what it measures. So this is a guess on a GPU, where each kernel takes seconds to compile: the
candidates that the search would begin with, and more of them than it is expected to measure. On a CPU kernels are few,
and all candidates are named.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from tilewise import execute, solvers
from tilewise.kernels.building.ahead import compiled_side_by_side
from tilewise.kernels.building.target import Architecture, compiling_for
from tilewise.machine.threads import with_threads
from tilewise.plan import Config, Plan
from tilewise.planner.gate import MOST_NESTED
from tilewise.planner.options import Options, first_line
from tilewise.planner.search.estimate import Profile
from tilewise.planner.search.offers import Offer, Offers
from tilewise.planner.search.pruning import Pruning
from tilewise.problems.base import Problem
from tilewise.solvers import Split

__all__ = ["TYPICAL", "compile_all", "foreseen", "of_first_parts", "to_compile"]

TYPICAL: dict[str, Profile] = {
    "cuda": {"copy": 2.5e9, "fp32": 5e10, "tf32": 4e11, "bf16": 7e11, "fp16": 7e11, "launch": 0.006, "kernel": 0.002},
    "cpu": {"copy": 1e7, "fp32": 1e8, "tf32": 1e8, "bf16": 1e8, "fp16": 1e8, "launch": 0.001, "kernel": 0.001},
}
"""Rates that estimates are made with, as nothing is measured: of one H100, and of a few cores. Estimates are compared
with each other, so only the ratios matter."""
MARGIN = 2.0
"""How many times the best estimate the fastest candidate may take when it is measured."""
LESS = 2
"""Sizes of micro-batches whose kernels are foreseen on a GPU where nothing exceeds the limit."""


def foreseen(problem: Problem, options: Options) -> Iterator[tuple[Problem, Plan]]:
    """Problems that planning ``problem`` may meet, itself and its parts, each with leaves that it may try there."""
    yield from _of(problem, options, TYPICAL[problem.device_type], None, -1, 0)


def of_first_parts(
    problem: Problem, options: Options, profile: Profile, picked: Sequence[Offer]
) -> Iterator[tuple[Problem, Plan]]:
    """Parts of the size that is tried first by each split, without a limit, with those leaves of ``picked`` that are
    likely there.
    """
    if options.workspace is not None:
        return
    for split in _splits(problem, options, -1, 0, blocked=False):
        sizes = () if split.at_once else split.sizes(problem, options.batch_sizes)
        for size in sizes[:1]:
            child = split.child(problem, size)
            offers = Offers(child, options, profile, is_root=False, only=_keys(picked))
            for offer in _likely(child, options, offers.ranked(), narrows=True):
                yield child, Plan(child.key, *offer.key)


def to_compile(
    problems: Iterable[Problem],
    options: Options,
    architecture: Architecture | None,
    step: Callable[[str], None] = lambda text: None,
) -> list[tuple[Problem, Plan]]:
    """All that :func:`foreseen` names for ``problems`` on a GPU ``architecture``, or on this CPU; equal ones once.

    ``step`` is told each problem's key.
    """
    found: dict[tuple[str, str, Config], tuple[Problem, Plan]] = {}
    with contextlib.nullcontext() if architecture is None else compiling_for(architecture):
        for problem in problems:
            step(problem.key)
            for part, plan in foreseen(problem, options):
                found.setdefault((part.key, plan.solver, plan.config), (part, plan))
    return list(found.values())


def compile_all(
    candidates: Sequence[tuple[Problem, Plan]],
    architecture: Architecture | None,
    step: Callable[[str], None] = lambda text: None,
) -> dict[str, str]:
    """Compile the kernels of ``candidates`` for a GPU ``architecture``, or for this CPU where it is ``None``.

    They are kept where compiled kernels are; those that are there already are not compiled again. Nothing is run. An
    interruption loses what is being compiled, nothing else. ``step`` is told each candidate. Returns those that cannot
    be compiled, each with the reason.
    """
    lost: dict[str, str] = {}

    def compiled(candidate: tuple[Problem, Plan]) -> str:
        problem, plan = candidate
        name = f"{plan.solver} {plan.config}"
        try:
            execute.compile_only(plan, problem)
        except Exception as error:  # as in a trial: a candidate is lost, and said with its reason
            lost.setdefault(name, first_line(error))
        return name

    if architecture is None:
        for candidate in candidates:
            step(f"{candidate[1].solver} {candidate[1].config}")
            compiled(candidate)
    else:
        with compiling_for(architecture):
            compiled_side_by_side([functools.partial(compiled, candidate) for candidate in candidates], step)
    return lost


def _keys(picked: Sequence[Offer]) -> frozenset[tuple[str, Config]]:
    """Solvers and configs of offers."""
    return frozenset((offer.solver.name, offer.config) for offer in picked)


def _of(
    problem: Problem, options: Options, profile: Profile, picked: Sequence[Offer] | None, level: int, depth: int
) -> Iterator[tuple[Problem, Plan]]:
    """:func:`foreseen` of a part that splits up to ``level`` have made, ``depth`` of them.

    Parts are tried with what was ``picked`` for the whole, on a GPU and without a limit: under one, what exceeds it on
    the whole may fit a part.
    """
    offers = Offers(problem, options, profile, is_root=not depth)
    if picked is not None:
        offers.only = _keys(picked)
    found = offers.ranked()
    if problem.device_type == "cuda":
        found = _likely(problem, options, found)
    for offer in found:
        yield problem, Plan(problem.key, *offer.key)
    blocked = options.workspace is not None  # what is measured may exceed a limit that estimates keep
    handed_on = found if problem.device_type == "cuda" and not blocked else None
    for split in _splits(problem, options, level, depth, blocked=blocked):
        if split.at_once:
            yield from _at_once(split, problem, options, depth)
            continue
        sizes = [*split.sizes(problem, options.batch_sizes), *split.between(problem, options.batch_sizes)]
        if handed_on is not None and options.rigor != "patient":
            sizes = sizes[:LESS]
        for size in sizes:
            yield from _of(split.child(problem, size), options, profile, handed_on, split.level, depth + 1)


def _likely(problem: Problem, options: Options, offers: Sequence[Offer], *, narrows: bool = False) -> list[Offer]:
    """Those of ``offers`` that compile and are not pruned, where the best takes some time more than is estimated.

    Unless it ``narrows``, also those that are measured only where others turn out slower than estimated.
    """
    pruning = Pruning(problem, {}, options.rigor == "patient", narrows=narrows)
    pruning.compare(offers)
    best_ms = MARGIN * min((offer.estimate_ms for offer in offers), default=0.0)
    return pruning.to_compile(offers, best_ms)


def _splits(problem: Problem, options: Options, level: int, depth: int, *, blocked: bool) -> Iterator[Split]:
    """Splits that a search would cut ``problem`` by; ``blocked`` says that a limit may keep something out."""
    if depth == MOST_NESTED or options.batch_sizes == "undivided":
        return
    for solver in solvers.solving(problem):
        if not isinstance(solver, Split) or solver.level <= level or options.excludes(solver):
            continue
        if solver.why_not(problem) or (solver.at_once and depth):
            continue
        if options.rigor == "patient" or blocked or not solver.idle(problem):
            yield solver


def _at_once(split: Split, problem: Problem, options: Options, depth: int) -> Iterator[tuple[Problem, Plan]]:
    """The leaves of parts that run at once, each on its share of torch's threads."""
    threads = torch.get_num_threads()
    alone = replace(options, batch_sizes="undivided")
    for sizes in split.divisions(problem, threads):
        found: list[tuple[Problem, Plan]] = []

        def collect(sizes: tuple[int, ...] = sizes, found: list[tuple[Problem, Plan]] = found) -> None:
            for size in dict.fromkeys(sizes):
                found.extend(_of(split.child(problem, size), alone, TYPICAL["cpu"], None, split.level, depth + 1))

        with_threads(collect, max(1, threads // len(sizes)))
        yield from found
