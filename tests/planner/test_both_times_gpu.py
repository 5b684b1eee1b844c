"""On a GPU: what it computes and what the host needs to launch it are measured apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tilewise.machine.device import device_name, environment
from tilewise.planner import Options, Planner
from tilewise.planner.measuring import warm
from tilewise.planner.measuring.copies import Copies
from tilewise.planner.measuring.samples import sample_of
from tilewise.planner.measuring.times import Timer, lead_ms, rounds
from tilewise.problems.conv.notation import parse_layer
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.problems.operands import Tensors, make_operands, make_results
from tilewise.wisdom import Wisdom

pytestmark = pytest.mark.gpu
UNDIVIDED = Options(batch_sizes="undivided")


@pytest.mark.parametrize("launch_ms", [0.3, 3.0])
def test_a_launch_of_milliseconds_does_not_show_in_the_devices_time(launch_ms: float) -> None:
    out = torch.zeros(1, dtype=torch.float32, device="cuda")

    def call() -> None:
        time.sleep(launch_ms * 1e-3)
        out.zero_()

    (times,) = rounds([call], out.device, repeats=7)
    sample = sample_of(times)
    assert sample.host_ms >= launch_ms
    assert sample.device_ms < launch_ms / 2
    assert sample.runs == 7


def test_kernels_that_take_long_do_not_show_in_the_hosts_time() -> None:
    a = torch.randn(4096, 4096, dtype=torch.float32, device="cuda")
    out = torch.empty_like(a)
    timer = Timer(a.device)
    first = timer.time(lambda: torch.mm(a, a, out=out))
    took = min((timer.time(lambda: torch.mm(a, a, out=out), lead_ms(first)) for _ in range(5)), key=lambda t: t.host_ms)
    assert took.host_ms < took.device_ms / 2


def test_what_was_just_written_is_read_from_the_second_cache() -> None:
    """All of it fits there. Its values stay."""
    a = torch.randn(3 << 20, dtype=torch.float32, device="cuda")
    a[:2] = torch.tensor([-0.0, 1e-42], dtype=torch.float32, device="cuda")
    before, out = a.view(torch.int32).clone(), torch.zeros((), dtype=torch.float32, device="cuda")

    def call() -> None:
        torch.amax(a, dim=0, out=out)

    cold, warm = (
        sample_of(rounds([call], a.device, repeats=15, written=written)[0]).device_ms for written in (None, a)
    )
    assert warm < 0.9 * cold
    assert torch.equal(a.view(torch.int32), before)


def test_a_plan_and_what_wisdom_keeps_have_both_times(tmp_path: Path) -> None:
    device = device_name("cuda")
    problem = parse_layer("mb32ic64ih28oc64oh28kh3ph1", device=device)
    wisdom = Wisdom(tmp_path / "wisdom.sqlite3")
    plan = Planner(wisdom).plan(problem, UNDIVIDED)
    assert plan.device_ms > 0
    assert plan.host_ms is not None
    assert plan.host_ms > 0
    kept = {m.solver: m for m in wisdom.measurements(environment(device).key, problem.key) if m.time_ms is not None}
    assert all(m.host_ms is not None and m.host_ms > 0 and m.runs for m in kept.values())
    assert kept["aten"].dispersion is not None
    replayed = Planner(wisdom).plan(problem, Options(batch_sizes="undivided", cuda_graphs=True))
    assert replayed.host_ms == 0.0


def test_short_calls_on_copies_find_nothing_in_the_second_cache() -> None:
    """Several at once on copies read memory, as one alone does over a cold cache; on one tensor they read the cache."""
    a = torch.randn(1 << 20, dtype=torch.float32, device="cuda")
    others = [a.clone() for _ in range(15)]
    out = torch.zeros((), dtype=torch.float32, device="cuda")

    def reading(t: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.amax(t, dim=0, out=out)

    def on_copies(count: int) -> list[Callable[[], object]]:
        return [reading(t) for t in (a, *others)][:count]

    def on_one(count: int) -> list[Callable[[], object]]:
        return [reading(a)] * count

    cold, warm = (
        sample_of(rounds([reading(a)], a.device, repeats=15, alike=[alike])[0]).device_ms
        for alike in (on_copies, on_one)
    )
    assert warm < cold


def test_copies_of_a_problem_on_a_gpu_lie_as_its_tensors_do() -> None:
    problem = GemmProblem(64, 256, 128, device=device_name(torch.device("cuda")))
    tensors = Tensors(make_operands(problem), make_results(problem))
    for each in Copies(problem, tensors).of(6)[1:]:
        for t, other in zip(tensors.operands, each.operands, strict=True):
            assert t.data_ptr() != other.data_ptr()
            assert (t.stride(), t.data_ptr() % 512) == (other.stride(), other.data_ptr() % 512)
            assert torch.equal(t, other)


def test_over_warm_caches_a_call_is_held_against_torchs() -> None:
    """Reads of the cache are as fast where nothing else is done, and half as fast twice."""
    a = torch.randn(1 << 20, dtype=torch.float32, device="cuda")
    out = torch.zeros((), dtype=torch.float32, device="cuda")

    def once() -> None:
        torch.amax(a, dim=0, out=out)

    def twice() -> None:
        once()
        once()

    timer = Timer(a.device)
    same, double = warm.ratios([once, twice, once], timer)
    assert 0.8 < same < 1.25
    assert 1.5 < double < 2.5
    assert timer.time_warm(once, 8) < timer.time(once).device_ms


def test_only_what_the_cache_keeps_is_timed_over_warm_ones() -> None:
    size = torch.cuda.get_device_properties(0).L2_cache_size
    assert warm.may_hold(size // 2, torch.device("cuda"))
    assert not warm.may_hold(size // 2 + 1, torch.device("cuda"))
