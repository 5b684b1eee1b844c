"""The functional operators against torch's, over drawn geometries, forward and backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from tests.nn.dividing import Dividing, assert_same

from tilewise import nn as planned

CONVOLUTIONS = {1: planned.conv1d, 2: planned.conv2d, 3: planned.conv3d}
TRANSPOSED = {1: planned.conv_transpose1d, 2: planned.conv_transpose2d, 3: planned.conv_transpose3d}


@pytest.fixture(autouse=True)
def planner() -> Iterator[Dividing]:
    dividing = Dividing()
    planned.set_defaults(planner=dividing)
    yield dividing
    planned.set_defaults()


def by_torch(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return getattr(F, function.__name__)


def compare(function: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, b: Any, **options: Any) -> None:
    """Result and gradients by plans equal torch's, and so does the result without autograd."""
    operands = [t.requires_grad_() if t is not None else None for t in (x, w, b)]
    inputs = [t for t in operands if t is not None]
    exact = [None if t is None else t.detach().double().requires_grad_() for t in operands]
    want, exact_want = by_torch(function)(*operands, **options), by_torch(function)(*exact, **options)
    dy = torch.randn_like(want)
    gradients = torch.autograd.grad(want, inputs, dy)
    exact_gradients = torch.autograd.grad(exact_want, [t for t in exact if t is not None], dy.double())
    if not torch_is_right((want, *gradients), (exact_want, *exact_gradients)):
        return
    got = function(x, w, b, **options)
    assert_same(got, want)
    for mine, its in zip(torch.autograd.grad(got, inputs, dy), gradients, strict=True):
        assert_same(mine, its)
    with torch.no_grad():
        assert_same(function(x, w, b, **options), want)


def torch_is_right(results: Iterable[torch.Tensor], exact: Iterable[torch.Tensor]) -> bool:
    """False where oneDNN leaves elements unwritten: of one channel in ``channels_last`` and one column of results."""
    pairs = zip(results, exact, strict=True)
    return all(bool((own - want).abs().max() <= 1e-3 * max(1.0, float(want.abs().max()))) for own, want in pairs)


@st.composite
def layers(draw: st.DrawFn, transposed: bool) -> dict[str, Any]:
    dims = draw(st.integers(1, 3))
    each = lambda low, high: [draw(st.integers(low, high)) for _ in range(dims)]  # noqa: E731
    kernel, stride, dilation = each(1, 4), each(1, 3), each(1, 2)
    size = [
        draw(st.integers(1, 4)) if transposed else draw(st.integers(d * (k - 1) + 1, d * (k - 1) + 5))
        for k, d in zip(kernel, dilation, strict=True)
    ]
    padding = [draw(st.integers(0, (k - 1) * d // 2)) for k, d in zip(kernel, dilation, strict=True)]
    found = {
        "batch": draw(st.integers(1, 4)), "groups": draw(st.sampled_from((1, 1, 2))), "ic": draw(st.integers(1, 3)),
        "oc": draw(st.integers(1, 3)), "size": size, "kernel": kernel, "stride": stride, "dilation": dilation,
        "padding": padding, "bias": draw(st.booleans()), "last": draw(st.booleans()),
    }  # fmt: skip
    if transposed:
        found["extra"] = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
        sizes = [
            (n - 1) * s - 2 * p + (k - 1) * d + 1 + e
            for n, s, p, k, d, e in zip(size, stride, padding, kernel, dilation, found["extra"], strict=True)
        ]
        if min(sizes) < 1:
            found["padding"] = [0] * dims
    return found


def tensors(c: dict[str, Any], transposed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(0)
    g, ic, oc = c["groups"], c["ic"] * c["groups"], c["oc"] * c["groups"]
    x = torch.randn(c["batch"], ic, *c["size"])
    w = torch.randn(*((ic, oc // g) if transposed else (oc, ic // g)), *c["kernel"])
    if c["last"]:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x, w, torch.randn(oc) if c["bias"] else None


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(layers(transposed=False))
def test_convolutions_equal_torchs(c: dict[str, Any]) -> None:
    options = {name: c[name] for name in ("stride", "padding", "dilation", "groups")}
    compare(CONVOLUTIONS[len(c["size"])], *tensors(c, False), **options)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(layers(transposed=True))
def test_transposed_convolutions_equal_torchs(c: dict[str, Any]) -> None:
    options = {name: c[name] for name in ("stride", "padding", "dilation", "groups")}
    compare(TRANSPOSED[len(c["size"])], *tensors(c, True), output_padding=c["extra"], **options)


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, (2, 5)])
@pytest.mark.parametrize("dilation", [1, 3])
def test_padding_same_is_uneven_where_torchs_is(kernel: Any, dilation: int, planner: Dividing) -> None:
    w = torch.randn(5, 2, *((kernel, kernel) if isinstance(kernel, int) else kernel))
    compare(planned.conv2d, torch.randn(3, 2, 17, 18), w, torch.randn(5), padding="same", dilation=dilation)
    assert planner.planned


def test_padding_valid() -> None:
    compare(planned.conv1d, torch.randn(3, 2, 17), torch.randn(4, 2, 5), None, padding="valid", stride=(2,))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_signatures_are_torchs(dims: int, transposed: bool) -> None:
    function = (TRANSPOSED if transposed else CONVOLUTIONS)[dims]
    documented = by_torch(function).__doc__.strip().splitlines()[0].split("->")[0].strip()
    ours = inspect.signature(function)
    bare = ours.replace(
        parameters=[p.replace(annotation=inspect.Parameter.empty) for p in ours.parameters.values()],
        return_annotation=inspect.Signature.empty,
    )
    more = "" if transposed else ", *, residual=None, activation='none'"
    assert f"{function.__name__}{bare}" == f"{documented[:-1]}{more})"


def test_one_image_without_a_batch_axis() -> None:
    x, w = torch.randn(2, 9, 9, requires_grad=True), torch.randn(4, 2, 3, 3)
    got, want = planned.conv2d(x, w), F.conv2d(x, w)
    assert_same(got, want)
    assert_same(torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(want.sum(), x)[0])


def test_a_shape_is_planned_once(planner: Dividing) -> None:
    x, w = torch.randn(4, 2, 9, 9), torch.randn(4, 2, 3, 3)
    planned.conv2d(x, w)
    assert len(planner.planned) == 1
    planned.conv2d(x + 1, w)
    assert len(planner.planned) == 1
    planned.conv2d(x[:2], w)
    assert len(planner.planned) == 2
    planned.conv2d(x, w.requires_grad_())
    assert len(planner.planned) == 3  # the weight's gradient


def test_lists_and_tuples_are_one_layer(planner: Dividing) -> None:
    x, w = torch.randn(4, 2, 9, 9), torch.randn(4, 2, 3, 3)
    for stride in (2, (2,), (2, 2), [2, 2]):
        assert_same(planned.conv2d(x, w, None, stride), F.conv2d(x, w, None, stride))
    assert len(planner.planned) == 1


def test_misaligned_and_strided_operands() -> None:
    base = torch.randn(3 * 2 * 9 * 9 + 1)
    misaligned = base[1:].view(3, 2, 9, 9)
    strided = torch.randn(3, 2, 9, 18)[..., ::2]
    expanded = torch.randn(1, 2, 9, 9).expand(3, 2, 9, 9)
    w = torch.randn(4, 2, 3, 3)
    for x in (misaligned, strided, expanded):
        for weight in (w, w.transpose(2, 3), torch.randn(4, 1, 3, 3).expand(4, 2, 3, 3)):
            for again in range(2):
                compare(planned.conv2d, x.detach(), weight.detach(), None)
                assert again in (0, 1)


def test_broadcast_gradient() -> None:
    x, w = torch.randn(3, 2, 9, 9, requires_grad=True), torch.randn(4, 2, 3, 3, requires_grad=True)
    got = torch.autograd.grad(planned.conv2d(x, w).sum(), (x, w))  # dy has strides of zero
    want = torch.autograd.grad(F.conv2d(x, w).sum(), (x, w))
    for mine, its in zip(got, want, strict=True):
        assert_same(mine, its)


@pytest.mark.parametrize(
    ("name", "value"),
    [("unplanned", "guess"), ("rigor", "lazy"), ("batch_sizes", "some"), ("workspace", "64 MB?"), ("workspace", -1)],
)
def test_wrong_defaults_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        planned.set_defaults(**{name: value})


def test_unplanned_shapes_may_be_left_to_torch(planner: Dividing) -> None:
    planned.set_defaults(planner=planner, unplanned="torch")
    x, w = torch.randn(4, 2, 9, 9), torch.randn(4, 2, 3, 3)
    assert torch.equal(planned.conv2d(x, w), F.conv2d(x, w))
    assert not planner.planned
