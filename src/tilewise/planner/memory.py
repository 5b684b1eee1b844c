"""Plans in wisdom: under which words they are kept, and which of them serve a request."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tilewise import solvers
from tilewise.device import environment
from tilewise.execute import parts_of
from tilewise.plan import Plan
from tilewise.planner.options import RIGORS, Options
from tilewise.problem import ConvProblem
from tilewise.solvers import Split
from tilewise.wisdom import Kept, Wisdom
from tilewise.wisdom.rows import nodes

__all__ = [
    "REPLAYED",
    "constraints_text",
    "fits",
    "is_current",
    "place_text",
    "plan_text",
    "read_fronts",
    "read_plans",
    "satisfying",
]

REPLAYED = " from CUDA graphs"
"""Added to the environment of times without launches, and to the constraints of plans by them."""
EFFORT = {"estimate": 0, "wisdom_only": 0, "measure": 1, "patient": 2}
MOST_PLACES = 64
"""Plans of a front that are read: one that a search found has at most 16."""

Entry = tuple[str, str, Options]
"""Key of an environment, key of a problem, options."""


def satisfying(options: Options) -> list[Options]:
    """Options whose plans serve a request for ``options``: with as much effort or more, the most thorough first."""
    rigors = (r for r in RIGORS if r != "wisdom_only" and EFFORT[r] >= EFFORT[options.rigor])
    return [replace(options, rigor=rigor) for rigor in sorted(rigors, key=lambda r: -EFFORT[r])]


def constraints_text(options: Options) -> str:
    """What plans are kept under, but for the effort."""
    return (
        f"workspace={options.workspace} batch_sizes={options.batch_sizes} deterministic={options.deterministic} "
        f"error_limit={options.error_limit} strict={options.strict}"
        + (f" exclude={','.join(options.exclude)}" if options.exclude else "")
        + (REPLAYED if options.cuda_graphs else "")
    )


def plan_text(options: Options) -> str:
    """What a plan is kept under."""
    return f"rigor={options.rigor} {constraints_text(options)}"


def place_text(place: int, options: Options) -> str:
    """What the plan at one place of a front is kept under."""
    return f"front={place} {plan_text(options)}"


def read_plans(wisdom: Wisdom, problems: Iterable[ConvProblem], options: Options) -> Iterator[tuple[Entry, Kept[Plan]]]:
    """Plans that serve a request for ``options``, all problems in one query an effort."""
    by_device: dict[str, dict[str, None]] = {}
    for problem in problems:
        by_device.setdefault(problem.device, {})[problem.key] = None
    for device, keys in by_device.items():
        key = environment(device).key
        for asked in satisfying(options):
            for problem_key, kept in wisdom.kept_plans(key, keys, plan_text(asked)).items():
                yield (key, problem_key, asked), kept


def read_fronts(
    wisdom: Wisdom, problems: Iterable[ConvProblem], options: Options, known: Iterable[Entry]
) -> Iterator[tuple[Entry, tuple[Kept[Plan], ...]]]:
    """Fronts but those ``known``, which are kept as plans are, place by place, all problems in one query a place.

    The last plan follows itself: what is behind it was left by a longer front, and one that was not written to its end
    is no front.
    """
    wanted, done = list(problems), set(known)
    for device, asked in itertools.product({p.device for p in wanted}, satisfying(options)):
        key = environment(device).key
        here = dict.fromkeys(p.key for p in wanted if p.device == device)
        fronts: dict[str, list[Kept[Plan]]] = {k: [] for k in here if (key, k, asked) not in done}
        for place in range(MOST_PLACES):
            found = wisdom.kept_plans(key, fronts, place_text(place, asked)) if fronts else {}
            fronts = {problem: [*fronts[problem], kept] for problem, kept in found.items()}
            for problem, kept in list(fronts.items()):
                if [k.value for k in kept[-2:-1]] == [k.value for k in kept[-1:]]:
                    yield (key, problem, asked), tuple(fronts.pop(problem)[:-1])
            if not fronts:
                break


def written(plan: Plan) -> tuple[object, ...]:
    """What ``plan`` does, to the letter: in a config that somebody wrote 1 may stand as 1.0."""
    return plan.solver, plan.config.key, tuple(map(written, plan.children))


def is_current(plan: Plan) -> bool:
    """Whether it and all its parts are by solvers that there are, of these versions: others are stale, not wrong."""
    versions = {solver.name: solver.version for solver in solvers.all_solvers()}
    return all(versions.get(node.solver) == node.version for node in nodes(plan))


def fits(plan: Plan, problem: ConvProblem, options: Options) -> bool:
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
