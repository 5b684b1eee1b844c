"""Tensor subclasses that carry tags gain like plain tensors, and what they do with their tags is done."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.nn.dividing import Dividing, assert_same
from torch import nn

import tilewise
from tilewise import nn as planned
from tilewise.nn import report


class Tagged(torch.Tensor):
    """Carries a tag that torch's default handler does not copy."""

    tag: str


class Silent(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


class SilentParameter(nn.Parameter):
    pass


class Carrying(torch.Tensor):
    """Takes its tags along, and notes which functions it saw, and with what."""

    seen: list[tuple[Any, int, bool]] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if result is not NotImplemented and func in (torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose2d):
            cls.seen.append((func, len(args), "PlannedConv" in str(_origin(result))))
        if isinstance(result, Carrying):
            tags: list[str] = []
            for one in args:
                tags += getattr(one, "tags", []) if isinstance(one, Carrying) else []
            result.tags = [*tags, getattr(func, "__name__", "")]
        return result


class Holding(torch.Tensor):
    """Unwraps by hand, calls the function with plain tensors, and doubles what comes back."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.conv2d:
            return super().__torch_function__(func, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            plain = [a.as_subclass(torch.Tensor) if isinstance(a, Holding) else a for a in args]
        return (2 * func(*plain, **(kwargs or {}))).as_subclass(cls)


class Strided(torch.Tensor):
    """Asks torch's function for another convolution than it was called for."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.conv2d:
            return super().__torch_function__(func, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(args[0].as_subclass(torch.Tensor), args[1], None, stride=3)


class Unwilling(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if func is torch.conv2d else super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    """Computes every operator by itself."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [a.inner if isinstance(a, Wrapper) else a for a in args]
        result = func(*args, **(kwargs or {}))
        return cls(result) if isinstance(result, torch.Tensor) else result


def _origin(y: Any) -> list[Any]:
    """The nodes from which a result came, back to its convolution."""
    with torch._C.DisableTorchFunctionSubclass():
        node, found = y.grad_fn, []
    while node is not None:
        found.append(node)
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return found


def by_plan(y: Any) -> bool:
    return "PlannedConv" in str(_origin(y))


CASES: dict[str, Callable[[], Any]] = {
    "plain": lambda: nn.Conv2d(3, 4, 3, padding=1),
    "grouped, no bias": lambda: nn.Conv2d(3, 3, 3, stride=2, groups=3, bias=False),
    "reflect": lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
    "same, uneven": lambda: nn.Conv2d(3, 4, 4, padding="same"),
    "transposed": lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1),
}


def run(f: Any, x: Any, conv: Any) -> list[Any]:
    """Result, gradients of input and parameters, and what hooks of the input and the module saw."""
    conv.zero_grad()
    seen: list[str] = []
    with torch._C.DisableTorchFunctionSubclass():
        leaf = x.detach().as_subclass(type(x)).requires_grad_()
        leaf.register_hook(lambda g: seen.append(str(tuple(g.shape))))
    if isinstance(x, Carrying):
        leaf.tags = ["image"]
    handle = conv.register_forward_hook(lambda m, a, y: seen.append(type(y).__name__))
    y = f(leaf)
    y.sum().backward()
    handle.remove()
    with torch._C.DisableTorchFunctionSubclass():
        return [
            y.detach(),
            leaf.grad,
            *(p.grad for p in conv.parameters()),
            (type(y), type(leaf.grad), seen, getattr(y, "tags", None), by_plan(y)),
        ]


def assert_as_torch(got: list[Any], want: list[Any]) -> None:
    for mine, its in zip(got[:-1], want[:-1], strict=True):
        assert type(mine) is type(its)
        with torch._C.DisableTorchFunctionSubclass():
            assert_same(mine.as_subclass(torch.Tensor), its.as_subclass(torch.Tensor))
    assert got[-1][:-1] == want[-1][:-1]
    assert got[-1][-1]
    assert not want[-1][-1]


@pytest.mark.parametrize("kind", [Tagged, Silent, Carrying, Holding])
@pytest.mark.parametrize("case", CASES)
def test_modules(case: str, kind: Any) -> None:
    torch.manual_seed(0)
    conv = CASES[case]()
    x = torch.randn(4, 3, 9, 9).as_subclass(kind)
    want = run(conv, x, conv)
    tilewise.optimize(conv, x, planner=Dividing())
    assert report(conv).layers[0].replaced
    for _ in range(3):
        assert_as_torch(run(conv, x, conv), want)
    with torch.no_grad():
        y = conv(x)
    assert type(y) is want[-1][0]


@pytest.mark.parametrize("kind", [Tagged, Silent, Carrying, Holding])
@pytest.mark.parametrize("case", CASES)
def test_functions_while_enabled(case: str, kind: Any) -> None:
    torch.manual_seed(0)
    conv = CASES[case]()
    x = torch.randn(4, 3, 9, 9).as_subclass(kind)
    want = run(conv, x, conv)
    with tilewise.enabled(wait=True, planner=Dividing()) as session:
        for _ in range(2):
            run(conv, x, conv)
        for _ in range(2):
            assert_as_torch(run(conv, x, conv), want)
    assert any(layer.replaced for layer in session.report().layers)


def test_the_handler_sees_torchs_own_function_once_and_computes_by_plan() -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1)
    x: Any = torch.randn(4, 3, 9, 9).as_subclass(Carrying)
    tilewise.optimize(conv, x, planner=Dividing())
    x.tags = ["image"]
    Carrying.seen.clear()
    y = conv(x)
    assert y.tags == ["image", "conv2d"]
    assert Carrying.seen == [(torch.conv2d, 7, True)]


def test_functional_operators() -> None:
    planned.set_defaults(planner=Dividing())
    try:
        w = torch.randn(4, 3, 3, 3, requires_grad=True)
        for kind in (Tagged, Carrying, Holding):
            x = torch.randn(4, 3, 9, 9).as_subclass(kind)
            for options in ({"padding": "same"}, {"stride": 2}, {"padding": [1, 0], "dilation": 2}):
                y, want = planned.conv2d(x, w, **options), F.conv2d(x, w, **options)
                assert type(y) is kind
                assert by_plan(y)
                assert_same(y.as_subclass(torch.Tensor), want.as_subclass(torch.Tensor))
            one = planned.conv2d(x[0], w)  # without a batch there is nothing to divide
            assert (type(one), one.shape) == (kind, (4, 7, 7))
    finally:
        planned.set_defaults()


@pytest.mark.parametrize("kind", [Tagged, Silent, Carrying, SilentParameter])
def test_weights_of_a_subclass(kind: Any) -> None:
    x, w = torch.randn(4, 3, 9, 9), torch.randn(4, 3, 3, 3)
    conv = nn.Conv2d(3, 4, 3, bias=False)
    special = kind(w) if kind is SilentParameter else w.as_subclass(kind).requires_grad_()
    conv._parameters["weight"] = special
    want = conv(x)
    want.sum().backward()
    gradient, special.grad = special.grad, None
    tilewise.optimize(conv, x, planner=Dividing())
    got = conv(x)
    got.sum().backward()
    assert by_plan(got)
    assert (type(got), type(special.grad)) == (type(want), type(gradient))
    for mine, its in ((got, want), (special.grad, gradient)):
        with torch._C.DisableTorchFunctionSubclass():
            assert_same(mine.detach().as_subclass(torch.Tensor), its.detach().as_subclass(torch.Tensor))


def test_two_kinds_meet_as_torch_has_them_meet() -> None:
    class Further(Tagged):
        pass

    w = torch.randn(4, 3, 3, 3)
    x = torch.randn(4, 3, 9, 9)
    planned.set_defaults(planner=Dividing())
    try:
        for a, b in ((Tagged, Further), (Further, Tagged), (Tagged, Carrying), (Unwilling, Carrying)):
            results = []
            for f in (F.conv2d, planned.conv2d):
                try:
                    results.append(type(f(x.as_subclass(a), w.as_subclass(b))))
                except TypeError as error:
                    results.append(type(error))
            assert results[0] is results[1]
    finally:
        planned.set_defaults()


def test_a_handler_that_asks_for_something_else_gets_it() -> None:
    conv = nn.Conv2d(3, 4, 3)
    x = torch.randn(4, 3, 9, 9).as_subclass(Strided)
    want = conv(x)
    tilewise.optimize(conv, x, planner=Dividing())
    assert torch.equal(conv(x), want)


class Blurred(torch.Tensor):
    """Convolves once more by itself, by a planned module, before torch's function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.conv2d:
            with torch._C.DisableTorchFunctionSubclass():
                y = BLUR(args[0].as_subclass(torch.Tensor))
            PLANNED.append(by_plan(y))
            args = (y.as_subclass(cls), *args[1:])
        return super().__torch_function__(func, types, args, kwargs or {})


BLUR = nn.Conv2d(3, 3, 3, padding=1)
PLANNED: list[bool] = []


def test_planned_layers_inside_a_handler_run_by_plan() -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1)
    x = torch.randn(4, 3, 9, 9)
    tilewise.optimize(BLUR, x, planner=Dividing())
    y = conv(x.as_subclass(Blurred))
    tilewise.optimize(conv, x.as_subclass(Blurred), planner=Dividing())
    PLANNED.clear()
    got = conv(x.as_subclass(Blurred))
    assert PLANNED == [True]
    assert by_plan(got)
    assert_same(got.as_subclass(torch.Tensor), y.as_subclass(torch.Tensor))


def test_a_gradient_of_a_subclass() -> None:
    conv = nn.Conv2d(3, 4, 3)
    x = torch.randn(4, 3, 9, 9)
    tilewise.optimize(conv, x, planner=Dividing())
    Carrying.seen.clear()
    conv(x).backward(torch.ones(4, 4, 7, 7).as_subclass(Carrying))
    assert not Carrying.seen
    assert type(conv.weight.grad) is torch.Tensor
    got, conv.weight.grad = conv.weight.grad, None
    nn.Conv2d.forward(conv, x).backward(torch.ones(4, 4, 7, 7))
    assert_same(got, conv.weight.grad)


def test_handlers_that_are_off_stay_off() -> None:
    conv = nn.Conv2d(3, 4, 3)
    x = torch.randn(4, 3, 9, 9).as_subclass(Carrying)
    tilewise.optimize(conv, x, planner=Dividing())
    Carrying.seen.clear()
    with torch._C.DisableTorchFunctionSubclass():
        y = conv(x)
        assert type(y) is torch.Tensor
        assert by_plan(y)
    assert not Carrying.seen


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mapped: torch.Tensor = torch.func.vmap(self.conv)(x[None])
        return mapped


def test_others_are_named_with_the_reason() -> None:
    x = torch.randn(4, 3, 9, 9)
    conv = nn.Conv2d(3, 4, 3).requires_grad_(False)
    want = conv(x)
    tilewise.optimize(conv, Wrapper(x), planner=Dividing(), training=False)
    layer = report(conv).layers[0]
    assert "Wrapper" in layer.reason
    assert "__torch_dispatch__" in layer.reason
    assert not layer.replaced
    mapped = tilewise.optimize(Mapped(), x, planner=Dividing())
    assert "torch.func" in report(mapped).layers[0].reason
    with tilewise.enabled(wait=True, planner=Dividing()) as session, warnings.catch_warnings():
        for _ in range(3):
            y = conv(Wrapper(x))
            mapped(x)
    assert torch.equal(y.inner, want)
    reasons = [layer.reason for layer in session.report().layers]
    assert any("Wrapper" in reason for reason in reasons)
    assert any("torch.func" in reason for reason in reasons)
    assert "conv2d x3" in str(session)


def test_calls_in_turns_keep_their_plans() -> None:
    conv = nn.Conv2d(3, 4, 3)
    x = torch.randn(4, 3, 9, 9)
    planner = Dividing()
    tilewise.optimize(conv, x.clone().requires_grad_(), planner=planner)
    count = len(planner.planned)
    for kind in (torch.Tensor, Tagged, Carrying, torch.Tensor, Silent) * 2:
        y = conv(x.as_subclass(kind).requires_grad_())
        assert by_plan(y)
    assert len(planner.planned) == count


@pytest.fixture(autouse=True)
def _nothing_seen() -> Iterator[None]:
    yield
    Carrying.seen.clear()
