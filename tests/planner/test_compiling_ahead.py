"""What is compiled beside a candidate that has to be, without a GPU: nothing here is compiled."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewise import execute
from tilewise.kernels.building import workers
from tilewise.kernels.building.ahead import compiled_apart
from tilewise.kernels.building.kept import only_kept, refuse
from tilewise.plan import Config, Measurement, Plan
from tilewise.planner.options import Options
from tilewise.planner.search.offers import Offer
from tilewise.planner.search.pruning import BEHIND, COMPILED
from tilewise.planner.search.rates import LOST
from tilewise.planner.search.trial import Trial
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import Tensors

PROBLEM = ConvProblem(Pass.FPROP, 2, 3, 4, (Axis(8, 3),) * 2, device="cuda:some GPU")
BEST_MS = 1.0


def solver(name: str, *, compiles: bool = True, most: int = 9) -> Any:
    return SimpleNamespace(
        name=name, version=1, compiles=compiles, kin="", most=lambda problem: most, most_compiled=3,
        family=lambda config: name, while_it_pays=False,
    )  # fmt: skip


def waiting(*entries: tuple[Any, float]) -> list[Offer]:
    return [Offer(estimate, n, each, Config(n=n), 0) for n, (each, estimate) in enumerate(entries)]


def trial(rigor: str = "measure", known: Any = None, prior_ms: Any = None) -> Trial:
    x, w, y = (torch.empty(PROBLEM.shape(role)) for role in "xwy")
    tensors = Tensors((x, w), (y,))
    unused: Any = None
    options = Options(rigor=rigor)  # type: ignore[arg-type]
    found = Trial(PROBLEM, tensors, options, unused, unused, known or {}, set(), {}, lambda error: "")
    found.best_ms = BEST_MS
    found.pruning.prior_ms = prior_ms or {}
    return found


def try_first(found: Trial, listed: list[Offer]) -> Measurement:
    """Measure the first of ``listed`` as :meth:`Trial.run` does."""
    found._waiting = listed[:0:-1]
    found._consider(listed[0])
    return found.found[-1]


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """Candidates that are bound ahead, each where a pool serves the thread."""
    found: list[tuple[str, object]] = []

    def bind(plan: Plan, *rest: Any) -> None:
        refuse("it")
        if isinstance(getattr(workers._served, "pool", None), workers.Pool):
            found.append((plan.solver, plan.config["n"]))
        raise RuntimeError("does not compile")

    monkeypatch.setattr(execute, "bind", bind)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return found


def test_what_will_be_measured_is_bound(bound: list[tuple[str, object]]) -> None:
    """Of each family the first that is worth it: others only once it has shown what it takes."""
    own, other, ready = solver("own"), solver("other"), solver("ready", compiles=False)
    far, slow = solver("far"), solver("slow")
    prior = {("other", 1, Config(n=3)): LOST * BEST_MS * 1.01}
    listed = waiting(
        (own, 1.0), (own, 1.05), (ready, 1.1), (other, 1.1), (other, 1.15), (other, 1.2),
        (slow, COMPILED * BEST_MS * 1.01), (far, BEHIND * 1.0 * 1.01),
    )  # fmt: skip
    assert "does not compile" in try_first(trial(prior_ms=prior), listed).reason
    assert sorted(bound) == [("other", 4), ("own", 0)]


def test_what_is_known_is_not_bound(bound: list[tuple[str, object]]) -> None:
    own, full = solver("own"), solver("full", most=1)
    known = {("full", 1, Config(n=1)): Measurement("full", 1, Config(n=1), 1.0, 0)}
    try_first(trial(known=known), waiting((own, 1.0), (full, 1.0), (full, 1.1)))
    assert bound == [("own", 0)]


def test_patience_measures_all_and_so_compiles_all(bound: list[tuple[str, object]]) -> None:
    own = solver("own", most=1)
    try_first(trial("patient"), waiting((own, 0.1), (own, 0.2), (own, 9.0)))
    assert sorted(bound) == [("own", 0), ("own", 1), ("own", 2)]


@pytest.mark.parametrize("rigor", ["estimate", "wisdom_only"])
def test_what_is_not_measured_is_not_compiled(rigor: str, bound: list[tuple[str, object]]) -> None:
    try_first(trial(rigor), waiting((solver("own"), 0.1), (solver("own"), 0.1)))
    assert not bound


def test_an_interruption_ends_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[workers.Pool] = []

    def bind(*rest: Any) -> None:
        refuse("it")
        taken.append(workers._served.pool)
        raise KeyboardInterrupt

    monkeypatch.setattr(execute, "bind", bind)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    with pytest.raises(KeyboardInterrupt):
        try_first(trial(), waiting((solver("own"), 0.1), (solver("own"), 0.1)))
    assert taken
    assert all(pool.stopped for pool in taken)
    with workers.opened(2) as pool:
        assert not pool.stopped


def test_what_was_bound_ahead_is_measured_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, so that what is bound in vain is bound again where its reason is kept."""
    own, calls = solver("own"), []

    def bind(plan: Plan, *rest: Any) -> Any:
        refuse("it")
        calls.append(plan.config["n"])
        if len(calls) > 2:
            raise RuntimeError("bound again")
        return SimpleNamespace(workspace=0)

    monkeypatch.setattr(execute, "bind", bind)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    found, other = trial(), solver("other")
    assert "bound again" not in try_first(found, waiting((own, 0.1), (other, 0.11))).reason
    assert sorted(calls) == [0, 1]
    assert "bound again" not in found.measure(other, Config(n=1)).reason
    assert "bound again" in found.measure(other, Config(n=1)).reason


def test_what_is_compiled_is_bound_when_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    own, calls = solver("own"), []

    def bind(plan: Plan, *rest: Any) -> Any:
        calls.append((plan.config["n"], only_kept()))
        return SimpleNamespace(workspace=0)

    monkeypatch.setattr(execute, "bind", bind)
    try_first(trial(), waiting((own, 0.1), (own, 0.2)))
    assert calls == [(0, True)]
    assert not only_kept()


def test_the_last_is_compiled_by_a_worker_too(bound: list[tuple[str, object]]) -> None:
    try_first(trial(), waiting((solver("own"), 0.1), (solver("own", compiles=False), 0.2)))
    assert bound == [("own", 0)]


def test_all_kernels_of_all_candidates_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    order: list[str] = []
    names = {0: ("a", "b"), 1: ("b", "c")}

    def bind(plan: Plan, *rest: Any) -> Any:
        loads = [functools.partial(load, name) for name in names[int(str(plan.config["n"]))]]
        workers.all_of(loads)
        order.append("bound")
        return SimpleNamespace(workspace=0)

    def load(name: str) -> None:
        if name not in asked:
            if workers.is_collecting():
                workers._served.collected.append(name)
            refuse(name)
            raise RuntimeError("compiled here")

    def try_to_ask(pool: workers.Pool, job: str) -> None:
        order.append("asked")
        asked.append(job)

    monkeypatch.setattr(execute, "bind", bind)
    monkeypatch.setattr(workers.Pool, "try_to_ask", try_to_ask)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    try_first(trial(), waiting((solver("own"), 0.1), (solver("other"), 0.11)))
    assert sorted(asked) == ["a", "b", "c"]
    assert order == ["asked"] * 3 + ["bound"] * 2


def test_beside_a_program_missing_kernels_are_collected_and_compiled_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: set[str] = set()
    asked: list[list[str]] = []
    done: list[tuple[str, ...]] = []

    class Pool:
        def compile_all(self, jobs: list[str]) -> Any:
            asked.append(jobs)
            kept.update(jobs)
            return lambda: True

    def opened(count: int, *, gently: bool) -> Any:
        assert gently
        return contextlib.nullcontext(Pool())

    def job(*names: str) -> None:
        for name in names:
            if name not in kept:
                workers._served.collected.append(name)
                refuse(name)
        done.append(names)

    def fails() -> None:
        raise RuntimeError("does not bind")

    monkeypatch.setattr(workers, "opened", opened)
    jobs = [("a", "b"), ("b",), (), ("a", "c", "d")]
    compiled_apart([fails, *(functools.partial(job, *names) for names in jobs)])
    assert asked == [["a", "b"], ["c"], ["d"]]
    assert sorted(done) == sorted(jobs)
    assert workers._served.collected is None


def test_a_kernel_that_no_process_can_be_told_of_is_left() -> None:
    tried: list[int] = []

    def job() -> None:
        tried.append(1)
        refuse("a kernel in CUDA C++")

    compiled_apart([job])
    assert tried == [1]
