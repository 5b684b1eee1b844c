"""Short launches are timed several at once, each on a copy of the operands that lies as the tensors do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import toys

from tilewise import execute
from tilewise.plan import Config, Plan
from tilewise.planner.measuring import copies as module
from tilewise.planner.measuring import times as measure
from tilewise.planner.measuring.copies import Copies
from tilewise.planner.measuring.repeats import MOST_LAUNCHES, SHORT_MS, TOGETHER_MS, launches_of
from tilewise.planner.measuring.times import Timer, rounds
from tilewise.planner.measuring.took import Took
from tilewise.planner.options import Options
from tilewise.planner.search.benchmark import Benchmark
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.problems.operands import Tensors, make_operands, make_results
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers import baseline

GPU = torch.device("cuda")


class StandIn(Timer):
    """A GPU's timer whose clock the calls move: each says how many ms it takes."""

    def __init__(self, device: torch.device = GPU, *, cold: bool = False) -> None:
        self.device, self._cuda, self.timed = device, True, list[int]()

    def _prepare(self, lead_ms: float, written: torch.Tensor | None) -> None:
        self.lead_ms = lead_ms

    def _run(self, call: Callable[[], object]) -> Took:
        Clock.now = 0.0
        Clock.calls = 0
        call()
        self.timed.append(Clock.calls)
        return Took(Clock.now + 0.002, 0.01 * Clock.calls)  # what events add does not depend on what is between them


class Clock:
    """Time as calls move it."""

    now = 0.0
    calls = 0

    @classmethod
    def call(cls, ms: float) -> Callable[[], None]:
        def run() -> None:
            cls.now += ms
            cls.calls += 1

        return run


@given(st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=8))
def test_shorter_launches_are_never_fewer_at_once(times: list[float]) -> None:
    counts = [launches_of(ms, "cuda") for ms in sorted(times)]
    assert counts == sorted(counts, reverse=True)
    for ms, count in zip(sorted(times), counts, strict=True):
        assert 1 <= count <= MOST_LAUNCHES
        assert (count == 1) == (ms >= SHORT_MS)
        assert count == 1 or (count - 1) * ms < TOGETHER_MS
        assert launches_of(ms, "cpu") == 1


def timed(ms: Sequence[float], most: int = 100, **options: Any) -> tuple[list[list[Took]], list[int]]:
    """The times of calls that take so many ms, and how many calls ran in each measured run after warming up."""
    made: list[StandIn] = []

    def timer(device: torch.device, *, cold: bool = False) -> StandIn:
        made.append(StandIn(device))
        return made[-1]

    def alike(each: float) -> Callable[[int], list[Callable[[], None]]]:
        return lambda count: [Clock.call(each) for _ in range(min(count, most))]

    calls = [Clock.call(each) for each in ms]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "Timer", timer)
        found = rounds(calls, GPU, alike=[alike(each) for each in ms], **options)
    return found, made[0].timed[2 * len(ms) :] if not options.get("repeats") else made[0].timed[len(ms) :]


def test_short_calls_in_turns_are_timed_several_at_once() -> None:
    found, counts = timed([0.006, 0.0066], budget_ms=0.0)
    count = launches_of(0.006 + 0.002, "cuda")
    assert count > 8
    assert set(counts) == {count}
    for ms, runs in zip((0.006, 0.0066), found, strict=True):
        assert len(runs) == 5
        for took in runs:
            assert took.device_ms == pytest.approx(ms + 0.002 / count)
            assert took.host_ms == pytest.approx(0.01)


def test_all_calls_in_turns_are_as_many_at_once() -> None:
    """What events add is then the same share for all."""
    assert set(timed([0.006, 3.0], repeats=2)[1]) == {launches_of(0.008, "cuda")}
    assert set(timed([0.006, 0.01], most=3, repeats=2)[1]) == {3}


def test_long_calls_are_timed_one_by_one() -> None:
    assert set(timed([0.06, 0.2], repeats=2)[1]) == {1}


def test_a_budget_counts_all_calls_of_a_turn() -> None:
    found, _ = timed([0.006], budget_ms=1.2, least=1)
    count = launches_of(0.008, "cuda")
    assert len(found[0]) == int(1.2 / (count * max(0.008, 0.01)))


def test_a_gpu_is_kept_busy_while_all_are_launched() -> None:
    timer = StandIn()
    timer.time_each([Clock.call(0.006)] * 7, 0.2)
    assert timer.lead_ms == pytest.approx(1.4)
    assert timer.time_each([Clock.call(0.006)]).device_ms == pytest.approx(0.008)


def product(**options: Any) -> GemmProblem:
    return GemmProblem(12, 20, 8, **options)


def tensors_of(problem: Any) -> Tensors:
    return Tensors(make_operands(problem), make_results(problem))


def test_copies_have_the_same_numbers_in_memory_of_their_own() -> None:
    problem = product()
    given = tensors_of(problem)
    a = torch.randn(12, 40)[:, 3:23].to(torch.float32)  # rows apart, and not at the beginning of the memory
    tensors = given._replace(operands=(a, *given.operands[1:]))
    found = Copies(problem, tensors).of(4)
    assert found[0] is tensors
    for index, t in enumerate(tensors.operands):
        same = [each.operands[index] for each in found]
        assert len({each.data_ptr() for each in same}) == 4
        for each in same:
            assert torch.equal(each, t)
            assert each.stride() == t.stride()
            assert each.data_ptr() % 64 == t.data_ptr() % 64
    assert all(each.results is tensors.results for each in found)


def test_what_a_step_has_just_written_is_shared() -> None:
    problem = product()
    shared, *others = problem.operands
    found = Copies(problem, tensors_of(problem), shared).of(3)
    assert len({each.operands[0].data_ptr() for each in found}) == 1
    assert len({each.operands[1].data_ptr() for each in found}) == 3
    assert len(others) == 1


def test_an_operand_whose_elements_overlap_is_shared() -> None:
    problem = product()
    tensors = tensors_of(problem)
    wide = tensors.operands[0][:1].expand_as(tensors.operands[0])
    found = Copies(problem, tensors._replace(operands=(wide, *tensors.operands[1:]))).of(2)
    assert found[1].operands[0] is wide


def test_copies_take_no_more_memory_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = product()
    each = sum(t.numel() * t.element_size() for t in make_operands(problem))
    for room, count in ((0, 1), (each - 1, 1), (each, 2), (3 * each, 4), (1 << 30, 7)):
        monkeypatch.setattr(module, "MOST_BYTES", room)
        copies = Copies(problem, tensors_of(problem))
        assert len(copies.of(7)) == count
        assert len(copies.of(7)) == count
        assert len(copies.of(1)) == 1


def test_a_plan_that_may_keep_a_prepared_filter_has_none() -> None:
    problem = replace(toys.small(), constant_weight=True)
    assert problem.constant_operand
    assert len(Copies(problem, tensors_of(problem)).of(5)) == 1


def test_weights_in_one_piece_are_so_in_copies() -> None:
    problem = RecurrentProblem("gru", 2, 1, 4, 8)
    tensors = tensors_of(problem)
    copy = Copies(problem, tensors).of(2)[1]
    weights = [i for i, role in enumerate(problem.operands) if role in problem.weights]
    for found in (tensors, copy):
        places = [found.operands[i].untyped_storage().data_ptr() for i in weights]
        assert len(set(places)) == len({tensors.operands[i].untyped_storage().data_ptr() for i in weights})
    assert all(torch.equal(a, b) for a, b in zip(tensors.operands, copy.operands, strict=True))


@pytest.mark.parametrize(("ms", "several"), [(0.006, True), (0.2, False)])
def test_a_candidate_is_timed_on_copies_where_it_is_short(ms: float, several: bool) -> None:
    problem = product()
    tensors, timer = tensors_of(problem), StandIn()
    solver = baseline(problem)
    bound = execute.bind(Plan(problem.key, solver.name, solver.version, Config()), problem, *tensors.all)
    benchmark, times = Benchmark(problem, tensors, Options(), timer), [Took(ms + 0.03, 0.02)]
    calls = benchmark._several(Clock.call(ms), bound, times, new=True)
    assert times == [
        Took(pytest.approx(ms + 0.002 if several else ms + 0.03), pytest.approx(0.01 if several else 0.02))
    ]
    assert len(calls) == (launches_of(ms + 0.002, "cuda") if several else 1)
    if several:
        results = [call() for call in calls]
        assert all(torch.equal(result, results[0]) for result in results)
