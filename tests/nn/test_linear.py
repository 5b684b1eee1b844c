"""``tilewise.linear``: results and gradients as torch's, whichever passes run by plan, and what is left to torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nn.product_plans import plan_of
from torch.autograd import gradcheck, gradgradcheck

import tilewise
from tilewise.nn import functional
from tilewise.nn.layers.linear.call import describe, problems_of
from tilewise.nn.layers.linear.layer import LinearLayer
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.plan import Config, Plan
from tilewise.planner import Options
from tilewise.problems.base import Problem

PASSES = ("forward", "grad_input", "grad_weight")


class Given(PlanTable):
    """A table whose plans are thin products, for the passes that are named; torch computes the others."""

    def __init__(self, passes: tuple[str, ...] = PASSES) -> None:
        super().__init__(Options(), "plan")
        self.tasks = {{"forward": "nt", "grad_input": "nn", "grad_weight": "tn"}[name] for name in passes}
        self.asked: list[Problem] = []

    def plan(self, problems: Any, deterministic: bool) -> None:
        for p in self.missing(problems, deterministic):
            self.asked.append(p)
            by_torch = Plan(p.key, "aten_gemm", 1, Config())
            self.learn(p, deterministic, plan_of(p) if p.task in self.tasks else by_torch)


def values(
    shape: tuple[int, ...], outputs: int, bias: bool, needs: tuple[bool, bool, bool] = (True, True, True)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    x, w = torch.randn(shape), torch.randn(outputs, shape[-1])
    b = torch.randn(outputs).requires_grad_(needs[2]) if bias else None
    return x.requires_grad_(needs[0]), w.requires_grad_(needs[1]), b


def with_gradients(function: Callable[..., torch.Tensor], tensors: Any) -> list[torch.Tensor | None]:
    """The result of ``function``, and the gradient of each tensor that needs one."""
    y = function(*tensors)
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
    return [y.detach(), *(torch.autograd.grad(y, wanted, dy) if wanted else ())]


def by_plans(layer: LinearLayer) -> Callable[..., torch.Tensor]:
    def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        y = layer(x, w, b)
        return torch.nn.functional.linear(x, w, b) if y is NotImplemented else y

    return linear


@settings(max_examples=40, deadline=None)
@given(
    leading=st.lists(st.integers(1, 5), max_size=2),
    into=st.integers(1, 40),
    outputs=st.integers(1, 40),
    bias=st.booleans(),
    needs=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    passes=st.sets(st.sampled_from(PASSES)),
)
def test_results_and_gradients_are_torchs(
    leading: list[int], into: int, outputs: int, bias: bool, needs: tuple[bool, bool, bool], passes: set[str]
) -> None:
    tensors = values((*leading, into), outputs, bias, needs)
    layer = LinearLayer(Given(tuple(passes)))
    want = with_gradients(torch.nn.functional.linear, tensors)
    for _ in range(2):  # the second call is recognised by its guard
        got = with_gradients(by_plans(layer), tensors)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_every_pass_is_one_product() -> None:
    tensors = values((3, 4, 10), 7, True)
    call = describe(*tensors)
    assert call is not None
    problems = problems_of(call)
    assert {role: (p.op, p.m, p.n, p.k) for role, p in problems.items()} == {
        "forward": ("NT", 12, 7, 10),
        "grad_input": ("NN", 12, 10, 7),
        "grad_weight": ("TN", 7, 10, 12),
    }
    assert problems["forward"].bias
    with torch.no_grad():
        call = describe(*tensors)
        assert call is not None
        assert list(problems_of(call)) == ["forward"]


def test_gradients_of_gradients_are_torchs() -> None:
    layer = LinearLayer(Given())
    x, w, b = values((3, 5), 4, True)
    assert layer(x, w, b) is not NotImplemented

    def penalty(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        y = function(x, w, b).square().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), w)[0]

    torch.testing.assert_close(penalty(by_plans(layer)), penalty(torch.nn.functional.linear), rtol=1e-4, atol=1e-4)


def test_torchs_own_checks_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tensors are of float64, which is torch's to compute: the calls must still be right."""
    monkeypatch.setattr(functional, "_defaults", functional.Table(Given()))
    x, w, b = (t.double().detach().requires_grad_() for t in values((3, 5), 4, True) if t is not None)
    assert gradcheck(tilewise.linear, (x, w, b))
    assert gradgradcheck(tilewise.linear, (x, w, b))


class Marked(torch.Tensor):
    """A subclass with torch's own handler."""


def left_to_torch() -> Iterator[tuple[str, Callable[[], Any]]]:
    x, w, b = values((4, 6), 5, True)
    linear = functools.partial(tilewise.linear)
    yield "float64", lambda: linear(x.double(), w.double(), b.double())  # type: ignore[union-attr]
    yield "strided weight", lambda: linear(x, w.repeat_interleave(2, 1)[:, ::2], b)
    yield "strided input", lambda: linear(x.repeat_interleave(2, 1)[:, ::2], w, b)
    yield "rows apart", lambda: linear(x.repeat_interleave(2, 0)[::2], w, b)
    yield "empty", lambda: linear(x[:0], w, b)
    yield "subclass", lambda: linear(x.detach().as_subclass(Marked), w, b)
    yield "vmap", lambda: torch.func.vmap(lambda row: linear(row, w, b))(x)
    yield "forward mode", lambda: torch.func.jvp(lambda x: linear(x, w, b), (x,), (x,))[0]


@pytest.mark.parametrize(("what", "call"), list(left_to_torch()), ids=lambda value: value if type(value) is str else "")
def test_what_is_left_to_torch_is_right(what: str, call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    table = Given()
    monkeypatch.setattr(functional, "_defaults", functional.Table(table))
    got = call()
    monkeypatch.setattr(functional, "_defaults", functional.Table(PlanTable(Options(), "torch")))
    torch.testing.assert_close(got, call())
    assert not table.asked, what


def test_a_call_of_another_kind_is_looked_up() -> None:
    layer, (x, w, b) = LinearLayer(Given()), values((4, 6), 5, True)
    want = torch.nn.functional.linear
    for tensors in ((x, w, b), (x[:2], w, b), (x, w, None), (x, w[:3], None), (x.view(2, 2, 6), w, b), (x, w, b)):
        torch.testing.assert_close(by_plans(layer)(*tensors), want(*tensors), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert not layer(x, w, b).requires_grad
    assert layer(x, w, b).requires_grad
    layer.forget()
    assert layer(x, w, b).requires_grad


@pytest.mark.parametrize(
    "arguments", [(torch.ones(2, 3), torch.ones(4, 5)), (torch.ones(2, 3), torch.ones(4, 3), torch.ones(5)), (1, 2)]
)
def test_what_torch_refuses_is_refused_by_torch(arguments: tuple[Any, ...]) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        tilewise.linear(*arguments)


def test_it_is_planned_on_sight(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    table = PlanTable(Options(rigor="estimate"), "plan")
    monkeypatch.setattr(functional, "_defaults", functional.Table(table))
    x, w, b = values((3, 20), 30, True)
    torch.testing.assert_close(
        with_gradients(tilewise.linear, (x, w, b)), with_gradients(torch.nn.functional.linear, (x, w, b))
    )
    assert len(table._plans) == 3
