"""``tilewise.conv2d`` with residual and activation: results and gradients as torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise
from tilewise.machine.torch_state import fp32_precision
from tilewise.nn import functional
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.planner import Options
from tilewise.problems.activations import activated

NAMES = ("none", "relu", "relu6", "hardswish", "leaky_relu:0.1", "clamp:-0.25:0.5", "gelu")


@pytest.fixture(autouse=True)
def _estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans by estimates, so that nothing is measured."""
    monkeypatch.setattr(functional, "_defaults", functional.Table(PlanTable(Options(rigor="estimate"), "plan")))


def tensors(dtype: torch.dtype, channels_last: bool) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(1)
    shapes = ((2, 6, 9, 7), (8, 6, 3, 3), (8,), (2, 8, 9, 7))
    made = [torch.randn(shape, generator=generator, dtype=dtype, device="cpu") for shape in shapes]
    format_of_planes = torch.channels_last if channels_last else torch.contiguous_format
    return [t.contiguous(memory_format=format_of_planes) if t.dim() == 4 else t for t in made]


def by_torch(name: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor | None) -> torch.Tensor:
    y = torch.nn.functional.conv2d(x, w, b, padding=1)
    return activated(y if r is None else y + r, name)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(name=st.sampled_from(NAMES), last=st.booleans(), adds=st.booleans(), narrow=st.booleans())
def test_results_are_torchs(name: str, last: bool, adds: bool, narrow: bool) -> None:
    x, w, b, r = tensors(torch.bfloat16 if narrow else torch.float32, last)
    residual = r if adds else None
    got = tilewise.conv2d(x, w, b, padding=1, residual=residual, activation=name)
    want = by_torch(name, x.double(), w.double(), b.double(), None if residual is None else r.double())
    assert got.dtype is x.dtype
    assert got.stride() == torch.nn.functional.conv2d(x, w, b, padding=1).stride()
    scale = float(want.norm())
    assert float((got.double() - want).norm()) <= (2e-2 if narrow else 1e-5) * scale


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_torchs(name: str) -> None:
    first, second = tensors(torch.float32, False), tensors(torch.float64, False)
    for ours, theirs in zip(first, second, strict=True):
        theirs.copy_(ours)
        ours.requires_grad_()
        theirs.requires_grad_()
    x, w, b, r = first
    with fp32_precision("cpu", "conv", "ieee"):
        tilewise.conv2d(x, w, b, padding=1, residual=r, activation=name).square().sum().backward()
    by_torch(name, *second).square().sum().backward()
    for ours, theirs in zip(first, second, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert float((ours.grad.double() - theirs.grad).norm()) <= 1e-4 * max(1e-3, float(theirs.grad.norm()))


@pytest.mark.slow
def test_a_residual_that_is_broadcast_is_left_to_torch() -> None:
    x, w, b, r = tensors(torch.float32, False)
    got = tilewise.conv2d(x, w, b, padding=1, residual=r[:1, :1], activation="relu")
    torch.testing.assert_close(got, by_torch("relu", x, w, b, r[:1, :1]), rtol=1e-4, atol=1e-4)


def test_one_plan_computes_all_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b, r = tensors(torch.float32, True)
    table = functional._defaults
    seen = []
    bound = PlanTable.bound
    monkeypatch.setattr(
        PlanTable, "bound", lambda self, problem, *rest: seen.append(problem.key) or bound(self, problem, *rest)
    )
    tilewise.conv2d(x, w, b, padding=1, residual=r, activation="relu")
    assert table is functional._defaults
    assert any("bias residual relu" in key for key in seen)


@pytest.mark.parametrize("name", ["softmax", "leaky_relu", "clamp:0:6"])
def test_other_activations_are_refused(name: str) -> None:
    x, w, b, _ = tensors(torch.float32, False)
    with pytest.raises(ValueError, match="would do"):
        tilewise.conv2d(x, w, b, padding=1, activation=name)
