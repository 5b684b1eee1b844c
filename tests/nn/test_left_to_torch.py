"""What goes to torch unchanged: its results, its errors, its subclasses and transforms."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.nn.dividing import Dividing, assert_same
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise
from tilewise import nn as planned
from tilewise.nn import report


@pytest.fixture
def planner() -> Dividing:
    return Dividing()


@pytest.fixture
def pair(planner: Dividing) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    want = nn.Conv2d(4, 6, 3, padding=1)
    x = torch.randn(3, 4, 7, 7)
    got = tilewise.optimize(copy.deepcopy(want), x.clone().requires_grad_(), planner=planner)
    got(x)
    planner.planned.clear()
    return got, want, x


@pytest.fixture(autouse=True)
def _functional(planner: Dividing) -> Iterator[None]:
    planned.set_defaults(planner=planner)
    yield
    planned.set_defaults()


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result, or the error's type and text, less what torch tells of arguments given by their defaults."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return type(error), str(error).split(" - got ")[0]


def assert_same_outcome(got: Any, want: Any) -> None:
    if isinstance(want, tuple):
        assert got == want
    else:
        assert (type(got), got.shape, got.device, got.dtype) == (type(want), want.shape, want.device, want.dtype)
        assert got.is_meta or torch.equal(got, want)


WRONG = {
    "channels": lambda x, w: (x[:, :3], w),
    "empty result": lambda x, w: (x[..., :1, :1], w.new_zeros(6, 4, 9, 9)),
    "too few axes": lambda x, w: (x[0, 0], w),
    "too many axes": lambda x, w: (x[None], w),
    "type": lambda x, w: (x.bfloat16(), w),
    "integers": lambda x, w: (x.int(), w.int()),
    "device": lambda x, w: (x.to("meta"), w),
    "sparse": lambda x, w: (x.to_sparse(), w),
    "not a tensor": lambda x, w: (x.numpy(), w),
    "nothing": lambda x, w: (None, w),
    "weight of other axes": lambda x, w: (x, w[0]),
    "weight not a tensor": lambda x, w: (x, 3),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors(name: str, planner: Dividing) -> None:
    x, w = WRONG[name](torch.randn(3, 4, 7, 7), torch.randn(6, 4, 3, 3))
    assert_same_outcome(outcome(planned.conv2d, x, w), outcome(F.conv2d, x, w))
    assert not planner.planned


@pytest.mark.parametrize("name", [n for n in WRONG if not n.startswith(("weight", "empty"))])
def test_wrong_tensors_for_modules(name: str, pair: Any, planner: Dividing) -> None:
    got, want, x = pair
    bad = WRONG[name](x, want.weight)[0]
    assert_same_outcome(outcome(got, bad), outcome(want, bad))
    assert not planner.planned


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 0}, {"stride": -1}, {"padding": -1}, {"dilation": 0}, {"groups": 0}, {"groups": 3},
        {"padding": "some"}, {"padding": "same", "stride": 2}, {"stride": (1, 2, 3)}, {"stride": 1.5},
        {"padding": None},
        {"stride": "2"}, {"stride": object()}, {"bias": torch.zeros(5)}, {"bias": torch.zeros(6, 1)},
        {"bias": torch.zeros(6).double()}, {"bias": 3},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_wrong_arguments(options: dict[str, Any], planner: Dividing) -> None:
    x, w = torch.randn(3, 4, 7, 7), torch.randn(6, 4, 3, 3)
    want = outcome(F.conv2d, x, w, **options)
    assert isinstance(want, tuple)
    assert outcome(planned.conv2d, x, w, **options) == want
    assert not planner.planned


@pytest.mark.parametrize("options", [{"output_padding": 2}, {"output_padding": -1}, {"stride": 2, "output_padding": 3}])
def test_wrong_output_padding(options: dict[str, Any]) -> None:
    x, w = torch.randn(3, 4, 7, 7), torch.randn(4, 6, 3, 3)
    want = outcome(F.conv_transpose2d, x, w, **options)
    assert isinstance(want, tuple)
    assert outcome(planned.conv_transpose2d, x, w, **options) == want


def test_output_padding_below_the_dilation_only(planner: Dividing) -> None:
    x, w = torch.randn(3, 4, 7, 7), torch.randn(4, 6, 3, 3)
    options = {"dilation": 3, "output_padding": 2}
    assert_same(planned.conv_transpose2d(x, w, **options), F.conv_transpose2d(x, w, **options))
    assert not planner.planned


@pytest.mark.parametrize("shape", [(0, 4, 7, 7), (3, 4, 0, 7)])
def test_empty_tensors(shape: tuple[int, ...], planner: Dividing) -> None:
    x, w = torch.randn(shape), torch.randn(6, 4, 3, 3)
    want = outcome(F.conv2d, x, w, padding=3)
    got = outcome(planned.conv2d, x, w, padding=3)
    assert_same_outcome(got, want)
    assert not planner.planned


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
def test_types_without_a_solver(dtype: torch.dtype, planner: Dividing) -> None:
    x, w = torch.randn(3, 4, 7, 7, dtype=dtype, requires_grad=True), torch.randn(6, 4, 3, 3, dtype=dtype)
    got, want = planned.conv2d(x, w), F.conv2d(x, w)
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(y.abs().sum(), x)[0] for y in (got, want)))
    assert not planner.planned


def test_meta_tensors(pair: Any, planner: Dividing) -> None:
    got, _, x = pair
    y = copy.deepcopy(got).to("meta")(x.to("meta"))
    assert (y.device.type, y.shape) == ("meta", (3, 6, 7, 7))
    assert not planner.planned


def test_mkldnn_tensors(pair: Any, planner: Dividing) -> None:
    got, want, x = pair
    torch.testing.assert_close(got(x.to_mkldnn()).to_dense(), want(x.to_mkldnn()).to_dense())
    assert not planner.planned


def test_negated_views(planner: Dividing) -> None:
    x = torch._neg_view(torch.randn(3, 4, 7, 7))
    w = torch.randn(6, 4, 3, 3)
    for _ in range(2):
        assert_same(planned.conv2d(x, w), F.conv2d(x, w))
    plain = x.resolve_neg()
    assert_same(planned.conv2d(plain, w), F.conv2d(plain, w))
    assert_same(planned.conv2d(x, w), F.conv2d(x, w))


def both(pair: Any, use: Callable[[Callable[..., torch.Tensor]], Any]) -> None:
    """``use`` gives the same with the planned module as with torch's, also once the table is warm."""
    got, want, _ = pair
    expected = use(want)
    for _ in range(2):
        torch.testing.assert_close(use(got), expected)


def test_function_transforms(pair: Any, planner: Dividing) -> None:
    _, _, x = pair
    xs = torch.stack([x, x + 1])
    both(pair, lambda f: torch.func.vmap(f)(xs))
    both(pair, lambda f: torch.func.grad(lambda v: f(v).square().sum())(x))
    both(pair, lambda f: torch.func.grad(torch.func.grad(lambda v: f(x * v).square().sum()))(torch.tensor(2.0)))
    both(pair, lambda f: torch.func.jvp(f, (x,), (x,)))
    both(pair, lambda f: torch.func.vjp(f, x)[1](torch.ones(3, 6, 7, 7)))
    both(pair, lambda f: torch.func.vmap(torch.func.grad(lambda v: f(v).sum()))(xs))
    both(pair, lambda f: torch.func.vmap(lambda s: f(x) * s)(torch.arange(3.0)))
    assert not planner.planned

    def ensemble(f: Any) -> torch.Tensor:
        stacked = {name: torch.stack([p, 2 * p]).detach() for name, p in f.named_parameters()}
        return torch.func.vmap(lambda p, v: torch.func.functional_call(f, p, (v,)), in_dims=(0, None))(stacked, x)

    both(pair, ensemble)
    assert not planner.planned


def test_forward_mode(pair: Any, planner: Dividing) -> None:
    _, _, x = pair

    def derivative(f: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x))))

    def of_the_weight(f: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(f.weight, torch.ones_like(f.weight))
            return forward_ad.unpack_dual(torch.func.functional_call(f, {"weight": dual}, (x,)))

    def over_reverse(f: Any) -> torch.Tensor:
        xi = x.clone().requires_grad_()
        with forward_ad.dual_level():
            y = f(forward_ad.make_dual(xi, torch.ones_like(x)))
            return forward_ad.unpack_dual(torch.autograd.grad(y.square().sum(), xi)[0]).tangent

    both(pair, derivative)
    both(pair, of_the_weight)
    both(pair, over_reverse)
    assert not planner.planned


class Loud(torch.Tensor):
    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(func, "__name__", ""))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses(pair: Any) -> None:
    got, _, x = pair
    Loud.seen.clear()
    y = got(x.as_subclass(Loud))
    assert type(y) is Loud
    assert "conv2d" in Loud.seen
    assert type(planned.conv2d(x.as_subclass(Loud), got.weight)) is Loud


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_see_torchs_own_calls(pair: Any) -> None:
    got, _, x = pair
    with Operators() as operators:
        got(x.clone().requires_grad_()).sum().backward()
    assert operators.seen.count("aten.convolution.default") == 1
    assert operators.seen.count("aten.convolution_backward.default") == 1
    with Functions() as functions:
        got(x)
    assert torch.conv2d in functions.seen


def test_a_default_device_does_not_keep_plans_from_running(pair: Any) -> None:
    got, _, x = pair
    with torch.device("cpu"):
        y = got(x.clone().requires_grad_())
    assert "PlannedConv" in type(y.grad_fn).__name__


def test_fake_tensors(pair: Any, planner: Dividing) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    got, _, x = pair
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = got(mode.from_tensor(x))
    assert (type(y).__name__, y.shape) == ("FakeTensor", (3, 6, 7, 7))
    assert not planner.planned


def test_tracing(pair: Any, planner: Dividing) -> None:
    got, want, x = pair
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(got.requires_grad_(False), x)
    assert "aten::_convolution" in str(traced.inlined_graph)
    assert_same(traced(x + 1), want(x + 1))
    graph = torch.fx.experimental.proxy_tensor.make_fx(got)(x).graph
    assert any("aten.convolution" in str(node.target) for node in graph.nodes)
    assert not planner.planned


def test_not_a_number_spreads_as_torchs_does(pair: Any) -> None:
    got, want, x = pair
    x[0, 0, 0, 0] = float("nan")
    x[1, 1, 3, 3] = float("inf")
    torch.testing.assert_close(got(x), want(x), equal_nan=True)


def test_not_a_number_in_weights_does_not_disturb_planning() -> None:
    conv = nn.Conv2d(4, 6, 3)
    with torch.no_grad():
        conv.weight.fill_(float("nan"))
    tilewise.optimize(conv, torch.randn(3, 4, 7, 7), planner=Dividing())
    assert report(conv).layers[0].replaced
    assert conv(torch.randn(3, 4, 7, 7)).isnan().all()
