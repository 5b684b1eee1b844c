"""``optimize`` under one workspace budget: limits by front and policy, checked plans, facts, ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tests import toys
from tests.nn.test_ranks import run
from tests.planner.simulated import PROFILE, Clock, simulated, torchs_own, world
from torch import nn

import tilewise
from tilewise.machine.device import environment
from tilewise.nn import report
from tilewise.nn.budget import Budget, divide
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.problems.conv.problem import ConvProblem

KIB = 1024


@pytest.fixture
def clock() -> Iterator[Clock]:
    """A fast algorithm that wants a KiB an image, and a slow one that wants 64 bytes."""
    clock = Clock()
    fft = simulated(clock, "fft", lambda p, c: 1.0 + p.batch, bytes=lambda p, c: KIB * p.batch, accumulates=True)
    slow = simulated(clock, "direct", lambda p, c: 8.0 * p.batch, bytes=lambda p, c: 64, accumulates=True)
    torchs = torchs_own(clock, lambda p, c: 100.0 * p.batch, bytes=lambda p, c: 64 * KIB)
    with world(clock, fft, slow, torchs):
        yield clock


@pytest.fixture
def planner(clock: Clock) -> Planner:
    planner = Planner()
    planner.wisdom.remember_profile(environment("cpu").key, PROFILE)
    return planner


class Network(nn.Module):
    """Two equal layers, of which one is called twice, and another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.second = nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.last = nn.Conv2d(2, 1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.second(self.first(x))))


def example() -> torch.Tensor:
    return torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(1))


def test_paper_wd_keeps_the_sum_over_every_call(planner: Planner) -> None:
    model = Network()
    x = example()
    want = model(x)
    total = 30 * KIB
    tilewise.optimize(model, x, total_workspace=total, policy="paper_wd", planner=planner)
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    facts = report(model).facts["budget"]
    assert (facts["policy"], facts["total"]) == ("paper_wd", total)
    names = {"first", "second", "second (call 2)", "last"}
    assert {s["layer"] for s in facts["segments"]} == names
    # Nobody needs the gradient of the network's input, but an equal layer needs its own.
    by_pass = {s: [one["layer"] for one in facts["segments"] if one["pass"] == s] for s in ("fprop", "dgrad", "wgrad")}
    assert sorted(by_pass["dgrad"]) == ["last", "second", "second (call 2)"]
    assert sorted(by_pass["fprop"]) == sorted(by_pass["wgrad"]) == sorted(names)
    assert facts["used"] == sum(s["workspace"] for s in facts["segments"]) <= total
    assert facts["least"] == 64 * len(facts["segments"])
    assert facts["program"]["optimal"]
    assert facts["program"]["rows"] == 7  # three passes of two kinds of layer, and the budget
    segments = {(s["layer"], s["pass"]): s["workspace"] for s in facts["segments"]}
    assert len(set(segments.values())) > 1  # too little for all, and of more use to some
    for layer, _, one in report(model).passes():
        assert one.plan is not None
        assert one.plan.workspace <= segments[layer.name, one.problem.pass_.value]


def test_an_arena_is_shared_by_what_runs_in_sequence(planner: Planner) -> None:
    model = tilewise.optimize(Network(), example(), total_workspace="8KiB", planner=planner)
    plans = [one.plan for _, _, one in report(model).passes()]
    assert all(plan is not None and (plan.solver, plan.workspace) == ("fft", 8 * KIB) for plan in plans)
    facts = report(model).facts["budget"]
    assert (facts["policy"], facts["used"], facts["least"]) == ("arena", 8 * KIB, 64)


def test_a_limit_of_each_kernel_holds_beside_the_budget(planner: Planner) -> None:
    options = {"total_workspace": "1MiB", "policy": "paper_wd", "workspace": "3KiB", "planner": planner}
    model = tilewise.optimize(Network(), example(), **options)
    plans = [one.plan for _, _, one in report(model).passes()]
    assert {plan.config["sizes"] for plan in plans if plan is not None} == {(2, 2, 2, 2)}
    assert max(segment["workspace"] for segment in report(model).facts["budget"]["segments"]) == 2 * KIB


def test_branches_that_run_at_once_add_up(planner: Planner) -> None:
    """The joint for parallel branches: groups by index of the kernels that are divided among."""
    wide, narrow = (toys.small(batch=batch, channels=1, size=3) for batch in (8, 4))
    names = {wide: ["a"], narrow: ["b"]}
    asked: list[Sequence[ConvProblem]] = []

    def groups_of(problems: Sequence[ConvProblem]) -> list[list[list[int]]]:
        asked.append(list(problems))
        return [[[0], [1]]]

    alone = divide(planner, names, Options(), Budget(8 * KIB, "arena"))
    assert alone.limits == {wide: 8 * KIB, narrow: 8 * KIB}
    beside = divide(planner, names, Options(), Budget(8 * KIB, "arena"), groups_of)
    assert asked == [[wide, narrow]]
    assert sum(beside.limits.values()) <= 8 * KIB
    assert beside.facts["budget"]["used"] == sum(s["workspace"] for s in beside.facts["budget"]["segments"])


@pytest.mark.parametrize(("policy", "least"), [("arena", 64), ("paper_wd", 64 * 11)])
def test_too_little_says_what_would_do(planner: Planner, policy: str, least: int) -> None:
    model, x = Network(), example()
    text = f"total_workspace={least - 1}: .* the least total that works is {least} bytes"
    with pytest.raises(NoPlanError, match=text):
        tilewise.optimize(model, x, total_workspace=f"{least - 1}B", policy=policy, planner=planner)
    tilewise.optimize(model, x, total_workspace=f"{least}B", policy=policy, planner=planner)
    assert report(model).facts["budget"]["used"] == least


def test_too_little_for_each_names_the_solvers_reasons(planner: Planner) -> None:
    with pytest.raises(NoPlanError, match="direct : needs 64 B of workspace, the limit is 63 B"):
        tilewise.optimize(Network(), example(), total_workspace="1MiB", workspace="63B", planner=planner)


def test_a_shape_seen_later_keeps_the_whole_as_its_limit(planner: Planner) -> None:
    model = tilewise.optimize(Network(), example(), total_workspace="8KiB", policy="arena", planner=planner)
    more = torch.randn(16, 2, 4, 4)
    want = tilewise.restore(copy.deepcopy(model))(more)
    asked = len(planner._plans.checked)
    torch.testing.assert_close(model(more), want, rtol=1e-4, atol=1e-5)
    seen = list(planner._plans.checked.values())[asked:]
    assert seen
    assert all(plan.workspace == 8 * KIB and plan.solver == "micro_batch" for plan in seen)


def test_wisdom_alone_leaves_what_it_does_not_know_to_torch(planner: Planner) -> None:
    model = tilewise.optimize(Network(), example(), total_workspace="10B", rigor="wisdom_only", planner=planner)
    assert all(one.plan is None and "no wisdom" in one.reason for _, _, one in report(model).passes())
    assert report(model).facts["budget"]["segments"] == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"total_workspace": "1MiB", "policy": "paper"}, "policy='paper': one of arena, paper_wd would do"),
        ({"policy": "paper_wd"}, "policy='paper_wd': it divides a total_workspace; give one, such as '120MiB'"),
        ({"total_workspace": -1}, "total_workspace=-1: must not be negative"),
        ({"total_workspace": "much"}, "total_workspace='much': a number of bytes"),
    ],
)
def test_bad_values_are_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tilewise.optimize(Network(), example(), **arguments)


def test_rank_0_divides_for_all(tmp_path: Any) -> None:
    outputs = run(
        """
from dataclasses import replace
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
x = torch.randn(4, 3, 9, 9)
from tilewise.plan import Plan
class Fronted(Dividing):
    fronts_of = 0
    def fronts(self, problems, options=None, *, progress=True):
        self.fronts_of += 1
        points = ((1.0, 1000), (2.0, 10))
        return {p: tuple(Plan(p.key, "aten", 1, time_ms=ms, workspace=n) for ms, n in points) for p in problems}
planner = Fronted()
asked = {"total_workspace": 2500, "policy": "paper_wd", "planner": planner}
tilewise.optimize(model, x, **asked)
made = report(model)
assert {s["layer"] for s in made.facts["budget"]["segments"]} == {"0", "2"}
print(made.facts["budget"], [one.plan.to_json() for _, _, one in made.passes()])
assert planner.fronts_of == (rank == 0)
assert {o.workspace for o in planner.asked} == ({10, 1000} if rank == 0 else set())
try:
    tilewise.optimize(model, x, **asked | {"total_workspace": 2500 + rank})
except tilewise.nn.RankMismatch as error:
    assert "2500" in str(error) and "2501" in str(error), error
    print("they differ")
""",
        tmp_path,
    )
    assert outputs[0] == outputs[1]
    assert outputs[0].endswith("they differ\n")
