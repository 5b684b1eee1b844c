"""What every solver's run takes from malloc, each allocation counted, as lines of JSON. Run under ``counted.c``.

Arguments: torch's threads, and ``hide`` for runs that take memory which nothing declares.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tilewise import execute, solvers
from tilewise.plan import Plan
from tilewise.planner.measuring.times import peak_bytes
from tilewise.planner.search.leaves import has_exact_memory
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers import Solver, Split

SQUARE, SIGNAL, CUBE = (Axis(20, 3, 1, 1, 1, 1),) * 2, (Axis(200, 9, 1, 1, 4, 4),), (Axis(9, 3, 1, 1, 1, 1),) * 3
PROBLEMS = (
    ConvProblem(Pass.FPROP, 4, 16, 24, SQUARE),
    ConvProblem(Pass.FPROP, 3, 8, 8, SIGNAL),
    ConvProblem(Pass.FPROP, 2, 8, 8, CUBE),
    ConvProblem(Pass.FPROP, 4, 8, 12, (Axis(20, 5, 2, 1, 2, 2), Axis(24, 5, 2, 1, 2, 2))),
    ConvProblem(Pass.FPROP, 1, 19, 18, (Axis(23, 3), Axis(23, 3))),
    ConvProblem(Pass.FPROP, 2, 16, 16, (Axis(28, 7, 1, 1, 3, 3),) * 2, 16),
    ConvProblem(Pass.FPROP, 4, 32, 32, (Axis(14, 1),) * 2),
    ConvProblem(Pass.FPROP, 4, 16, 24, SQUARE, dtype="bf16", out_dtype="bf16"),
)
GROUPED = ConvProblem(Pass.FPROP, 6, 16, 8, (Axis(22, 4), Axis(22, 4)), 2)
"""Whose input gradient takes 84 KB of torch's in every call."""
CONFIGS = 2
HIDDEN = 256 << 20


@dataclass(frozen=True)
class Count:
    """Of one call: what malloc gave at the most, what was promised, and what the planner would take it for."""

    solver: str
    exact: bool
    config: str
    problem: str
    taken: int
    promised: int
    measured: int


class Hiding:
    """A solver's run with an allocation that nothing declares."""

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        self._run = run

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        np.empty(HIDDEN, dtype=np.uint8)  # not torch's, and never written
        return self._run(*tensors)


def counts(hide: bool = False) -> Iterator[Count]:
    """Some configs of every solver on every problem and pass."""
    counter = ctypes.CDLL(None)
    counter.counted_alive.restype = counter.counted_most.restype = ctypes.c_longlong
    some = PROBLEMS[:1] if hide else (*PROBLEMS, GROUPED)
    for problem in (replace(one, pass_=pass_) for one in some for pass_ in Pass):
        for solver in solvers.all_solvers():
            if not isinstance(solver, Split) and not solver.why_not(problem):
                for config, _ in list(solver.offers(problem, None))[: 1 if hide else CONFIGS]:
                    plan = Plan(problem.key, solver.name, solver.version, config)
                    yield count_of(counter, solver, plan, problem, hide)


def count_of(counter: ctypes.CDLL, solver: Solver, plan: Plan, problem: ConvProblem, hide: bool) -> Count:
    a, b = make_operands(problem)
    out = make_result(problem)
    bound = execute.bind(plan, problem, a, b, out)
    run: Callable[..., torch.Tensor] = Hiding(bound) if hide else bound
    result = 0 if not solver.own_output else problem.nbytes(problem.result)
    execute.release_workspaces()
    execute.touch_workspace(bound.workspace, a.device)

    def call() -> torch.Tensor:
        return run(a, b, None, None if solver.own_output else out)

    for _ in range(3):  # what libraries keep for good
        call()
    found = min(_taken(counter, call) for _ in range(3)) - result
    exact = has_exact_memory(plan)
    measured = peak_bytes(call, a.device, result, rough=not exact)
    promised = solver.hidden_workspace(problem, plan.config)
    return Count(solver.name, exact, str(plan.config), problem.key, found, promised, measured)


def _taken(counter: ctypes.CDLL, call: Callable[[], object]) -> int:
    before = counter.counted_alive()
    counter.counted_anew()
    kept = call()
    most = int(counter.counted_most() - before)
    del kept
    return most


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(int(arguments[0]))
    with torch.no_grad():
        for count in counts("hide" in arguments):
            sys.stdout.write(json.dumps(vars(count)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
