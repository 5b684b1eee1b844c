"""Layers whose tensors have axes of size 1, of which strides are anybody's: they run from C++ as all others do."""

from __future__ import annotations

import copy
import gc
import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.native.test_products import fail
from tests.nn.dividing import Dividing, assert_same
from tests.nn.test_native_calls import _on_a_cpu  # noqa: F401  (a fixture)
from tests.solvers.test_cublas import Stand
from torch import nn

import tilewise
from tilewise import solvers
from tilewise.execute import Bound
from tilewise.nn.layers.runner import Runner
from tilewise.plan import Plan
from tilewise.planner import Options, Planner
from tilewise.problems.base import dense_strides
from tilewise.problems.conv.problem import ConvProblem

LAYERS: dict[str, tuple[dict[str, Any], int]] = {
    "pointwise": ({"kernel_size": 1}, 5),
    "depthwise": ({"kernel_size": 3, "padding": 1, "groups": 4}, 5),
    "squeezed": ({"kernel_size": 1}, 1),
    "whole": ({"kernel_size": 3}, 3),
}
"""Options of a layer, and the size of its image."""


class Multiplying(Planner):
    """Plans every problem by ``gemm``."""

    def plan(self, problem: ConvProblem, options: Options | None = None) -> Plan:  # type: ignore[override]
        solver = solvers.get("gemm")
        return Plan(problem.key, solver.name, solver.version, next(iter(solver.configs(problem))), time_ms=1.0)


def made(
    name: str, layout: torch.memory_format, planner: Planner, *, bias: bool, needs_grad: bool = True
) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A planned layer, the same by torch, and an input that needs its gradient."""
    options, size = LAYERS[name]
    torch.manual_seed(0)
    want = nn.Conv2d(4, 8, bias=bias, **options).to(memory_format=layout)
    x = torch.randn(3, 4, size, size).contiguous(memory_format=layout)
    got = copy.deepcopy(want)
    example = x.clone().requires_grad_(needs_grad)
    tilewise.optimize(got, example, planner=planner, unplanned="torch")
    return got, want, x.requires_grad_(needs_grad)


def results(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    y = model(x)
    return [y, *torch.autograd.grad(y, (x, *model.parameters()), dy)]


def assert_alike(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for mine, its in zip(got, want, strict=True):
        assert_same(mine, its)
        assert mine.stride() == its.stride()


def usual(y: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of a result that lie as it does, with all strides that are usual."""
    strides = {y.stride(), *(dense_strides(y.shape, layout) for layout in ("contiguous", "channels_last"))}
    alike = [s for s in strides if all(n == 1 or a == b for n, a, b in zip(y.shape, s, y.stride(), strict=True))]
    return [torch.randn_like(y).as_strided(y.shape, s) for s in sorted(alike)]


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """From now on an entry for each call of a method, also of objects that keep it bound."""
    found: list[str] = []
    method = getattr(owner, name)

    def called(*given: Any, **named: Any) -> Any:
        found.append(name)
        return method(*given, **named)

    monkeypatch.setattr(owner, name, called)
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", list(LAYERS))
def test_no_python_between_a_call_and_its_plans(
    name: str, layout: torch.memory_format, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    got, want, x = made(name, layout, Dividing(), bias=bias)
    monkeypatch.setattr(Runner, "gradients", fail)
    monkeypatch.setattr(Runner, "compute", fail)
    y = want(x)
    assert not hasattr(got(x).grad_fn, "saved_tensors"), "the node is one of C++"
    for dy in usual(y.detach()):
        assert_alike(results(got, x, dy), results(want, x, dy))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", list(LAYERS))
def test_under_autocast(name: str, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cast operand lies as the one that it is from."""
    with torch.autocast("cpu", torch.bfloat16):
        got, want, x = made(name, layout, Dividing(), bias=True)
        mine, its = got(x), want(x)
    assert not hasattr(mine.grad_fn, "saved_tensors")
    assert mine.stride() == its.stride()
    monkeypatch.setattr(Runner, "gradients", fail)
    for dy in usual(its.detach()):
        pairs = ((y, (x, *model.parameters())) for y, model in ((mine, got), (its, want)))
        ours, theirs = (torch.autograd.grad(y, leaves, dy, retain_graph=True) for y, leaves in pairs)
        for one, other in zip(ours, theirs, strict=True):
            assert one.stride() == other.stride()
            torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2 * float(other.abs().max()))


def test_both_calls_of_a_layer_go_with_it() -> None:
    def runners() -> int:
        gc.collect()
        return sum(type(one) is Runner for one in gc.get_objects())

    before = runners()
    got, _, x = made("squeezed", torch.channels_last, Dividing(), bias=True)
    y = got(x)
    y.backward(torch.ones_like(y))
    assert runners() > before
    del got, x, y
    assert runners() == before


def test_gradients_that_lie_otherwise_are_copied_by_python() -> None:
    for name, layout in itertools.product(("pointwise", "squeezed"), (torch.contiguous_format, torch.channels_last)):
        got, want, x = made(name, layout, Dividing(), bias=True)
        y = want(x).detach()
        dy = torch.randn(*y.shape[:-1], y.shape[-1] + 2)[..., 1:-1]
        assert_alike(results(got, x, dy), results(want, x, dy))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(("pointwise", "squeezed", "whole")),
    layout=st.sampled_from((torch.contiguous_format, torch.channels_last)),
    bias=st.booleans(),
    number=st.integers(0, 2),
)
def test_products_are_queued_for_results_with_torchs_strides(
    blas: Stand,
    name: str,
    layout: torch.memory_format,
    bias: bool,
    number: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        by_python = counted(patch, Bound, "_from_python")
        got, want, x = made(name, layout, Multiplying(), bias=bias)
        y = want(x).detach()
        likely = usual(y)
        dy = likely[number % len(likely)]
        got(x)  # plans are bound
        blas.calls.clear()
        by_python.clear()
        patch.setattr(Runner, "gradients", fail)
        found = results(got, x, dy)
    if layout is torch.channels_last or name == "whole":  # where each pass is one product
        assert not by_python
        assert [kind for kind, _ in blas.calls if kind != "mode"] == ["gemm"] * 3
    assert_alike(found, results(want, x, dy))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["pointwise", "squeezed", "whole"])
def test_without_gradients_plans_are_queued_as_well(
    blas: Stand, name: str, layout: torch.memory_format, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_python = counted(monkeypatch, Bound, "_from_python")
    computed = counted(monkeypatch, Runner, "compute")
    with mode():
        got, want, x = made(name, layout, Multiplying(), bias=True, needs_grad=False)
        got(x)
        by_python.clear()
        computed.clear()
        y = got(x)
        expected = want(x)
    assert not computed
    assert not by_python
    assert y.grad_fn is None
    assert y.is_inference() == expected.is_inference()
    assert_alike([y], [expected])
