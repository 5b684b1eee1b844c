"""The planner over wisdom: what is asked of it, what it remembers, what it never does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests import toys
from tests.planner.simulated import PROFILE, Clock, simulated, torchs_own, world

from tilewise import execute, solvers
from tilewise.machine.device import environment
from tilewise.plan import Config, Plan
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.planner.caches import measurements
from tilewise.planner.planner import best_if_compiled
from tilewise.planner.search.finals import Finals
from tilewise.planner.search.search import Search
from tilewise.planner.search.trial import Trial
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.wisdom import Wisdom

LIMIT = 11 * 1024
SMALL = toys.small(batch=32, channels=1, size=3)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with toys.one_thread():
        yield


@pytest.fixture
def clock() -> Iterator[Clock]:
    """A world of a fast algorithm that wants workspace and a slow one that wants none."""
    clock = Clock()
    fft = simulated(clock, "fft", lambda p, c: 1.0 + p.batch, bytes=lambda p, c: 1024 * p.batch, accumulates=True)
    with world(clock, fft, simulated(clock, "direct", lambda p, c: 8.0 * p.batch, accumulates=True)):
        yield clock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    wisdom = Wisdom(tmp_path / "wisdom.sqlite3")
    wisdom.remember_profile(environment("cpu").key, PROFILE)
    return wisdom.path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many candidates were measured."""
    count = [0]
    monkeypatch.setattr(Trial, "measure", toys.counting(Trial.measure, count))
    return count


def planner(path: Path) -> Planner:
    """A new one, as another process would make."""
    return Planner(Wisdom(path))


def test_a_plan_from_wisdom_measures_and_runs_nothing(clock: Clock, path: Path, measured: list[int]) -> None:
    plan = planner(path).plan(SMALL, Options(workspace=LIMIT))
    assert plan.config["sizes"] == (8, 8, 8, 8)
    assert measured[0] > 0
    measured[0], runs = 0, clock.total
    again = planner(path)
    for rigor in ("measure", "estimate", "wisdom_only"):
        assert again.plan(SMALL, Options(workspace=LIMIT, rigor=rigor)) == plan
        assert again.plan_many([SMALL], Options(workspace=LIMIT, rigor=rigor)) == {SMALL: plan}
    assert (measured[0], clock.total) == (0, runs)


def test_other_constraints_are_planned_from_what_was_measured(clock: Clock, path: Path, measured: list[int]) -> None:
    planner(path).plan(SMALL, Options(workspace=LIMIT, rigor="patient"))
    measured[0] = 0
    for limit, sizes in ((LIMIT, (8,) * 4), (6 * 1024, (4,) * 8), (3 * 1024, (2,) * 16)):
        assert planner(path).plan(SMALL, Options(workspace=limit)).config["sizes"] == sizes
    assert measured[0] == 0


def test_a_patient_request_is_not_served_by_less(clock: Clock, path: Path, measured: list[int]) -> None:
    planner(path).plan(SMALL, Options(rigor="estimate"))
    for rigor in ("measure", "patient"):
        measured[0] = 0
        planner(path).plan(SMALL, Options(rigor=rigor))
        assert measured[0] > 0
    measured[0] = 0
    planner(path).plan(SMALL, Options(rigor="measure"))
    assert measured[0] == 0


def test_each_constraint_has_its_own_plan(clock: Clock, path: Path) -> None:
    one = planner(path)
    assert one.plan(SMALL).solver == "fft"
    assert one.plan(SMALL, Options(workspace=LIMIT)).solver == "micro_batch"
    assert one.plan(SMALL, Options(workspace=LIMIT, batch_sizes="undivided")).solver == "direct"
    with pytest.raises(NoPlanError, match="no wisdom for conv fprop"):
        one.plan(SMALL, Options(workspace=LIMIT, rigor="wisdom_only", strict=True))
    assert planner(path).plan(SMALL, Options(rigor="wisdom_only")).solver == "fft"


def test_wisdom_alone_is_never_measured_for(clock: Clock, path: Path, measured: list[int]) -> None:
    options = Options(rigor="wisdom_only")
    with pytest.raises(NoPlanError):
        planner(path).plan(SMALL, options)
    lost = {m.solver: m.reason for m in planner(path).explain(SMALL, options)}
    assert set(lost) == {"aten", "fft", "direct", "micro_batch"}
    assert all(reason for reason in lost.values())
    assert lost["fft"] == "not measured, and wisdom knows nothing of it"
    assert planner(path).front(SMALL, options) == ()
    assert measured[0] == 0
    assert clock.total == 0
    planner(path).plan(SMALL)
    measured[0] = 0
    assert planner(path).front(SMALL, options)[0].solver == "fft"
    assert {m.solver for m in planner(path).explain(SMALL, options) if not m.reason} >= {"aten", "fft"}
    assert measured[0] == 0


def test_equal_problems_are_planned_once(clock: Clock, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = [0]
    monkeypatch.setattr(Search, "best", toys.counting(Search.best, count))
    seen: list[tuple[int, int, str]] = []
    one = Planner(Wisdom(path), lambda *args: seen.append(args))
    other = replace(SMALL, batch=16)
    plans = one.plan_many([SMALL, other, replace(SMALL), other, SMALL], Options(workspace=LIMIT))
    assert list(plans) == [SMALL, other]
    assert count[0] == 2
    assert seen == [(0, 2, SMALL.key), (1, 2, other.key), (2, 2, "")]
    assert one.plan_many([]) == {}


def test_explain_tells_of_every_solver(clock: Clock, path: Path) -> None:
    found = planner(path).explain(SMALL, Options(workspace=LIMIT))
    assert {m.solver for m in found} == {"aten", "fft", "direct", "micro_batch"}
    assert len({(m.solver, m.version, m.config) for m in found}) == len(found)
    assert all(m.reason or m.time_ms is not None for m in found)
    assert [bool(m.reason) for m in found] == sorted(bool(m.reason) for m in found)
    best = found[0]
    assert (best.solver, best.config) == ("micro_batch", Config(sizes=(8, 8, 8, 8)))
    assert best.time_ms == pytest.approx(36.0)
    assert best.error is not None
    assert best.baseline_ms == pytest.approx(32000.0)
    lost = {m.solver: m.reason for m in found if m.reason}
    assert lost == {"fft": "needs 32.0 KiB of workspace, the limit is 11.0 KiB"}


def test_explain_tells_why_there_is_no_plan(path: Path) -> None:
    clock = Clock()
    with world(clock, torchs_own(clock, lambda p, c: 1.0, bytes=lambda p, c: 1 << 20)):
        found = planner(path).explain(SMALL, Options(workspace=LIMIT))
        assert {m.solver for m in found} == {"aten", "micro_batch"}
        assert all(m.reason for m in found)


def interrupting(clock: Clock, at: int) -> Callable[[ConvProblem, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Ctrl-C at a given batch."""

    def compute(p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if p.batch == at:
            raise KeyboardInterrupt
        return p.reference(a, b)

    return compute


def test_an_interrupt_keeps_what_was_measured(path: Path, measured: list[int]) -> None:
    clock = Clock()
    traits = {"bytes": lambda p, c: 1024 * p.batch, "accumulates": True}
    direct = simulated(clock, "direct", lambda p, c: 8.0 * p.batch, accumulates=True)
    stuck = simulated(clock, "fft", lambda p, c: 1.0 + p.batch, compute=interrupting(clock, 4), **traits)
    before = torch.backends.cudnn.benchmark
    with world(clock, stuck, direct), pytest.raises(KeyboardInterrupt):
        planner(path).plan_many([replace(SMALL, batch=2), SMALL], Options(workspace=LIMIT))
    assert torch.backends.cudnn.benchmark is before
    wisdom, key = Wisdom(path), environment("cpu").key
    assert {m.solver for m in wisdom.measurements(key, SMALL.key)} == {"aten", "direct"}
    child = solvers.get("micro_batch").child(SMALL, 8)  # type: ignore[attr-defined]
    assert {m.solver for m in wisdom.measurements(key, child.key)} >= {"fft"}
    measured[0] = 0
    fft = simulated(clock, "fft", lambda p, c: 1.0 + p.batch, **traits)
    with world(clock, fft, direct):
        assert planner(path).plan(replace(SMALL, batch=2), Options(workspace=LIMIT, rigor="wisdom_only"))
        assert planner(path).plan(SMALL, Options(workspace=LIMIT)).config["sizes"] == (8, 8, 8, 8)
    runs = {batch for name, batch in clock.runs if name == "fft"}
    assert 4 in runs
    assert measured[0] < 4


def test_long_planning_records_as_it_goes(clock: Clock, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever kills a process loses seconds, not minutes."""
    monkeypatch.setattr(measurements, "SAVE_EVERY_S", 0.0)
    one, batches = planner(path), []
    monkeypatch.setattr(one.wisdom, "record_many", lambda key, new, own: batches.append(set(new)))
    one.plan(SMALL, Options(rigor="patient"))
    assert len(batches) >= 5
    assert set.union(*batches) == set(one.measurements._stores[environment("cpu").key].known)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, MemoryError])
def test_torchs_flags_are_restored(clock: Clock, path: Path, error: type[BaseException]) -> None:
    def fail(self: Search, ranked: list[Plan]) -> Plan:
        flags = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
        assert flags == before, "what matters on a GPU alone stays as it is"
        assert not torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_inference_mode_enabled()
        assert torch.empty(1).device.type == "cpu"
        raise error

    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    modes = torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.device("meta")
    with pytest.MonkeyPatch.context() as patch, modes[0], modes[1], modes[2]:
        patch.setattr(Finals, "choose", fail)
        with pytest.raises(error):
            planner(path).plan(SMALL, Options(deterministic=True))
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_inference_mode_enabled()
        assert torch.empty(1).device.type == "meta"
    assert torch.is_grad_enabled()
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == before


def test_no_memory_for_the_operands_is_no_plan(clock: Clock, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.planner.search import root

    def full(problem: ConvProblem) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 200 GiB")

    monkeypatch.setattr(root, "make_operands", full)
    with pytest.raises(NoPlanError, match=r"no memory to measure with: CUDA out of memory\. Tried to allocate 200 GiB"):
        planner(path).plan(SMALL)


def test_each_number_of_threads_has_its_own_wisdom(clock: Clock, path: Path, measured: list[int]) -> None:
    one = planner(path)
    one.plan(SMALL)
    measured[0], threads = 0, torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        one.wisdom.remember_profile(environment("cpu").key, PROFILE)
        one.plan(SMALL)
        assert measured[0] > 0
        assert {m.solver for m in one.wisdom.measurements(environment("cpu").key, SMALL.key)} >= {"fft"}
    finally:
        torch.set_num_threads(threads)


def test_a_plan_of_an_older_solver_is_made_anew(clock: Clock, path: Path, measured: list[int]) -> None:
    planner(path).plan(SMALL)
    measured[0] = 0
    newer = simulated(clock, "fft", lambda p, c: 1.0 + p.batch, version=2)
    with world(clock, newer):
        plan = planner(path).plan(SMALL)
        assert (plan.solver, plan.version) == ("fft", 2)
        assert measured[0] > 0


def change(plan: Plan, **changes: object) -> Plan:
    return replace(plan, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"solver": "nobody"},
        {"version": 7},
        {"config": Config(sizes=(16, 17))},
        {"config": Config()},
        {"counts": (3,)},
        {"counts": (10**15,)},
        {"workspace": LIMIT + 1},
        {"children": (), "counts": ()},
    ],
)
def test_wisdom_that_does_not_fit_is_planned_anew(clock: Clock, path: Path, changes: dict[str, object]) -> None:
    """A file from elsewhere may say anything."""
    options = Options(workspace=LIMIT)
    good = planner(path).plan(SMALL, options)
    one = planner(path)
    text = (
        f"rigor=measure workspace={LIMIT} batch_sizes=powers_of_two deterministic=False error_limit=None strict=False"
    )
    assert one.wisdom.plan(environment("cpu").key, SMALL.key, text) == good
    one.wisdom.remember(environment("cpu").key, SMALL.key, text, change(good, **changes))
    again = one.plan(SMALL, options)
    assert again.config == good.config
    execute.bind(again, SMALL, *toys.operands(SMALL))


def test_a_profile_with_holes_is_measured_anew(clock: Clock, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.planner.caches import rates as module

    monkeypatch.setattr(module, "measure_profile", lambda device: dict(PROFILE))
    key = environment("cpu").key
    for bad in ({}, {"copy": 1.0}, {**PROFILE, "fp32": 0.0}):
        Wisdom(path).remember_profile(key, bad)
        assert planner(path).profile("cpu") == PROFILE
        assert Wisdom(path).profile(key) == PROFILE


def test_threads_share_a_planner(clock: Clock, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, count = planner(path), [0]
    monkeypatch.setattr(Search, "best", toys.counting(Search.best, count))
    problems = [replace(SMALL, batch=n) for n in (8, 12, 16)]
    found: list[dict[ConvProblem, Plan]] = []
    threads = [threading.Thread(target=lambda: found.append(one.plan_many(problems))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert found[0] == found[1] == found[2]
    assert count[0] == 3


def test_a_search_that_asks_for_kernels_first_finds_the_same_plan(clock: Clock, path: Path) -> None:
    asking = planner(path.with_name("other.sqlite3"))
    asking.wisdom.remember_profile(environment("cpu").key, PROFILE)
    asking.best = best_if_compiled
    assert asking.plan(SMALL) == planner(path).plan(SMALL)


def test_the_default_options_are_those_of_the_class(clock: Clock, path: Path) -> None:
    one = planner(path)
    assert one.plan(SMALL) == one.plan(SMALL, Options())
    assert one.front(SMALL)[0].solver == "fft"
    assert one.explain(SMALL)[0].solver == "fft"


@pytest.mark.parametrize("pass_", Pass)
def test_a_front_is_a_front(clock: Clock, path: Path, pass_: Pass) -> None:
    points = planner(path).front(replace(SMALL, pass_=pass_))
    assert [plan.time_ms for plan in points] == sorted(plan.time_ms for plan in points)
    assert [plan.workspace for plan in points] == sorted((plan.workspace for plan in points), reverse=True)
    assert len({plan.workspace for plan in points}) == len(points) == 7
    bounded = planner(path).front(replace(SMALL, pass_=pass_), Options(workspace=LIMIT))
    assert [(plan.time_ms, plan.workspace) for plan in bounded] == [
        (plan.time_ms, plan.workspace) for plan in points if plan.workspace <= LIMIT
    ]


def test_a_front_from_wisdom_measures_and_runs_nothing(clock: Clock, path: Path, measured: list[int]) -> None:
    other = toys.small(batch=16, channels=1, size=3)
    seen: list[int] = []
    first = Planner(Wisdom(path), lambda done, total, text: seen.append(done))
    fronts = first.fronts([SMALL, other, SMALL], Options(workspace=LIMIT))
    assert seen == [0, 1, 2]
    assert list(fronts) == [SMALL, other]
    assert len(fronts[SMALL]) > 2
    assert measured[0] > 0
    measured[0], runs = 0, clock.total
    for one in (first, planner(path), planner(path)):
        assert one.fronts([SMALL, other], Options(workspace=LIMIT)) == fronts
        assert one.front(SMALL, Options(workspace=LIMIT)) == fronts[SMALL]
        for rigor in ("estimate", "wisdom_only"):
            assert one.front(SMALL, Options(workspace=LIMIT, rigor=rigor)) == fronts[SMALL]
    assert (measured[0], clock.total) == (0, runs)


def test_a_front_of_a_solver_that_changed_is_found_again(clock: Clock, path: Path, measured: list[int]) -> None:
    assert len(planner(path).front(SMALL, Options(workspace=LIMIT))) > 2
    faster = simulated(clock, "fft", lambda p, c: 0.5, version=2, accumulates=True)
    with world(clock, faster):
        (plan,) = planner(path).front(SMALL, Options(workspace=LIMIT))
        assert (plan.solver, plan.version) == ("fft", 2)
        measured[0] = 0  # and what the longer front left behind is no part of it
        assert planner(path).front(SMALL, Options(workspace=LIMIT)) == (plan,)
        assert measured[0] == 0


def test_a_plan_is_as_fast_as_the_front(clock: Clock, path: Path) -> None:
    """Sizes that a search for one plan gives up, a front tries: here parts of 2 are fast, larger ones gain nothing."""
    odd = simulated(
        clock, "odd", lambda p, c: 1.0 if p.batch == 2 else 4.0 * p.batch, bytes=lambda p, c: p.batch, accumulates=True
    )
    with world(clock, odd):
        one = planner(path)
        fastest = one.front(SMALL, Options(batch_sizes="all"))[0]
        assert set(fastest.config["sizes"]) == {2}
        assert one.plan(SMALL, Options(batch_sizes="all")).time_ms <= fastest.time_ms
