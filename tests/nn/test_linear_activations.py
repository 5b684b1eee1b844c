"""``tilewise.linear`` with an activation: results and gradients as torch's, by plans of any passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nn.product_plans import plan_of
from torch.nn import functional as F

import tilewise
from tilewise.nn import functional
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.plan import Config, Plan
from tilewise.planner import Options
from tilewise.problems.activations import ACTIVATIONS, FROM_RESULT, activated
from tilewise.problems.base import Problem
from tilewise.solvers import get

Linear = Callable[..., torch.Tensor]


class Given(PlanTable):
    """A table whose plans of the storages ``by_plan`` are products of our own; torch computes the others."""

    def __init__(self, *by_plan: str) -> None:
        super().__init__(Options(), "plan")
        self.by_plan = by_plan
        self.asked: list[Problem] = []

    def plan(self, problems: Any, deterministic: bool) -> None:
        for p in self.missing(problems, deterministic):
            self.asked.append(p)
            by_torch = Plan(p.key, "aten_gemm", 1, Config())
            self.learn(p, deterministic, plan_of(p) if p.task in self.by_plan else by_torch)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Given:
    """The table of plans of ``tilewise.linear`` during a test, all of whose products are by plans."""
    found = Given("nt", "nn", "tn")
    monkeypatch.setattr(functional, "_defaults", functional.Table(found))
    return found


def by_torch(activation: str) -> Linear:
    return lambda x, w, b=None: activated(F.linear(x, w, b), activation)


def with_gradients(function: Linear, tensors: Any) -> list[torch.Tensor]:
    y = function(*tensors)
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y.detach(), *(torch.autograd.grad(y, wanted, dy) if wanted else ())]


@settings(max_examples=12, deadline=None)
@given(
    activation=st.sampled_from(ACTIVATIONS), leading=st.lists(st.integers(1, 5), max_size=2), into=st.integers(1, 30),
    outputs=st.integers(1, 30), bias=st.booleans(), needs=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    by_plan=st.sets(st.sampled_from(("nt", "nn", "tn"))), autocast=st.booleans(), turned=st.booleans(),
)  # fmt: skip
def test_results_and_gradients_are_torchs(
    activation: str, leading: list[int], into: int, outputs: int, bias: bool, needs: tuple[bool, bool, bool],
    by_plan: set[str], autocast: bool, turned: bool,
) -> None:  # fmt: skip
    g = torch.Generator("cpu").manual_seed(1)
    x = torch.randn((*leading, into), generator=g, dtype=torch.float32, device="cpu").requires_grad_(needs[0])
    w = torch.randn((outputs, into), generator=g, dtype=torch.float32, device="cpu")
    w = (w.t().contiguous().t() if turned else w).requires_grad_(needs[1])
    b = torch.randn(outputs, generator=g, dtype=torch.float32, device="cpu").requires_grad_(needs[2]) if bias else None
    patch = pytest.MonkeyPatch()
    with patch.context() as patched, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        patched.setattr(functional, "_defaults", functional.Table(Given(*by_plan)))
        want = with_gradients(by_torch(activation), (x, w, b))
        for _ in range(2):  # the second call is recognised by its guard
            got = with_gradients(lambda *t: tilewise.linear(*t, activation=activation), (x, w, b))
            near = 0.2 if autocast else 1e-4
            torch.testing.assert_close(got, want, rtol=near, atol=near)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_one_plan_has_the_activation_unless_its_gradient_needs_more(activation: str, table: Given) -> None:
    x, w = torch.ones(3, 8), torch.ones(4, 8)
    tilewise.linear(x, w, activation=activation)
    assert [p.activation for p in table.asked] == [activation]
    tilewise.linear(x, w.requires_grad_(), activation=activation)
    forward = next(p for p in table.asked[1:] if p.task == "nt") if activation not in FROM_RESULT else table.asked[0]
    assert forward.activation == (activation if activation in FROM_RESULT else "none")
    assert {p.activation for p in table.asked if p.task != "nt"} == {"none"}


@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "silu"])
def test_gradients_of_gradients(activation: str, table: Given) -> None:
    g = torch.Generator("cpu").manual_seed(2)
    x, w = (torch.randn(shape, generator=g, dtype=torch.float32, device="cpu").requires_grad_()
            for shape in ((3, 5), (4, 5)))  # fmt: skip

    def penalty(function: Linear) -> torch.Tensor:
        (dx,) = torch.autograd.grad(function(x, w).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), w)[0]

    got = penalty(lambda x, w: tilewise.linear(x, w, activation=activation))
    torch.testing.assert_close(got, penalty(by_torch(activation)), rtol=1e-4, atol=1e-4)


def test_a_result_that_was_changed_is_found_out(table: Given) -> None:
    """The result is kept for backward, so autograd refuses to use it after it was written to."""
    x, w = torch.ones(3, 8), torch.ones(4, 8).requires_grad_()
    y = tilewise.linear(x, w, activation="tanh")
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_torch_computes_has_the_activation_too(table: Given) -> None:
    x, w = torch.randn(3, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    torch.testing.assert_close(tilewise.linear(x, w, activation="gelu"), by_torch("gelu")(x, w))
    assert not table.asked


def test_another_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation='softmax': one of none, relu"):
        tilewise.linear(torch.ones(2, 3), torch.ones(4, 3), activation="softmax")


def test_compiled(table: Given) -> None:
    x, w = torch.randn(3, 8), torch.randn(4, 8)
    compiled = torch.compile(lambda x, w: tilewise.linear(x, w, activation="relu"), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, w), torch.relu(x @ w.t()))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("solver", ["thin_gemm", "cublaslt_gemm", "split_k_gemm", "stream_k_gemm"])
@pytest.mark.parametrize("bias", [False, True])
def test_on_a_gpu(solver: str, activation: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By solvers that apply an activation and others that do not, called again as native code recognises calls."""

    class By(Given):
        def plan(self, problems: Any, deterministic: bool) -> None:
            for p in self.missing(problems, deterministic):
                found = get(solver)
                self.learn(
                    p, deterministic, Plan(p.key, solver, found.version, next(iter(found.configs(p))), time_ms=1.0)
                )

    monkeypatch.setattr(functional, "_defaults", functional.Table(By()))
    g = torch.Generator("cuda").manual_seed(1)
    for dtype, near in ((torch.float32, 1e-3), (torch.bfloat16, 0.1)):
        x = torch.randn(32, 512, generator=g, dtype=dtype, device="cuda")
        w = torch.randn(256, 512, generator=g, dtype=dtype, device="cuda") / 20
        b = torch.randn(256, generator=g, dtype=dtype, device="cuda") if bias else None
        for _ in range(3):
            got = tilewise.linear(x, w, b, activation=activation)
            torch.testing.assert_close(got, by_torch(activation)(x, w, b), rtol=near, atol=near)
    x, w = (torch.randn(shape, generator=g, dtype=torch.float32, device="cuda").requires_grad_()
            for shape in ((48, 512), (320, 512)))  # fmt: skip
    if solver in ("cublaslt_gemm", "stream_k_gemm"):  # the others are not for all three products
        for _ in range(2):
            got, want = (
                torch.autograd.grad(f(x, w).square().sum(), (x, w))
                for f in (lambda x, w: tilewise.linear(x, w, activation=activation), by_torch(activation))
            )
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-2 * float(other.abs().max()))
