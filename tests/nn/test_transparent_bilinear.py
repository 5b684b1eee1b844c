"""Bilinear layers while planning is enabled: as torch's, by products where these are faster, and what stays torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from tests.nn.product_plans import Thin
from tests.sampling import some
from torch import nn

import tilewise
from tilewise.nn.layers import bilinear as module

TORCHS_OWN = torch._C._VariableFunctions.bilinear


@pytest.fixture(autouse=True)
def _puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_measured", lambda call: True)
    yield
    tilewise.disable()
    assert F.bilinear is TORCHS_OWN


def operands(*leading: int, first: int = 3, second: int = 4, outputs: int = 5) -> list[torch.Tensor]:
    shapes = (*leading, first), (*leading, second), (outputs, first, second), (outputs,)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def with_gradients(function: Callable[..., torch.Tensor], tensors: Any) -> list[torch.Tensor]:
    """The result of ``function``, and the gradient of each tensor that needs one."""
    y = function(*tensors)
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y.detach(), *(torch.autograd.grad(y, wanted, dy) if wanted else ())]


def by_product(y: torch.Tensor) -> bool:
    """Whether a product computed it: torch's own function is one node of autograd."""
    return "Trilinear" not in _names(y.grad_fn)


def _names(node: Any, depth: int = 4) -> str:
    """The names of the last nodes that made a tensor."""
    if node is None or not depth:
        return ""
    return type(node).__name__ + "".join(_names(each, depth - 1) for each, _ in node.next_functions)


@settings(max_examples=some(30), deadline=None)
@given(
    leading=st.lists(st.integers(1, 4), min_size=1, max_size=2), first=st.integers(1, 9), second=st.integers(1, 9),
    outputs=st.integers(1, 9), bias=st.booleans(), needs=st.lists(st.booleans(), min_size=4, max_size=4),
)  # fmt: skip
def test_any_layer_as_torch(
    leading: list[int], first: int, second: int, outputs: int, bias: bool, needs: list[bool]
) -> None:
    tensors = operands(*leading, first=first, second=second, outputs=outputs)[: 4 if bias else 3]
    tensors = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=False)]
    want = with_gradients(TORCHS_OWN, [t.detach().double().requires_grad_(t.requires_grad) for t in tensors])
    with tilewise.enabled(wait=True, planner=Thin()):
        for _ in range(3):
            got = with_gradients(F.bilinear, tensors)
            for mine, its in zip(got, want, strict=True):
                torch.testing.assert_close(mine.double(), its, rtol=1e-4, atol=1e-4)


def test_modules_and_calls_by_name_run_by_products() -> None:
    torch.manual_seed(0)
    layer, (x1, x2, w, b) = nn.Bilinear(6, 7, 8), operands(10)
    first, second = torch.randn(9, 6), torch.randn(9, 7)
    want, named = layer(first, second), F.bilinear(x1, x2, w, b)
    assert not by_product(want)
    with tilewise.enabled(wait=True, planner=Thin(), goal="passes") as session:
        for _ in range(3):
            y, other = layer(first, second), F.bilinear(input1=x1, input2=x2, weight=w, bias=b)
        assert by_product(y)
        assert by_product(other)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(other, named)
    assert F.bilinear is TORCHS_OWN
    assert {each.kind for each in session.report().layers} == {"bilinear"}


@pytest.mark.parametrize("faster", [True, False])
def test_where_no_plan_gains_the_faster_of_torchs_ways_is_taken(monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    monkeypatch.setattr(module, "_measured", lambda call: faster)
    tensors = operands(10)
    with tilewise.enabled(wait=True, planner=Thin("none"), goal="passes") as session:
        for _ in range(3):
            y = F.bilinear(*tensors)
    assert by_product(y) is faster
    assert session.report().facts["bilinear"] == {"compared": 1, "kept": int(faster)}


def test_what_stays_torchs_is_reported() -> None:
    x1, x2, w, b = operands(10)
    with tilewise.enabled(wait=True, workspace=0) as session:
        for _ in range(3):
            assert not by_product(F.bilinear(x1, x2, w, b))
    assert "bilinear x1" in str(session.report())
    with tilewise.enabled(wait=True, planner=Thin()) as session:
        for _ in range(3):
            assert F.bilinear(*(t.double() for t in (x1, x2, w, b))).dtype is torch.float64
        compiled = torch.compile(lambda x1, x2: F.bilinear(x1, x2, w, b), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x1, x2), TORCHS_OWN(x1, x2, w, b))
        with pytest.raises(RuntimeError, match="bilinear"):
            F.bilinear(x1, x2[:, :2], w, b)
        with pytest.raises(TypeError):
            F.bilinear(x1)
    assert "computes in torch.float64" in str(session.report())


def test_a_weight_that_meets_many_shapes_is_left_alone_in_the_end() -> None:
    _, _, w, b = operands(1)

    def call(rows: int) -> None:
        x1, x2 = torch.randn(rows, 3), torch.randn(rows, 4)
        torch.testing.assert_close(F.bilinear(x1, x2, w, b), TORCHS_OWN(x1, x2, w, b))

    with tilewise.enabled(wait=True, planner=Thin(), goal="passes"):
        for rows in range(1, 17):
            call(rows)
        with pytest.warns(UserWarning, match="layers whose shapes keep changing"):
            call(17)
        for rows in (18, 3, 3):
            call(rows)


def test_an_optimized_module_keeps_its_own_plans() -> None:
    layer = nn.Bilinear(6, 7, 8)
    first, second = torch.randn(9, 6), torch.randn(9, 7)
    want = layer(first, second)
    tilewise.optimize(layer, (first, second), planner=Thin(), goal="passes")
    with tilewise.enabled(wait=True, planner=Thin()) as session:
        for _ in range(3):
            torch.testing.assert_close(layer(first, second), want)
    assert not session.report().layers
