"""Plans in wisdom: the text under which they are kept, and which of them serve a request."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tilewise import solvers
from tilewise.execute import parts_of
from tilewise.machine.device import environment
from tilewise.plan import Measurement, Plan
from tilewise.planner.options import RIGORS, Options
from tilewise.problems.base import Problem
from tilewise.solvers import Split
from tilewise.wisdom import Kept, Wisdom
from tilewise.wisdom.rows import nodes

__all__ = [
    "REPLAYED",
    "constraints_text",
    "fits",
    "is_current",
    "is_sane",
    "place_text",
    "plan_text",
    "read_fronts",
    "read_plans",
    "satisfying",
    "written",
]

MOST_MS, MOST_WORKSPACE = 1e9, 1 << 50
"""Larger values from elsewhere cannot have been measured: eleven days in ms, a pebibyte."""
REPLAYED = " from CUDA graphs"
"""Added to the environment of times without launches, and to the constraints of plans by them."""
EFFORT = {"estimate": 0, "wisdom_only": 0, "measure": 1, "patient": 2}
MOST_PLACES = 64
"""Most plans of a front that are read: a front from a search has at most 16."""

Entry = tuple[str, str, Options]
"""An environment's key, a problem's key, and the options of a plan."""


def satisfying(options: Options) -> list[Options]:
    """The options whose plans serve a request for ``options``: as much effort or more, the most thorough first."""
    rigors = (r for r in RIGORS if r != "wisdom_only" and EFFORT[r] >= EFFORT[options.rigor])
    return [replace(options, rigor=rigor) for rigor in sorted(rigors, key=lambda r: -EFFORT[r])]


def constraints_text(options: Options) -> str:
    """The constraints in ``options`` as text, without the effort."""
    return (
        f"workspace={options.workspace} batch_sizes={options.batch_sizes} deterministic={options.deterministic} "
        f"error_limit={options.error_limit} strict={options.strict}"
        + (f" exclude={','.join(options.exclude)}" if options.exclude else "")
        + (f" share_with={','.join(options.share_with)}" if options.share_with else "")
        + (REPLAYED if options.cuda_graphs else "")
    )


def plan_text(options: Options) -> str:
    """The text under which a plan for ``options`` is kept."""
    return f"rigor={options.rigor} {constraints_text(options)}"


def place_text(place: int, options: Options) -> str:
    """The text under which the plan at one place of a front is kept."""
    return f"front={place} {plan_text(options)}"


def read_plans(wisdom: Wisdom, problems: Iterable[Problem], options: Options) -> Iterator[tuple[Entry, Kept[Plan]]]:
    """Plans in wisdom that serve a request for ``options``: one query for all problems at each effort."""
    by_device: dict[str, dict[str, None]] = {}
    for problem in problems:
        by_device.setdefault(problem.device, {})[problem.key] = None
    for device, keys in by_device.items():
        key = environment(device).key
        for asked in satisfying(options):
            for problem_key, kept in wisdom.kept_plans(key, keys, plan_text(asked)).items():
                yield (key, problem_key, asked), kept


def read_fronts(
    wisdom: Wisdom, problems: Iterable[Problem], options: Options, known: Iterable[Entry]
) -> Iterator[tuple[Entry, tuple[Kept[Plan], ...]]]:
    """Fronts in wisdom, except those in ``known``: kept plan by plan, and read for all problems in one query a place.

    The last plan is written twice, which marks the end: plans behind it are left from a longer front. A front without
    that mark was not written to its end, and is not used.
    """
    wanted, done = list(problems), set(known)
    for device, asked in itertools.product({p.device for p in wanted}, satisfying(options)):
        key = environment(device).key
        here = dict.fromkeys(p.key for p in wanted if p.device == device)
        fronts: dict[str, list[Kept[Plan]]] = {k: [] for k in here if (key, k, asked) not in done}
        for place in range(MOST_PLACES):
            kept_at_place = wisdom.kept_plans(key, fronts, place_text(place, asked)) if fronts else {}
            fronts = {problem: [*fronts[problem], kept] for problem, kept in kept_at_place.items()}
            for problem, kept in list(fronts.items()):
                if [k.value for k in kept[-2:-1]] == [k.value for k in kept[-1:]]:
                    yield (key, problem, asked), tuple(fronts.pop(problem)[:-1])
            if not fronts:
                break


def written(plan: Plan) -> tuple[object, ...]:
    """What ``plan`` does, compared as text: in a config that somebody wrote, 1 may stand as 1.0."""
    return plan.solver, plan.config.key, tuple(map(written, plan.children))


def is_current(plan: Plan) -> bool:
    """Whether the plan and all its parts are by current versions of known solvers. Other plans are stale, not wrong."""
    versions = {solver.name: solver.version for solver in solvers.all_solvers()}
    return all(versions.get(node.solver) == node.version for node in nodes(plan))


def fits(plan: Plan, problem: Problem, options: Options) -> bool:
    """Whether a plan names solvers of this version that can solve the problem within the limit."""
    if options.workspace is not None and plan.workspace > options.workspace:
        return False
    try:
        solver = solvers.get(plan.solver)
        if solver.version != plan.version or solver.why_not(problem) or options.excludes(solver, plan.config):
            return False
        if not isinstance(solver, Split):
            return plan.leaf
        parts, plans = parts_of(plan, problem, solver)
        return all(
            part.problem is None or fits(child, part.problem, options) for part, child in zip(parts, plans, strict=True)
        )
    except (KeyError, ValueError):
        return False


def is_sane(entry: Kept[Measurement]) -> bool:
    """Whether a measurement has plausible numbers. Only those from elsewhere are looked at."""
    m = entry.value
    return entry.own or ((m.time_ms or 0.0) <= MOST_MS and (m.workspace or 0) <= MOST_WORKSPACE)
