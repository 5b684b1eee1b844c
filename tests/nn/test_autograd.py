"""Derivatives of every kind, passes replaced one at a time, and autocast."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from tests.nn.dividing import Dividing, assert_same
from torch import nn

import tilewise
from tilewise import nn as planned
from tilewise.nn import report
from tilewise.problems.conv.problem import Pass

KINDS = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d)


def pair(kind: Any = nn.Conv2d, passes: tuple[Pass, ...] = tuple(Pass), **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    want = kind(4, 6, 3, stride=2, padding=1, groups=2, **options)
    x = torch.randn(3, 4, *([7] * len(want.kernel_size)))
    got = copy.deepcopy(want)
    tilewise.optimize(got, x.clone().requires_grad_(), planner=Dividing(passes), unplanned="torch")
    return got, want, x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("passes", [c for n in (1, 2) for c in itertools.combinations(Pass, n)])
def test_some_passes_replaced(kind: Any, passes: tuple[Pass, ...]) -> None:
    got, want, x = pair(kind, passes)
    for wants in itertools.product((False, True), repeat=3):
        grads = []
        for model in (got, want):
            xi = x.clone().requires_grad_(wants[0])
            model.weight.requires_grad_(wants[1])
            model.bias.requires_grad_(wants[2])
            y = model(xi)
            assert y.requires_grad is any(wants)
            needed = [t for t, want_it in zip((xi, model.weight, model.bias), wants, strict=True) if want_it]
            grads.append([y, *(torch.autograd.grad(y.square().sum(), needed) if needed else ())])
        for mine, its in zip(*grads, strict=True):
            assert_same(mine, its)


def test_only_the_gradients_asked_for() -> None:
    got, want, x = pair()
    for i in range(3):
        results = []
        for model in (got, want):
            inputs = (x.clone().requires_grad_(), model.weight, model.bias)
            results.append(torch.autograd.grad(model(inputs[0]).square().sum(), inputs[i])[0])
        assert_same(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives(kind: Any) -> None:
    got, want, x = pair(kind)
    results = []
    for model in (got, want):
        xi = x.clone().requires_grad_()
        first = torch.autograd.grad(model(xi).square().sum(), (xi, model.weight, model.bias), create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        results.append([*first, *torch.autograd.grad(penalty, (xi, model.weight, model.bias))])
    for mine, its in zip(*results, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-2)


def test_gradcheck_in_double_goes_to_torch() -> None:
    got, _, x = pair()
    got.double()
    inputs = (x[:, :, :3, :3].double().requires_grad_(),)
    assert torch.autograd.gradcheck(got, inputs)
    assert torch.autograd.gradgradcheck(got, inputs)


@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_of_the_plans(kind: Any) -> None:
    """Numeric derivatives in fp32; the function is linear in each argument, so wide steps cost no accuracy."""
    got = kind(2, 2, 2, stride=2)
    x = torch.randn(2, 2, *([4] * len(got.kernel_size)))
    tilewise.optimize(got, x.clone().requires_grad_(), planner=Dividing(), unplanned="torch")
    inputs = tuple(t.detach().requires_grad_() for t in (x, got.weight, got.bias))

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(got, {"weight": w, "bias": b}, (x,))

    assert torch.autograd.gradcheck(function, inputs, eps=1.0, atol=1e-3, rtol=1e-3)


def test_gradients_in_batches() -> None:
    got, want, x = pair()
    results = []
    for model in (got, want):
        xi = x.clone().requires_grad_()
        y = model(xi)
        dys = torch.stack([torch.ones_like(y), torch.zeros_like(y), y.detach()])
        results.append(torch.autograd.grad(y, (xi, model.weight, model.bias), dys, is_grads_batched=True))
    for mine, its in zip(*results, strict=True):
        assert_same(mine, its)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    got, want, x = pair()
    results = []
    for model in (got, want):
        xi = x.clone().requires_grad_()
        torch.utils.checkpoint.checkpoint(model, xi, use_reentrant=reentrant).square().sum().backward()
        results.append([xi.grad, model.weight.grad, model.bias.grad])
    for mine, its in zip(*results, strict=True):
        assert_same(mine, its)


def test_a_reentrant_checkpoint_is_planned_with_its_gradients() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.second, self.first(x), use_reentrant=True)

    model = tilewise.optimize(Checkpointed(), torch.randn(3, 3, 9, 9), planner=Dividing())
    second = report(model).layers[1]
    assert [p.role for p in second.passes()] == ["forward", "grad_input", "grad_weight"]


def test_changing_a_saved_tensor_is_noticed() -> None:
    got, _, x = pair()
    y = got(x.clone().requires_grad_())
    with torch.no_grad():
        got.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_inference_mode() -> None:
    got, want, x = pair()
    with torch.inference_mode():
        y = got(x)
        assert y.is_inference()
        assert_same(y.clone(), want(x).clone())
        made_here = x + 0
        assert_same(got(made_here).clone(), want(made_here).clone())
    assert_same(got(x), want(x))
    with pytest.raises(RuntimeError, match=r"[Ii]nference tensor"):
        got(made_here).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("planned_under_autocast", [False, True])
def test_autocast(kind: Any, planned_under_autocast: bool) -> None:
    torch.manual_seed(0)
    want = kind(4, 6, 3, padding=1)
    x = torch.randn(3, 4, *([7] * len(want.kernel_size)))
    got, planner = copy.deepcopy(want), Dividing()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=planned_under_autocast):
        tilewise.optimize(got, x.clone().requires_grad_(), planner=planner)
    assert {p.dtype for p in planner.planned} == {"bf16" if planned_under_autocast else "fp32"}
    for _ in range(2):
        results = []
        for model in (got, want):
            model.zero_grad()
            xi = x.clone().requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = model(xi)
            assert y.dtype is torch.bfloat16
            y.float().square().sum().backward()
            assert xi.grad.dtype is model.weight.grad.dtype is torch.float32
            results.append([y, xi.grad, model.weight.grad, model.bias.grad])
        for mine, its in zip(*results, strict=True):
            torch.testing.assert_close(mine, its, rtol=5e-2, atol=2e-1)
    assert {p.dtype for p in planner.planned} == ({"bf16"} if planned_under_autocast else {"fp32", "bf16"})
    assert_same(got(x), want(x))


def test_backward_under_autocast() -> None:
    got, want, x = pair()
    results = []
    for model in (got, want):
        xi = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(xi)
            y.float().square().sum().backward()
        results.append([xi.grad, model.weight.grad])
    for mine, its in zip(*results, strict=True):
        torch.testing.assert_close(mine, its, rtol=5e-2, atol=2e-1)


def test_autocast_of_another_type_and_double() -> None:
    got, want, x = pair()
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype=dtype):
                assert got(x).dtype is want(x).dtype is dtype
                torch.testing.assert_close(got(x), want(x), rtol=5e-2, atol=5e-2)
    got.double(), want.double()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(got(x.double()), want(x.double()))


def test_deterministic_mode_asks_for_deterministic_plans() -> None:
    got, want, x = pair()
    planner = Dividing()
    tilewise.optimize(got, x, planner=planner)
    assert not any(options.deterministic for options in planner.asked)
    before = len(planner.asked)
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(got(x), want(x))
        assert len(planner.asked) > before
        assert all(options.deterministic for options in planner.asked[before:])
    finally:
        torch.use_deterministic_algorithms(False)
    after = len(planner.asked)
    assert_same(got(x), want(x))
    assert len(planner.asked) == after


def test_functional_weights_that_are_not_leaves() -> None:
    planned.set_defaults(planner=Dividing())
    x, scale = torch.randn(3, 2, 9, 9), torch.tensor(2.0, requires_grad=True)
    w = torch.randn(4, 2, 3, 3)
    got = torch.autograd.grad(planned.conv2d(x, w * scale).square().sum(), scale)[0]
    want = torch.autograd.grad(nn.functional.conv2d(x, w * scale).square().sum(), scale)[0]
    assert_same(got, want)
    planned.set_defaults()
