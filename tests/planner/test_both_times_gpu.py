"""On a GPU: what it computes and what the host needs to launch it are measured apart."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tilewise.machine.device import device_name, environment
from tilewise.planner import Options, Planner
from tilewise.planner.measuring.samples import sample_of
from tilewise.planner.measuring.times import Timer, lead_ms, rounds
from tilewise.problems.conv.notation import parse_layer
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
