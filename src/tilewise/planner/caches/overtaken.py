"""Remembered plans that torch's own choice has overtaken: it was timed again since, beside others, and was faster.

One problem may be planned under several options, such as a workspace limit and none. Each search times torch's choice
anew, and keeps that time for all of them. A plan that was faster than an older time may be slower than the new one.
Times of two runs say little beside each other, so such a problem is not given to torch: it is decided anew, in turns.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewise import solvers
from tilewise.plan import Plan
from tilewise.planner.caches.measurements import baselines
from tilewise.planner.options import Options
from tilewise.problems.base import Problem
from tilewise.wisdom import Wisdom

__all__ = ["overtaken"]

SHARE = 0.95
"""A plan is overtaken where torch's choice takes less than this share of its time: less may be noise."""


def overtaken(wisdom: Wisdom, plans: Mapping[Problem, Plan], options: Options) -> list[Problem]:
    """The problems on a CPU whose remembered plan is slower than torch's choice, which ``options`` would allow.

    On a GPU the host's time counts as well, of which this knows nothing.
    """
    if options.cuda_graphs or options.deterministic or options.error_limit is not None:
        return []
    replaced = [
        problem
        for problem, plan in plans.items()
        if problem.device_type == "cpu"
        and plan.solver != solvers.baseline(problem).name
        and not options.excludes(solvers.baseline(problem))
    ]
    found = []
    for problem, torchs in baselines(wisdom, replaced).items():
        keeps = options.workspace is None or (torchs.workspace or 0) <= options.workspace
        if keeps and torchs.time_ms is not None and torchs.time_ms < SHARE * plans[problem].time_ms:
            found.append(problem)
    return found
