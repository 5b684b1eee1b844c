"""Which branches run at once, and what is told of them; on a CPU, with lanes that run in sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.nn.dividing import Dividing
from tests.nn.forking import Forms, counts, inception, programmed
from torch import nn

import tilewise
from tilewise.nn import report
from tilewise.nn.branches import choose as branch_times
from tilewise.nn.branches.streams import InSequence, fork, in_sequence_now, is_forked
from tilewise.planner.measuring.times import Took


class Dropping(nn.Module):
    """Random numbers in branches and before them, launched in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.drops = nn.ModuleList(nn.Dropout(0.4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drops[0](x)
        y, z = self.a(x), self.drops[1](x)
        return self.drops[2](y) + self.b(z) + x


def test_a_forward_that_a_trace_misreads_is_found_out() -> None:
    module = Forms(lambda m, x: m.a(x) + m.b(x) if isinstance(x, torch.Tensor) else m.a(x) + m.b(x) * 2)
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    assert "something else" in branch_times.disagreement(module, programmed(module), x, training=True)
    written = Forms(lambda m, x: m.a(F.relu(x, inplace=True)) + m.b(x))
    assert "writes into" in branch_times.disagreement(written, programmed(written), x, training=True)
    adding = Forms(lambda m, x: (lambda y: m.a(y) + m.b(y))(F.relu(x, inplace=True)))
    assert not branch_times.disagreement(adding, programmed(adding), x, training=True)

    def augmented(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x) + m.b(x)
        x += 1
        return y + x

    left = Forms(augmented)
    assert "writes into its input" in branch_times.disagreement(left, programmed(left), x, training=False)
    for good in (inception(4), Dropping()):
        for training in (True, False):
            assert not branch_times.disagreement(good, programmed(good), x, training=training)


ELSEWHERE = "there are no streams on a CPU"


def test_optimize_tells_of_branches_and_leaves_them_on_a_cpu() -> None:
    model = nn.Sequential(inception(), nn.ReLU(), Forms(counts), Dropping())
    x = torch.randn(3, 6, 5, 5)
    model[2] = Forms(counts)
    model.insert(2, nn.Conv2d(12, 4, 1))
    tilewise.optimize(model, x, planner=Dividing(), branches="measured")
    said = report(model).branches
    assert [(one.name, len(one.regions)) for one in said] == [("0", 1), ("3", 0), ("4", 1)]
    assert not any(one.on_streams for one in said)
    assert [one.reason for one in said] == [ELSEWHERE, "its forward changes its own attributes", ELSEWHERE]
    assert said[0].workspace is not None
    assert "0: 4 branches in sequence" in str(report(model))
    assert tilewise.nn.groups(model) == []
    assert model[3].calls == 2
    tilewise.optimize(model, x, planner=Dividing())
    assert report(model).branches == ()
    with pytest.raises(ValueError, match="branches='streams': one of sequence, measured"):
        tilewise.optimize(model, x, branches="streams")


CLOCK = [0.0]
"""Milliseconds that pass where a test says so: decisions must not depend on who else computes here."""


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def took(call: Callable[[], object]) -> Took:
        before = CLOCK[0]
        call()
        return Took(1.0 + CLOCK[0] - before, 0.0)

    def rounds(calls: Sequence[Callable[[], object]], device: torch.device, **_: Any) -> list[list[Took]]:
        return [[took(call) for _ in range(5)] for call in calls]

    monkeypatch.setattr(branch_times, "rounds", rounds)


def slow(m: Any, x: torch.Tensor) -> torch.Tensor:
    CLOCK[0] += 4  # not traced: the program is the faster one
    return m.a(x) + m.b(x)


@pytest.mark.usefixtures("_clock")
@pytest.mark.parametrize("training", [True, False])
def test_what_is_measured_faster_runs_on_lanes(training: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Forms(slow), nn.Dropout(0.5), nn.BatchNorm2d(4), Forms(lambda m, x: m.a(x) + m.b(x)))
    model.append(Forms(slow))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(2, 4, 5, 5)
    random = torch.get_rng_state()

    def lanes_of(value: torch.Tensor) -> InSequence | None:
        return None if in_sequence_now() else InSequence()

    told = branch_times.choose_branches(model, [x], "measured", training=training, workspaces={}, lanes_of=lanes_of)
    assert [(one.name, one.on_streams) for one in told] == [("0", True), ("3", False), ("4", True)]
    assert not any(one.reason for one in told)
    assert [(one.streams_ms, one.sequence_ms) for one in told] == [(1, 5), (1, 1), (1, 5)]
    assert [is_forked(module) for module in model] == [True, False, False, False, True]
    assert tilewise.nn.groups(model) == [[["0.a"], ["0.b"]], [["4.a"], ["4.b"]]]
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert "0: 2 branches on streams" in str(told[0])


@pytest.mark.usefixtures("_clock")
def test_a_whole_step_that_is_slower_runs_in_sequence() -> None:
    model = nn.Sequential(Forms(slow))

    class Waiting(InSequence):
        def join(self, width: int) -> None:
            super().join(width)
            CLOCK[0] += 12 * is_forked(model[0])

    def lanes_of(value: torch.Tensor) -> InSequence | None:
        return None if in_sequence_now() else Waiting()

    x = torch.randn(2, 4, 5, 5)
    (one,) = branch_times.choose_branches(model, [x], "measured", training=True, workspaces={}, lanes_of=lanes_of)
    assert one.reason.startswith("the whole step took")
    assert not one.on_streams
    assert not is_forked(model[0])


def test_groups_are_the_regions_that_run_at_once() -> None:
    model = nn.Sequential(inception(), nn.Conv2d(12, 6, 1), inception())
    fork(model[2], programmed(model[2]))
    (region,) = tilewise.nn.groups(model)
    assert region == [
        ["2.branch1.0"],
        ["2.branch3.0.0", "2.branch3.1.0"],
        ["2.branch5.0.0", "2.branch5.1.0"],
        ["2.branch_pool.1.0"],
    ]
    tilewise.restore(model)
    assert tilewise.nn.groups(model) == []


def test_a_region_beyond_the_budget_runs_in_sequence() -> None:
    model = nn.Sequential(inception())
    sizes = {"branch1.0": 5, "branch3.0.0": 7, "branch3.1.0": 9, "branch5.1.0": 1, "branch_pool.1.0": 2}
    sizes = {f"0.{name}": size for name, size in sizes.items()}
    x = torch.randn(1, 6, 5, 5)
    for budget, reason in ((16, "17 B at once, the budget 16 B"), (17, ELSEWHERE)):
        (one,) = branch_times.choose_branches(model, [x], "measured", training=True, workspaces=sizes, budget=budget)
        assert one.workspace == 5 + 9 + 1 + 2
        assert reason in one.reason
        assert not one.on_streams
