"""``nn.LocalResponseNorm`` by plans: results and gradients as torch's, in models, and what stays torch's."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tests.lrn import norms
from torch import nn

import tilewise
from tilewise.nn.layers.kinds import is_planned, kind_of
from tilewise.nn.layers.one_input.local_response_norm import LrnLayer, describe, why_torchs
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.plan import Plan
from tilewise.planner import Options, Planner
from tilewise.problems.lrn.problem import LrnProblem
from tilewise.solvers import get


class Windows(Planner):
    """A planner that gives every normalization our kernel, without measuring."""

    def plan_many(self, problems: Any, options: Any = None, **rest: Any) -> dict[Any, Plan]:
        norms = [p for p in problems if isinstance(p, LrnProblem)]
        others = [p for p in problems if not isinstance(p, LrnProblem)]
        solver = get("channel_window")
        found = {p: Plan(p.key, solver.name, solver.version, next(iter(solver.configs(p)))) for p in norms}
        return found | (super().plan_many(others, options, **rest) if others else {})


def layer() -> LrnLayer:
    return LrnLayer(PlanTable(Options(rigor="estimate"), "plan", Windows()))


def module_of(p: LrnProblem) -> nn.LocalResponseNorm:
    return nn.LocalResponseNorm(p.size, p.alpha, p.beta, p.k)


@settings(max_examples=25, deadline=None)
@given(p=norms(dtype="fp32", beta=0.75))
def test_results_and_gradients_are_torchs(p: LrnProblem) -> None:
    module, by_plan = module_of(p), layer()
    x = 30 * torch.randn(p.shape("x"), dtype=torch.float32, device="cpu")
    x = x.as_strided(x.shape, p.strides("x")).requires_grad_(p.task == "training")
    assert describe(module, x).problem == p
    y, want = by_plan(module, x), module(x)
    assert y is not NotImplemented
    if x.dim() == 4:
        assert y.stride() == want.stride()
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    if p.task == "training":
        dy = torch.randn(p.shape("x"), dtype=torch.float32, device="cpu")  # in another layout than x where that is not
        got, of = (torch.autograd.grad(each, x, dy)[0] for each in (y, want))
        torch.testing.assert_close(got, of, rtol=1e-5, atol=1e-5 * float(of.abs().max()))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.LocalResponseNorm(3, alpha=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x).unsqueeze(2))


INPUT = torch.linspace(-3, 3, 30, dtype=torch.float32, device="cpu").view(5, 6)


def stepped(model: nn.Module) -> list[Any]:
    model.zero_grad()
    y = model(INPUT.to(next(model.parameters()).dtype))
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]


def test_modules_run_by_a_plan_in_copies_too_and_are_restored() -> None:
    net = Net()
    want = stepped(copy.deepcopy(net).double())
    tilewise.optimize(net, INPUT, planner=Windows(), goal="passes", rigor="estimate")
    assert is_planned(net.norm)
    assert "channel_window" in str(tilewise.nn.report(net))
    for twin in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        torch.testing.assert_close([t.double() for t in stepped(twin)], want, rtol=1e-5, atol=1e-5)
    tilewise.restore(net)
    assert not is_planned(net.norm)
    assert "forward" not in net.norm.__dict__


def test_optimize_plans_and_checks_by_itself() -> None:
    net = nn.Sequential(nn.LocalResponseNorm(5))
    x = torch.randn(2, 24, 15, 15, dtype=torch.float32, device="cpu").requires_grad_()
    tilewise.optimize(net, x, goal="passes")
    got, want = net(x), nn.LocalResponseNorm(5)(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_gradients_of_gradients_are_torchs() -> None:
    by_plan, module = layer(), nn.LocalResponseNorm(3, alpha=0.7)
    x = torch.randn(2, 5, 3, dtype=torch.float32, device="cpu").requires_grad_()

    def twice(compute: Any) -> torch.Tensor:
        (dx,) = torch.autograd.grad(compute(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.sin().sum(), x)[0]

    torch.testing.assert_close(twice(lambda t: by_plan(module, t)), twice(module), rtol=1e-5, atol=1e-5)


def test_an_input_that_was_changed_before_its_gradient_is_noticed() -> None:
    x = torch.randn(2, 5, 3, dtype=torch.float32, device="cpu").requires_grad_()
    y = layer()(nn.LocalResponseNorm(3), x)
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.slow
def test_a_compiled_model_computes_the_same() -> None:
    net = Net()
    want = net(INPUT)
    tilewise.optimize(net, INPUT, planner=Windows(), goal="passes", rigor="estimate")
    got = torch.compile(net, backend="eager")(INPUT)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


X = torch.ones(2, 5, 3, 4, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (X.double(), "computes in torch.float64 on cpu"),
        (X.bfloat16(), "computes in torch.bfloat16 on cpu"),
        (X[:, :, 0, 0], r"shape \(2, 5\)"),
        (X[:0], r"shape \(0, 5, 3, 4\)"),
        (X[:, :, :, ::2], "dense neither contiguous nor in channels_last"),
        (X.transpose(2, 3), "dense neither contiguous nor in channels_last"),
        (3, "something else in a tensor's place"),
    ],
)
def test_calls_that_stay_torchs_say_why(x: Any, says: str) -> None:
    module = nn.LocalResponseNorm(3)
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(why_torchs(module, x))
    assert layer()(module, x) is NotImplemented


def test_calls_under_autocast_and_with_bad_numbers_stay_torchs() -> None:
    module = nn.LocalResponseNorm(3)
    with torch.autocast("cpu"):
        assert why_torchs(module, X) == "called under autocast"
    assert why_torchs(module, X) == ""
    assert "size=0: must be at least 1" in why_torchs(nn.LocalResponseNorm(0), X)
    with torch.autograd.forward_ad.dual_level():
        assert layer()(module, X) is NotImplemented


def test_modules_that_may_compute_otherwise_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Derived(nn.LocalResponseNorm):
        pass

    kind = kind_of(nn.LocalResponseNorm(3))
    assert kind is not None
    assert kind.obstacle(nn.LocalResponseNorm(3)) == ""
    assert "is a Derived" in kind.obstacle(Derived(3))
    own = nn.LocalResponseNorm(3)
    own.forward = lambda x: x  # type: ignore[method-assign]
    assert "has a forward set on the instance" in kind.obstacle(own)
    monkeypatch.setattr(torch.nn.functional, "local_response_norm", lambda *_: None)
    assert "not torch's own" in kind.obstacle(nn.LocalResponseNorm(3))


def test_another_problem_for_each_way_of_calling() -> None:
    module, p = nn.LocalResponseNorm(3), LrnProblem(2, 5, (3, 4), 3)
    assert describe(module, X).problem == p
    assert describe(module, X.clone().requires_grad_()).problem == replace(p, task="training")
    last = X.contiguous(memory_format=torch.channels_last)
    assert describe(module, last).problem == replace(p, layout_name="channels_last")
