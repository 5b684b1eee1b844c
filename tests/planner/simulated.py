"""Solvers whose times and workspaces a test sets: a clock that they move, results that are right unless told otherwise.

What the planner decides from times is then the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from tests import toys

from tilewise import solvers
from tilewise.plan import Config, Measurement
from tilewise.planner.measuring import times as measure
from tilewise.planner.options import Options
from tilewise.planner.search import benchmark, finals
from tilewise.planner.search.known import Store
from tilewise.planner.search.search import Search
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers import Cost, Run, Solver

PROFILE = {"copy": 1.0, "launch": 0.0, "kernel": 0.0, "fp32": 1.0, "tf32": 1.0, "bf16": 1.0, "fp16": 1.0}
"""With these rates an estimate in ms is what a solver's cost names in flops."""
Table = Callable[[ConvProblem, Config], float]


class Clock:
    """Time as solvers say they take it, and how often each was timed."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.runs: dict[tuple[str, int], int] = {}
        """Runs by solver and batch."""

    @property
    def total(self) -> int:
        return sum(self.runs.values())


class Simulated(toys.Plain):
    """Takes ``ms(p, c)`` of simulated time and declares ``bytes(p, c)`` of workspace."""

    clock: ClassVar[Clock]
    choices: ClassVar[tuple[Config, ...]] = (Config(),)
    ms: ClassVar[Table] = staticmethod(lambda p, c: 1.0)
    bytes: ClassVar[Table] = staticmethod(lambda p, c: 0)
    estimate: ClassVar[Table | None] = None
    most_configs = 100

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        return self.choices

    def workspace(self, p: ConvProblem, c: Config) -> int:
        return int(type(self).bytes(p, c))

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        kind = type(self)
        return Cost((kind.estimate or kind.ms)(p, c), 0)  # type: ignore[arg-type]

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        run = super().bind(p, c, a, b, out)
        clock, took = self.clock, type(self).ms(p, c)

        def timed(
            a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
        ) -> torch.Tensor:
            clock.now_ms += took
            clock.runs[self.name, p.batch] = clock.runs.get((self.name, p.batch), 0) + 1
            return run(a, b, out, workspace)

        return timed


def simulated(clock: Clock, name: str, ms: Table, **traits: Any) -> Solver:
    """A right solver that takes ``ms(problem, config)``."""
    tables = {k: staticmethod(v) if k in ("bytes", "estimate", "compute") else v for k, v in traits.items()}
    kind: type[Solver] = type("Some", (Simulated,), {"clock": clock, "name": name, "ms": staticmethod(ms), **tables})
    return kind()


def torchs_own(clock: Clock, ms: Table, **traits: Any) -> Solver:
    """In the place of ``aten``."""
    return simulated(clock, "aten", ms, own_output=True, baseline=True, **traits)


@contextmanager
def world(clock: Clock, *extra: Solver) -> Iterator[None]:
    """Only these solvers, ``micro_batch`` and, where none is given, a torch that takes 1000 ms an image."""
    own = next((s for s in extra if s.baseline), None) or torchs_own(clock, lambda p, c: 1000.0 * p.batch)
    others = [s for s in extra if not s.baseline]
    ordered = tuple(sorted((own, solvers.get("micro_batch"), *others), key=lambda solver: solver.name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solvers, "all_solvers", lambda: ordered)
        patch.setattr(solvers, "baseline", lambda problem: own)
        patch.setattr(measure.Timer, "time", lambda self, call, *_: _took(clock, call))
        patch.setattr(finals, "rounds", lambda calls, *_, **__: [[_took(clock, call)] for call in calls])
        for name in ("peak_bytes", "counted_bytes"):
            patch.setattr(benchmark, name, _nothing)  # what the reference allocates is not the solver's
        with toys.one_thread():
            yield


def _nothing(call: Callable[[], object], *_: object, **__: object) -> int:
    call()
    return 0


def _took(clock: Clock, call: Callable[[], object]) -> measure.Took:
    start = clock.now_ms
    call()
    return measure.Took(clock.now_ms - start, 0.0)


def search(problem: ConvProblem, store: Store | None = None, **options: Any) -> Search:
    """A search with nothing known, unless in ``store``."""
    return Search(problem, Options(**options), lambda device: PROFILE, store or Store(lambda p: {}))


def reasons(log: Sequence[Measurement]) -> dict[str, str]:
    """The last word on each solver that was lost."""
    return {solver: reason for solver, reason in {m.solver: m.reason for m in log}.items() if reason}
