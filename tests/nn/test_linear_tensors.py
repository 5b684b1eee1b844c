"""Linear layers of tensors that autocast casts, of views, and of weights that are stored the other way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tests.nn.test_linear import Given, by_plans, with_gradients
from tests.sampling import some
from torch import nn
from torch.utils.checkpoint import checkpoint

from tilewise.nn.layers.linear.call import describe, problems_of, why_torchs
from tilewise.nn.layers.linear.casts import FEW, cast
from tilewise.nn.layers.linear.layer import LinearLayer

BY_TORCH = torch._C._nn.linear
AUTOCAST = torch.autocast("cpu", torch.bfloat16)


def parameters(outputs: int = 20, into: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(outputs, into, requires_grad=True), torch.randn(outputs, requires_grad=True)


@settings(max_examples=some(40), deadline=None)
@given(
    leading=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    into=st.integers(1, 20),
    outputs=st.integers(1, 20),
    bias=st.booleans(),
    needs=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    dtypes=st.tuples(*[st.sampled_from((torch.float32, torch.bfloat16))] * 3),
    to=st.sampled_from((torch.bfloat16, torch.float16)),
)
def test_under_autocast_results_and_gradients_are_of_torchs_types(
    leading: list[int], into: int, outputs: int, bias: bool, needs: tuple[bool, ...], dtypes: Any, to: torch.dtype
) -> None:
    shapes = ((*leading, into), (outputs, into), *([(outputs,)] if bias else []))
    drawn = zip(shapes, dtypes, needs, strict=False)
    tensors: Any = [torch.randn(shape).to(dtype).requires_grad_(need) for shape, dtype, need in drawn]
    layer = LinearLayer(Given())
    exact = with_gradients(BY_TORCH, [t.detach().double().requires_grad_(t.requires_grad) for t in tensors])
    with torch.autocast("cpu", to):
        want = with_gradients(BY_TORCH, tensors)
        for _ in range(2):
            got = with_gradients(lambda x, w, b=None: layer(x, w, b), tensors)
            for mine, its, exactly in zip(got, want, exact, strict=True):
                assert mine.dtype is its.dtype
                scale = max(1.0, float(exactly.abs().max()))
                torch.testing.assert_close(mine.double(), exactly, rtol=3e-2, atol=3e-2 * scale)
    assert layer.latest is not None
    assert layer.latest.run is not None


def test_a_parameter_is_cast_once_in_a_block() -> None:
    w = torch.randn(64, FEW // 64, requires_grad=True)
    with AUTOCAST:
        product = torch.mm(torch.ones(1, 64, requires_grad=True), w)  # torch keeps the cast from here on
        kept = product.grad_fn._saved_mat2
        for t in (w, torch.randn(FEW, requires_grad=True)):
            first, second = cast(t, torch.bfloat16), cast(t, torch.bfloat16)
            assert first.data_ptr() == second.data_ptr()
            assert first.grad_fn is second.grad_fn is not None
            assert torch.equal(first, t.to(torch.bfloat16))
        assert cast(w, torch.bfloat16).data_ptr() == kept.data_ptr()
        with torch.no_grad():
            assert cast(w, torch.bfloat16).data_ptr() == kept.data_ptr()
        with torch.inference_mode():
            assert cast(w, torch.bfloat16).data_ptr() == kept.data_ptr()
        assert cast(w.detach(), torch.bfloat16).data_ptr() != kept.data_ptr()
        with torch.no_grad():
            w += 1
    with AUTOCAST:
        assert torch.equal(cast(w, torch.bfloat16), w.to(torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert cast(w, torch.bfloat16).data_ptr() != cast(w, torch.bfloat16).data_ptr()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_first_call_without_gradients_leaves_those_after_it_theirs(mode: Callable[[], Any]) -> None:
    (w, b), x, layer = parameters(FEW), torch.randn(3, 12), LinearLayer(Given())
    with AUTOCAST:
        with mode():
            assert not layer(x, w, b).requires_grad
        y = layer(x, w, b)
    y.float().square().sum().backward()
    assert w.grad is not None
    assert w.grad.any()


def test_gradients_of_a_weight_used_twice_add_up_as_torchs() -> None:
    w, x, layer = parameters(72, 72)[0], torch.randn(3, 72), LinearLayer(Given())

    def twice(linear: Callable[..., torch.Tensor]) -> torch.Tensor:
        with AUTOCAST:
            y = linear(linear(x, w, None), w, None)
        return torch.autograd.grad(y.float().sum(), w)[0]

    torch.testing.assert_close(twice(by_plans(layer)), twice(BY_TORCH), rtol=2e-2, atol=1.0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_see_what_they_saw_before(reentrant: bool) -> None:
    (w, b), x, layer = parameters(FEW), torch.randn(3, 12, requires_grad=True), LinearLayer(Given())

    def gradients(linear: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with AUTOCAST:
            y = checkpoint(lambda x: linear(x, w, b).sigmoid(), x, use_reentrant=reentrant)  # relu may flip
        w.grad = b.grad = x.grad = None
        y.float().square().sum().backward()
        assert w.grad is not None and b.grad is not None and x.grad is not None  # noqa: PT018
        return w.grad, b.grad, x.grad

    torch.testing.assert_close(gradients(by_plans(layer)), gradients(BY_TORCH), rtol=5e-2, atol=5e-1)


def test_hooks_of_the_program_do_not_see_how_a_cast_is_found() -> None:
    w, _ = parameters(FEW, 3)
    seen: list[torch.Size] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen.append(t.shape)
        return t

    with AUTOCAST, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        assert cast(w, torch.bfloat16).dtype is torch.bfloat16
    assert not seen


def test_a_layer_follows_autocast_as_it_is_set() -> None:
    (w, b), x, layer = parameters(), torch.randn(3, 12), LinearLayer(Given())
    for dtype in (None, torch.bfloat16, torch.float16, None, torch.bfloat16):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            y = layer(x, w, b)
        assert y.dtype is (dtype or torch.float32)
        assert type(y.grad_fn).__name__ == "PlannedLinearBackward"


def views(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The numbers of ``x`` (2, 3, into), stored in other ways."""
    apart = torch.zeros(2, 3, x.shape[2] + 5)
    apart[..., : x.shape[2]] = x
    return {
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "last first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "rows apart": apart[..., : x.shape[2]],
        "expanded": x[:1].expand(2, 3, x.shape[2]),
    }


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("bias", [None, "contiguous", "strided"])
@pytest.mark.parametrize("name", ["contiguous", *views(torch.ones(2, 3, 1))])
def test_views_are_planned(name: str, bias: str | None, turned: bool) -> None:
    x = torch.randn(2, 3, 12)
    x = views(x).get(name, x)
    w = torch.randn(12, 200).t() if turned else torch.randn(200, 12)
    b = None if bias is None else torch.randn(400)[::2] if bias == "strided" else torch.randn(200)
    tensors = [None if t is None else t.detach().requires_grad_() for t in (x, w, b)]
    layer = LinearLayer(Given())
    exact = with_gradients(BY_TORCH, [None if t is None else t.detach().double().requires_grad_() for t in tensors])
    want = with_gradients(BY_TORCH, tensors)
    for _ in range(2):
        got = with_gradients(lambda x, w, b: layer(x, w, b), tensors)
        for mine, its, exactly in zip(got, want, exact, strict=True):
            torch.testing.assert_close(mine.double(), exactly, rtol=1e-4, atol=1e-4)
            assert mine.stride() == its.stride()


def test_a_turned_weight_is_multiplied_as_it_lies() -> None:
    x, w = torch.randn(5, 12, requires_grad=True), torch.randn(12, 20, requires_grad=True).t()
    call = describe(x, w, None)
    assert call is not None
    assert {role: (p.op, p.m, p.n, p.k) for role, p in problems_of(call).items()} == {
        "forward": ("NN", 5, 20, 12),
        "grad_input": ("NT", 5, 12, 20),
        "grad_weight": ("TN", 12, 20, 5),
    }


def test_an_input_that_torch_takes_as_it_is_stays_torchs() -> None:
    """The copy would cost what the plan may gain, except beside a weight that is many times larger."""
    x, (w, b) = torch.randn(64, 4, 12)[:, 0], parameters()
    assert "not contiguous" in why_torchs(x, w, b)
    assert LinearLayer(Given())(x, w, b) is NotImplemented
    assert not why_torchs(x[:2], w, b)
    assert "weight" in why_torchs(x.contiguous(), torch.randn(20, 24)[:, :12], b)


def test_a_weight_at_an_odd_address_is_not_copied() -> None:
    x, w = torch.randn(5, 12), torch.randn(241)[1:].view(20, 12)
    call = describe(x, w, None)
    assert call is not None
    assert problems_of(call)["forward"].alignment == (16, 4, 16)
    layer = LinearLayer(Given())
    for weight in (w, torch.randn(20, 12), w):
        torch.testing.assert_close(layer(x, weight, None), BY_TORCH(x, weight), rtol=1e-4, atol=1e-4)


def test_attention_by_batches_is_planned() -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(3, 4, 16).transpose(0, 1)
    assert not why_torchs(x, attention.in_proj_weight, attention.in_proj_bias)
