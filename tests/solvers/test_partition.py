"""Parts of a batch at once: right whatever runs beside them, within their threads and their limit, planned and told."""

from __future__ import annotations

import json
import math
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests import toys
from tests.planner.simulated import PROFILE, Clock, simulated, torchs_own, world
from tests.planner.simulated import search as searched

from tilewise import execute, solvers
from tilewise.execute import Bound, PlanMismatch, bind
from tilewise.machine import threads as threads_module
from tilewise.machine.threads import bounds_threads
from tilewise.plan import Config, Plan
from tilewise.planner import Options, Planner
from tilewise.planner.search.search import Search
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.solvers.splits import partition as partition_module
from tilewise.wisdom import Wisdom

partition = solvers.get("partition")
assert isinstance(partition, solvers.Split)
needs_threads = pytest.mark.skipif(not bounds_threads(), reason="torch's threads cannot be bounded here")
LEAVES = (
    toys.toy(name="writer"),
    toys.toy(name="dense_adder", writes_views=False, accumulates=True, scratch=513),
    toys.toy(name="giver", own_output=True, scratch=64),
)
some = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two cores wherever the tests run, and the number of threads as it was."""
    monkeypatch.setattr(partition_module, "cpu_count", lambda: 2)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    execute.release_workspaces()


def plan_of(problem: ConvProblem, name: str, sizes: tuple[int, ...], config: Config | None = None) -> Plan:
    parts = [partition.child(problem, size) for size in sizes]
    children = tuple(toys.leaf(name, part, config) for part in parts)
    return Plan(problem.key, "partition", 1, Config(sizes=sizes), children, (1,) * len(sizes))


@needs_threads
@some
@given(st.data())
def test_any_partition_gives_the_reference(data: st.DataObject) -> None:
    """Views, odd batches and channels, 16-bit sums, results that are added to or begin as NaN."""
    problem = data.draw(toys.problems(batch=(2, 7)))
    threads = data.draw(st.sampled_from((1, 2, 3, 5)))
    sizes = data.draw(toys.cuts(problem.batch).filter(lambda sizes: len(sizes) > 1))
    a, b = toys.operands(problem)
    want = toys.reference(problem, a, b, 1.0, problem.bias)
    bias = toys.bias_of(problem) if problem.bias else None
    limit = toys.DTYPE_ERROR[problem.out_dtype]
    torch.set_num_threads(threads)
    with toys.installed(*LEAVES):
        parts = [part.problem for part in problem.split("batch", sizes)]
        plans = tuple(toys.leaf(data.draw(st.sampled_from(LEAVES)).name, part) for part in parts if part is not None)
        plan = Plan(problem.key, "partition", 1, Config(sizes=sizes), plans, (1,) * len(plans))
        toys.check_bound(plan, problem, a, b, bias, want, limit)


@needs_threads
@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("name", ["aten", "lowering_type1", "winograd"])
def test_real_parts_on_changing_threads(pass_: Pass, name: str) -> None:
    """The same bits whatever number of threads there is at a call, also for gradients' sums."""
    problem = toys.small(pass_, 5, channels=16, size=9)
    part = partition.child(problem, 3)
    if reasons := solvers.get(name).why_not(part):
        pytest.skip("; ".join(reasons))
    torch.set_num_threads(2)
    configs: list[Config] = []
    threads_module.with_threads(lambda: configs.extend(solvers.get(name).configs(part)), 1)
    a, b = toys.operands(problem)
    bound = bind(plan_of(problem, name, (3, 2), configs[0]), problem, a, b)
    first = bound(a, b)
    assert toys.distance(first, problem.reference(a, b)) < 1e-5
    for threads in (1, 2, 4, 1, 3):
        torch.set_num_threads(threads)
        again = bound(a, b)
        assert toys.distance(again, first.double()) < 1e-6
        assert torch.equal(bound(a, b), again)
    with torch.inference_mode():
        assert torch.equal(bound(a, b), again)


@needs_threads
@pytest.mark.parametrize(("threads", "shares"), [(1, {1}), (2, {1}), (4, {2}), (5, {2, 3})])
def test_a_part_sees_its_share_of_threads(threads: int, shares: set[int]) -> None:
    seen: set[int] = set()

    class Watcher(toys.Plain):
        name = "watcher"

        def compute(self, p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            seen.add(torch.get_num_threads())
            return super().compute(p, a, b)

    problem = toys.small(batch=4)
    a, b = toys.operands(problem)
    with toys.installed(Watcher()):
        bound = bind(plan_of(problem, "watcher", (2, 2)), problem, a, b)
        torch.set_num_threads(threads)
        bound(a, b)
    assert seen == shares
    assert torch.get_num_threads() == threads


@needs_threads
@pytest.mark.parametrize("threads", [2, 4])
def test_two_models_at_once(threads: int) -> None:
    problem = toys.small(Pass.WGRAD, 6)
    a, b = toys.operands(problem)
    with toys.installed(*LEAVES):
        bound = bind(plan_of(problem, "dense_adder", (3, 3)), problem, a, b)
        inputs = [(a * n, b) for n in range(1, 5)]
        wants = [problem.reference(*pair) for pair in inputs]
        wrong: list[float] = []
        barrier = threading.Barrier(len(inputs))

        def work(x: torch.Tensor, y: torch.Tensor, want: torch.Tensor) -> None:
            torch.set_num_threads(threads)
            barrier.wait(20)
            wrong.extend(error for _ in range(20) if (error := toys.distance(bound(x, y), want)) > 2e-6)

        started = [threading.Thread(target=work, args=(*p, want)) for p, want in zip(inputs, wants, strict=True)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join(60)
            assert not thread.is_alive()
    assert wrong == []


@needs_threads
def test_a_failing_part_is_the_callers_error() -> None:
    def fails(self: toys.Plain, p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise FloatingPointError("no such sum")

    problem = toys.small(batch=4)
    a, b = toys.operands(problem)
    torch.set_num_threads(2)
    with toys.installed(toys.toy(name="failing", compute=fails)):
        bound = bind(plan_of(problem, "failing", (2, 2)), problem, a, b)
        with pytest.raises(FloatingPointError, match="no such sum"):
            bound(a, b)


@needs_threads
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_child_after_a_fork(threads: int) -> None:
    problem = toys.small(batch=5, channels=16, size=9)
    a, b = toys.operands(problem)
    torch.set_num_threads(2)
    bound = bind(plan_of(problem, "aten", (3, 2)), problem, a, b)
    want = bound(a, b).clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child == 0:
        torch.set_num_threads(threads)
        os._exit(0 if bound(a, b).numpy().tobytes() == want.numpy().tobytes() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_workspaces_add_up() -> None:
    """Each part's own and, for a gradient, each but the first part's sum; with a 16-bit result the first's too."""
    with toys.installed(*LEAVES):
        for dtype, own in (("fp32", 2), ("bf16", 3)):
            problem = toys.small(Pass.WGRAD, 6, dtype=dtype)
            a, b = toys.operands(problem)
            bound = bind(plan_of(problem, "giver", (2, 2, 2)), problem, a, b)
            term = -(-math.prod(problem.shape("w")) * 4 // 256) * 256
            assert bound.workspace == 3 * 256 + own * term
        problem = toys.small(Pass.FPROP, 6)
        assert bind(plan_of(problem, "giver", (2, 2, 2)), problem, *toys.operands(problem)).workspace == 3 * 256


@given(st.integers(2, 40), st.integers(1, 40))
def test_divisions_are_even_and_have_as_many_parts_as_threads_or_a_power_of_two(batch: int, threads: int) -> None:
    divisions = partition.divisions(toys.small(batch=batch), threads)
    counts = {min(batch, n) for n in (threads, *(2**k for k in range(1, 6))) if 1 < n <= threads}
    assert sorted(map(len, divisions)) == sorted(counts)
    assert not divisions or len(divisions[0]) == min(threads, batch)
    for sizes in divisions:
        assert sum(sizes) == batch
        assert list(sizes) == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1


@given(toys.problems(batch=(2, 12)), st.tuples(*[st.sampled_from((2, 4, 8, 16))] * 3), st.integers(2, 9))
def test_each_part_is_the_child_that_was_planned(
    problem: ConvProblem, alignment: tuple[int, int, int], threads: int
) -> None:
    problem = replace(problem, alignment=alignment)
    for sizes in partition.divisions(problem, threads):
        for size, part in zip(sizes, partition.children(problem, Config(sizes=sizes)), strict=True):
            child = partition.child(problem, size)
            assert part.problem is not None
            assert replace(part.problem, alignment=child.alignment) == child
            for role, has, promised in zip(ROLES, part.problem.alignment, child.alignment, strict=True):
                assert has % promised == 0, role


def test_what_cannot_be_divided_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_module, "bounds_threads", lambda: True)
    assert partition.why_not(toys.small(batch=2)) == []
    assert partition.why_not(toys.small(batch=1)) == ["a batch of 1 cannot be divided"]
    assert partition.why_not(toys.small(device="cuda:any")) == ["runs on cpu, not cuda"]
    monkeypatch.setattr(partition_module, "cpu_count", lambda: 1)
    (reason,) = partition.why_not(toys.small())
    assert reason == "this process may use one core, which computes one part at a time"
    monkeypatch.setattr(partition_module, "bounds_threads", lambda: False)
    assert "was not built with OpenMP" in partition.why_not(toys.small())[1]
    problem = toys.small(batch=4)
    plan, (a, b) = plan_of(problem, "aten", (2, 2)), toys.operands(problem)
    with pytest.raises(PlanMismatch, match="one core"):
        bind(plan, problem, a, b)


PROBLEM = toys.small(batch=8, channels=1, size=3)
OTHERS = ["micro_batch"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """A world in which whole batches are slow and small parts fast, and where there are two threads."""
    found = Clock()
    own = torchs_own(found, lambda p, c: 1000.0)
    part = simulated(found, "thin", lambda p, c: 90.0 if p.batch > 4 else 5.0, bytes=lambda p, c: 1000)
    with world(found, own, part, partition):
        torch.set_num_threads(2)
        monkeypatch.setattr("tilewise.planner.caches.rates.measure_profile", lambda device: PROFILE)
        yield found


def lost(search: Search) -> dict[str, str]:
    """Partitions that were lost, by their configs."""
    return {str(m.config): m.reason for m in search.log if m.solver == "partition" and m.reason}


@needs_threads
def test_the_planner_takes_it_where_it_is_faster(clock: Clock, tmp_path: Path) -> None:
    planner = Planner(Wisdom(tmp_path / "w.db"))
    problem = replace(PROBLEM, batch=7)
    with toys.installed(without=OTHERS):
        plan = planner.plan(problem)
        assert (plan.solver, plan.config) == ("partition", Config(sizes=(4, 3)))
        assert str(plan).splitlines()[0].startswith("partition 7 = 4 + 3 at once")
        assert "thin @4" in str(plan)
        assert plan.workspace == 2 * 1024
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))).tree() == plan.tree()
        again = Planner(Wisdom(tmp_path / "w.db"))
        runs = clock.total
        assert again.plan(problem, Options(rigor="wisdom_only")).tree() == plan.tree()
        told = again.explain(problem, Options(rigor="wisdom_only"))
        assert clock.total == runs
    assert any(m.solver == "partition" and m.config.get("part") == "thin" and not m.reason for m in told)
    assert isinstance(bind(plan, problem, *toys.operands(problem)), Bound)


@needs_threads
def test_a_limit_below_all_parts_together_keeps_it_out(clock: Clock) -> None:
    found = searched(PROBLEM, workspace=1500)
    assert found.best().solver != "partition"
    assert lost(found) == {"part=thin sizes=4x4": "its parts at once need 2.0 KiB of workspace, the limit is 1.5 KiB"}
    found = searched(PROBLEM, workspace=2100)
    assert found.best().solver in ("partition", "micro_batch")


@needs_threads
@pytest.mark.parametrize(
    ("options", "threads", "says"),
    [
        ({"batch_sizes": "undivided"}, 2, "batch_sizes=undivided"),
        ({"rigor": "estimate"}, 2, "not tried: estimates are as for the whole"),
        ({}, 1, "torch has 1 thread here: parts at once need two"),
    ],
)
def test_explain_says_why_it_was_not_tried(clock: Clock, options: dict[str, str], threads: int, says: str) -> None:
    torch.set_num_threads(threads)
    found = searched(PROBLEM, **options)
    found.best()
    assert lost(found) == {"": says}


@needs_threads
def test_a_part_that_is_wrong_is_out_with_its_reason(clock: Clock) -> None:
    def off(p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return p.reference(a, b) * (1.1 if p.batch <= 4 else 1.0)

    wrong = simulated(clock, "wrong", lambda p, c: 80.0 if p.batch > 4 else 1.0, compute=off)
    with toys.installed(wrong, without=OTHERS):
        found = searched(PROBLEM)
        plan = found.best()
    assert [child.solver for child in plan.children] == ["thin"]
    assert "over the limit" in lost(found)["part=wrong sizes=4x4"]


@needs_threads
def test_it_is_measured_once(clock: Clock) -> None:
    """A later search with other constraints finds it remembered."""
    first = searched(PROBLEM)
    first.best()
    runs = clock.runs["thin", 4]
    second = searched(PROBLEM, store=first.root.store, workspace=2000)
    second.survey()
    assert clock.runs["thin", 4] - runs <= 3  # micro-batches of four, which are another matter
