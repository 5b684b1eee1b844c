"""Training while layers are planned in the background: the same function throughout, changed between steps alone."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.nn.dividing import Dividing, assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise import solvers
from tilewise.machine.turns import in_turns, pause
from tilewise.nn import report
from tilewise.nn.background import begin as begin_module
from tilewise.nn.background import service as service_module
from tilewise.nn.background.later import PENDING
from tilewise.nn.background.room import Room
from tilewise.nn.background.service import Service, service
from tilewise.nn.layers.kinds import is_planned
from tilewise.plan import Plan
from tilewise.planner import Options, Planner
from tilewise.planner.caches import rates as rates_module
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.settings import Settings
from tilewise.wisdom import Wisdom

FEW = ("aten", "gemm", "lowering_type1", "micro_batch")
OTHERS = tuple(each.name for each in solvers.all_solvers() if each.name not in FEW)
"""Solvers that are left out where the real planner is at work: nothing is compiled."""


class InPieces(Dividing):
    """Plans each problem in several pieces with pauses between them. Remembers on which thread, and may fail."""

    def __init__(self, pieces: int = 3, fails: Pass | None = None) -> None:
        super().__init__()
        self.pieces, self.fails = pieces, fails
        self.behind: list[bool] = []

    def plan(self, problem: ConvProblem, options: Options | None = None) -> Plan:
        for _ in range(self.pieces):
            self.behind.append(in_turns())
            pause()
        if self.fails is not None and problem.task == self.fails.value:
            raise ArithmeticError("no luck today\nsecond line")
        return super().plan(problem, options)


class Head(nn.Module):
    """A linear layer that is no module of a kind: its products are torch's and not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T  # type: ignore[no-any-return]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3, padding=1)
        self.head = Head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def example() -> torch.Tensor:
    return torch.randn(3, 2, 6, 6)


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One step; its loss."""
    Clock.now += 1e-2
    loss = model(x).square().mean()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p -= 0.1 * p.grad
            p.grad = None
    return loss.detach()  # type: ignore[no-any-return]


def planned(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_planned(module)]


def begin(model: nn.Module, planner: Planner, **options: Any) -> nn.Module:
    options = {"wait": False, "background_share": 0.25, **options}
    return tilewise.optimize(model, example(), planner=planner, **options)


class Clock:
    """Time that passes when it is looked at, a little, and in steps: a turn has room for a few pieces of work."""

    now = 0.0

    def __call__(self) -> float:
        Clock.now += 1e-3
        return Clock.now


class Punctual(Service):
    """A service whose clock, unlike real time, does not go on while its thread works beside the program."""

    def boundary(self) -> None:
        super().boundary()
        self._baton.wait_while_apart(10)


@pytest.fixture(autouse=True)
def _own_service(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A service of the test's own, whose turns do not depend on how fast the machine is."""
    own = Punctual(Clock())
    monkeypatch.setattr(service_module, "_service", own)
    yield
    thread = own._thread
    own.stop()
    assert thread is None or not thread.is_alive()


def test_layers_change_over_one_by_one_and_losses_are_torchs() -> None:
    model, planner, x = Network(), InPieces(), example()
    plain = copy.deepcopy(model)
    begin(model, planner)
    assert report(model).pending == 5  # the first layer needs no gradient of its input
    assert planned(model) == []
    assert PENDING in str(report(model))
    seen = []
    for _ in range(60):
        assert_same(step(model, x), step(plain, x))
        seen.append((len(planned(model)), report(model).pending))
        if not report(model).pending:
            break
    assert seen[-1] == (2, 0)
    assert (1, 2) in seen or (1, 3) in seen  # in between one layer of two
    assert seen == sorted(seen, key=lambda pair: -pair[1])
    assert len(seen) > 4
    assert all(planner.behind)
    assert {p.plan.solver for _, _, p in report(model).passes() if p.plan} == {"micro_batch"}
    for _ in range(3):
        assert_same(step(model, x), step(plain, x))


def test_a_layer_changes_with_its_first_plan_and_again_with_each_further_one() -> None:
    model, planner, x = Network(), InPieces(), example()
    plain = copy.deepcopy(model)
    begin(model, planner)
    by_plan, entries = [], set()
    while report(model).pending:
        assert_same(step(model, x), step(plain, x))
        passes = [p for layer, _, p in report(model).passes() if layer.name == "second"]
        by_plan.append(sum(p.replaced for p in passes))
        assert sum(p.reason == PENDING for p in passes) + by_plan[-1] == 3
        if by_plan[-1]:
            assert "second" in planned(model)
            entries.add(id(model._modules["second"].__dict__["forward"]))
        assert len(by_plan) < 60
    assert by_plan == sorted(by_plan)
    assert {0, 3} < {*by_plan}  # and some in between
    assert len(entries) > 1  # what ran its calls was looked up anew
    for _ in range(3):
        assert_same(step(model, x), step(plain, x))


def test_torchs_choice_of_a_pass_changes_nothing_yet() -> None:
    class Forward(InPieces):
        """A planner that finds torch's own choice the fastest, but for gradients of weights."""

        def plan(self, problem: ConvProblem, options: Options | None = None) -> Plan:
            found = super().plan(problem, options)
            return found if problem.pass_ is Pass.WGRAD else Plan(problem.key, "aten", 1)

    model, planner, x = Network(), Forward(), example()
    plain = copy.deepcopy(model)
    begin(model, planner)
    while report(model).pending:
        assert_same(step(model, x), step(plain, x))
        for layer, _, p in report(model).passes():
            assert p.replaced == (layer.name in planned(model) and p.role == "grad_weight"), p
    assert planned(model) == ["first", "second"]


@pytest.mark.slow
def test_a_first_problem_is_planned_by_typical_rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Measuring the device's rates takes as long as planning one problem, and the first layer waits for it."""
    pending = []
    found = rates_module.measure_profile("cpu")
    monkeypatch.setattr(rates_module, "measure_profile", lambda device: pending.append(report(model).pending) or found)
    planner = Planner(Wisdom(tmp_path / "wisdom.sqlite3"))
    model, x = Network(), example()
    begin(model, planner, exclude=OTHERS)
    first = report(model).pending
    while report(model).pending:
        step(model, x)
    assert len(pending) == 1
    assert pending[0] < first, "the rates were measured before a problem was planned"


def test_nothing_changes_while_a_backward_is_still_to_come() -> None:
    model, planner, x = Network(), InPieces(1), example()
    begin(model, planner)
    outputs = [model(x)]
    done = len(planner.behind)
    outputs += [model(x) for _ in range(20)]
    assert len(planner.behind) == done
    assert planned(model) == []
    with pytest.raises(RuntimeError, match="call it after backward"):
        tilewise.wait(model)
    torch.stack(outputs).sum().backward()
    for _ in range(5):
        Clock.now += 1e-2
        tilewise.background.tick()
    assert len(planner.behind) > done


def test_a_checkpointed_model_is_not_changed_within_its_backward() -> None:
    model, planner, x = Network(), InPieces(1), example().requires_grad_()
    plain = copy.deepcopy(model)
    begin(model, planner)
    for _ in range(20):
        for net in (model, plain):
            Clock.now += 1e-1
            before = planned(net)
            y = checkpoint(net, x, use_reentrant=False)
            between = planned(net)
            (gradient,) = torch.autograd.grad(y.square().sum(), x)
            assert planned(net) == between
            assert set(before) <= set(between)
        other = torch.autograd.grad(model(x).square().sum(), x)[0]
        assert_same(other, gradient)
    assert report(model).pending == 0


def test_wait_plans_the_rest_and_evaluation_counts_as_steps() -> None:
    model, planner, x = Network(), InPieces(), example()
    begin(model, planner)
    with torch.no_grad():
        for _ in range(4):
            Clock.now += 1e-2
            model(x)
    assert len(planner.behind) > 0
    assert report(model).pending
    tilewise.wait(model)
    assert report(model).pending == 0
    assert planned(model) == ["first", "second"]
    tilewise.wait(model)
    with pytest.raises(ValueError, match=r"torch\.nn\.Module"):
        tilewise.wait(3)  # type: ignore[arg-type]


def test_two_models_at_once() -> None:
    models, planners, x = [Network(), Network()], [InPieces(), InPieces()], example()
    plain = copy.deepcopy(models)
    for model, planner in zip(models, planners, strict=True):
        begin(model, planner)
    for _ in range(40):
        for model, other in zip(models, plain, strict=True):
            assert_same(step(model, x), step(other, x))
    assert [report(model).pending for model in models] == [0, 0]
    assert [planned(model) for model in models] == [["first", "second"]] * 2


def test_a_failure_leaves_the_pass_to_torch_with_its_reason() -> None:
    model, x = Network(), example()
    plain = copy.deepcopy(model)
    begin(model, InPieces(fails=Pass.WGRAD))
    for _ in range(40):
        assert_same(step(model, x), step(plain, x))
    passes = [p for _, _, p in report(model).passes()]
    assert {p.reason for p in passes if p.role == "grad_weight"} == {"planning raised ArithmeticError: no luck today"}
    assert [p.replaced for p in passes if p.role == "forward"] == [True, True]


def test_copies_pickles_and_restore_in_the_middle() -> None:
    model, planner, x = Network(), InPieces(), example()
    plain = copy.deepcopy(model)
    begin(model, planner)
    while len(planned(model)) < 1:
        assert_same(step(model, x), step(plain, x))
    assert report(model).pending
    assert model.state_dict().keys() == plain.state_dict().keys()
    twin = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = [torch.load(buffer, weights_only=False), pickle.loads(pickle.dumps(model))]
    assert [planned(each) for each in loaded] == [[], []]
    for _ in range(20):
        want = step(plain, x)
        for each in (model, twin, *loaded):
            assert_same(step(each, x), want)
    with pytest.raises(ValueError, match="a copy of one that is gone or changed"):
        report(twin)
    tilewise.restore(model)
    assert planned(model) == []
    assert "forward" not in model.__dict__
    count = len(planner.behind)
    for _ in range(10):
        assert_same(step(model, x), step(plain, x))
    assert len(planner.behind) <= count + planner.pieces  # what was under way
    with pytest.raises(ValueError, match="undone"):
        report(model)


def test_optimize_again_takes_the_place_of_what_is_under_way() -> None:
    model, x = Network(), example()
    begin(model, InPieces(50))
    for _ in range(3):
        step(model, x)
    tilewise.optimize(model, x, planner=Dividing())
    assert report(model).pending == 0
    assert planned(model) == ["first", "second"]
    assert "forward" not in model.__dict__


def test_a_model_that_is_gone_is_not_planned_and_not_kept() -> None:
    model, planner, x = Network(), InPieces(2), example()
    begin(model, planner)
    for _ in range(3):
        step(model, x)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert service().works() == []


def test_a_shape_that_comes_later_is_planned_later() -> None:
    model, planner, x = Network(), InPieces(), example()
    plain = copy.deepcopy(model)
    begin(model, planner)
    tilewise.wait(model)
    other = torch.randn(2, 2, 7, 6)
    count = len(planner.planned)
    assert_same(step(model, other), step(plain, other))
    assert len(planner.planned) == count
    for _ in range(30):
        assert_same(step(model, other), step(plain, other))
        assert_same(step(model, x), step(plain, x))
    assert len(planner.planned) == count + 5
    assert all(planner.behind)


def test_a_shape_that_comes_later_is_left_to_torch_where_asked() -> None:
    model, planner = Network(), InPieces()
    begin(model, planner, unplanned="torch")
    tilewise.wait(model)
    count = len(planner.planned)
    for _ in range(5):
        step(model, torch.randn(2, 2, 7, 6))
    assert len(planner.planned) == count


def test_what_does_not_fit_is_put_off_and_at_last_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, planner, x = Network(), InPieces(1), example()
    free = [0]
    monkeypatch.setattr(Room, "free", lambda self, device: free[0])
    monkeypatch.setattr("tilewise.nn.background.later.AGAIN_S", 0.0)
    monkeypatch.setattr("tilewise.nn.background.later.MOST_TRIES", 6)
    begin(model, planner)
    for _ in range(3):
        step(model, x)
    assert planner.planned == []
    assert report(model).pending == 5
    free[0] = 1 << 40
    for _ in range(30):
        step(model, x)
    assert report(model).pending == 0
    assert planned(model) == ["first", "second"]
    free[0] = 0
    other = begin(Network(), planner)
    for _ in range(30):
        step(other, x)
    assert report(other).pending == 0
    assert planned(other) == []
    assert "training leaves 0 B free" in str(report(other))


def test_held_off_and_traces_are_no_boundary() -> None:
    model, planner, x = Network(), InPieces(1), example()
    begin(model, planner)
    with tilewise.background.held_off():
        for _ in range(5):
            step(model, x)
    assert planner.behind == []
    with torch.no_grad():
        torch.func.vmap(model)(torch.randn(2, 3, 2, 6, 6))
        torch.jit.trace(nn.Sequential(model), (x,), check_trace=False)
    assert planner.behind == []
    for _ in range(6):
        step(model, x)
    assert planner.behind


def test_known_plans_run_at_once(tmp_path: Any) -> None:
    x = torch.randn(2, 2, 6, 6)
    wisdom = Wisdom(tmp_path / "wisdom.sqlite3")
    options: dict[str, Any] = {"rigor": "estimate", "exclude": ("aten", *OTHERS)}
    tilewise.optimize(Network(), x, planner=Planner(wisdom), **options)
    model = tilewise.optimize(Network(), x, planner=Planner(wisdom), wait=False, **options)
    assert report(model).pending == 0
    assert planned(model)


def test_random_numbers_and_flags_stay(tmp_path: Any) -> None:
    """With the real planner, cut at every pause."""
    model, x = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout(0.5)), torch.randn(2, 2, 6, 6)
    plain = copy.deepcopy(model)
    tilewise.optimize(
        model, x, wait=False, background_share=0.25, planner=Planner(Wisdom(tmp_path / "w")), exclude=OTHERS
    )
    for _ in range(25):
        draws = []
        for net in (model, plain):
            torch.manual_seed(3)
            draws.append((net(x).detach(), torch.rand(2), torch.backends.cudnn.benchmark))
        assert_same(draws[0][0], draws[1][0])
        assert torch.equal(draws[0][1], draws[1][1])
        assert draws[0][2] == draws[1][2]
    assert service().allowance.spent_s > 0
    tilewise.wait(model)
    assert report(model).pending == 0


@pytest.mark.parametrize(
    "option",
    [
        {"memory_limit": "1GiB"},
        {"total_workspace": "1MiB"},
        {"branches": "measured"},
        {"graphs": "auto"},
        {"schedule": "some.json"},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_needs_all_layers_at_once_is_refused(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ValueError, match=f"wait=False: {name}=.* wait=True would do"):
        tilewise.optimize(Network(), example(), wait=False, **option)


def test_progress_is_told_and_one_that_raises_is_not_fatal() -> None:
    model, x = Network(), example()
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int, text: str) -> None:
        told.append((done, total))
        if done == 1:
            raise OSError("no screen")

    tilewise.optimize(model, x, wait=False, rigor="estimate", exclude=OTHERS, progress=progress)
    with pytest.warns(UserWarning, match="progress raised OSError: no screen"):
        tilewise.wait(model)
    assert told == [(0, 5), (1, 5)]
    assert report(model).pending == 0


def test_several_ranks_plan_before_they_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(begin_module, "several_ranks", lambda: True)
    monkeypatch.setattr(begin_module, "_told_ranks", False)
    asked = Settings(wait=False)
    with pytest.warns(UserWarning, match="wait=False: several ranks plan together before the first step"):
        assert not begin_module.plans_later(Network(), asked, None)
    assert not begin_module.plans_later(Network(), asked, None)  # said once
