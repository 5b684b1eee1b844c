"""Convolutions that run other code than torch's are left alone: overridden before or after, on instance or class."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.nn.dividing import Dividing, assert_same
from torch import nn

import tilewise
from tilewise.nn import report

KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = {f"conv{'_transpose' if kind.__name__[4] == 'T' else ''}{kind.__name__[-2]}d": kind for kind in KINDS}


def of_kind(kind: Any) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    conv = kind(3, 3, 3, stride=2, padding=1)
    return conv, torch.randn(3, 3, *([5] * len(conv.kernel_size)))


def doubled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def twice(*args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * function(*args, **kwargs)

    return twice


def circular_in_x(self: Any, input: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    padded = F.pad(F.pad(input, (1, 1, 0, 0), mode="circular"), (0, 0, 1, 1))
    return F.conv2d(padded, weight, bias, self.stride, 0, self.dilation, self.groups)


def on_instance_forward(conv: Any, patch: pytest.MonkeyPatch) -> None:
    conv.forward = doubled(conv.forward)


def on_instance_forward_of_another(conv: Any, patch: pytest.MonkeyPatch) -> None:
    conv.forward = copy.deepcopy(type(conv)(3, 3, 3, stride=2, padding=1)).forward


def on_instance_method(conv: Any, patch: pytest.MonkeyPatch) -> None:
    name = "_output_padding" if conv.transposed else "_conv_forward"
    if conv.transposed:
        conv._output_padding = lambda *_: [1] * len(conv.kernel_size)
    else:
        setattr(conv, name, types.MethodType(doubled(getattr(type(conv), name)), conv))


def on_class_forward(conv: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(conv), "forward", doubled(type(conv).forward))


def on_class_method(conv: Any, patch: pytest.MonkeyPatch) -> None:
    if conv.transposed:
        patch.setattr(nn.modules.conv._ConvTransposeNd, "_output_padding", lambda self, *_: [1] * len(self.kernel_size))
    else:
        patch.setattr(type(conv), "_conv_forward", doubled(type(conv)._conv_forward))


def on_class_code(conv: Any, patch: pytest.MonkeyPatch) -> None:
    if conv.transposed:

        def other(self: Any, input: Any, output_size: Any = None) -> Any:
            return input * 3
    else:

        def other(self: Any, input: Any) -> Any:  # type: ignore[misc]
            return input * 3

    patch.setattr(type(conv).forward, "__code__", other.__code__)


def on_class_getter(conv: Any, patch: pytest.MonkeyPatch) -> None:
    def getter(self: Any, name: str) -> Any:
        value = nn.Module.__getattr__(self, name)
        return 2 * value if name == "weight" else value

    patch.setattr(type(conv), "__getattr__", getter, raising=False)


def other_class(conv: Any, patch: pytest.MonkeyPatch) -> None:
    weight = property(lambda self: 2 * self._parameters["weight"])
    conv.__class__ = type("Scaled", (type(conv),), {"weight": weight, "forward": doubled(type(conv).forward)})


def function(conv: Any, patch: pytest.MonkeyPatch) -> None:
    name = next(n for n, kind in CONVOLUTIONS.items() if type(conv) is kind)
    patch.setattr(F, name, doubled(getattr(F, name)))


WAYS = (
    on_instance_forward, on_instance_forward_of_another, on_instance_method, on_class_forward, on_class_method,
    on_class_code, on_class_getter, other_class, function,
)  # fmt: skip


def gradients(conv: Any, x: torch.Tensor) -> list[torch.Tensor]:
    conv.zero_grad()
    xi = x.clone().requires_grad_()
    y = conv(xi)
    y.square().sum().backward()
    return [y.detach(), xi.grad] + [p.grad for p in conv.parameters() if p.grad is not None]


@pytest.mark.sampled(25)
@pytest.mark.parametrize("when", ["before", "after", "after use"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_an_override_computes(kind: Any, way: Any, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    conv, x = of_kind(kind)
    if when == "before":
        way(conv, monkeypatch)
    inside = nn.Sequential(conv)
    tilewise.optimize(inside, x.clone().requires_grad_(), planner=Dividing())
    if when != "before":
        assert report(inside).layers[0].replaced
        if when == "after use":
            inside(x)
        way(conv, monkeypatch)
    layer = report(inside).layers[0]
    assert layer.reason
    assert not layer.replaced
    assert layer.reason in str(report(inside))
    got = gradients(conv, x)
    tilewise.restore(inside)
    for mine, its in zip(got, gradients(conv, x), strict=True):
        assert torch.equal(mine, its)


def test_an_override_is_seen_at_each_call_and_its_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    conv, x = of_kind(nn.Conv2d)
    tilewise.optimize(conv, x, planner=Dividing())
    want = conv(x)
    with monkeypatch.context() as patch:
        on_class_method(conv, patch)
        assert_same(conv(x), 2 * want)
    assert report(conv).layers[0].replaced
    assert "PlannedConv" in type(conv(x).grad_fn).__name__
    conv._conv_forward = types.MethodType(circular_in_x, conv)
    assert_same(conv(x), circular_in_x(conv, x, conv.weight, conv.bias))
    del conv._conv_forward
    assert_same(conv(x), want)
    assert "PlannedConv" in type(conv(x).grad_fn).__name__


def test_circular_in_one_direction() -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1)
    conv._conv_forward = types.MethodType(circular_in_x, conv)
    x = torch.randn(3, 3, 7, 7)
    want = conv(x)
    tilewise.optimize(conv, x, planner=Dividing())
    assert torch.equal(conv(x), want)
    assert report(conv).layers[0].reason == "has a _conv_forward set on the instance"
    assert "_conv_forward" in tilewise.restore(conv).__dict__


def test_what_stands_above_a_planned_forward_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper made with functools.wraps has the attributes of what it wraps, and is the user's all the same."""
    conv, x = of_kind(nn.Conv2d)
    want = 2 * conv(x)
    tilewise.optimize(conv, x, planner=Dividing())
    mine = doubled(conv.forward)
    conv.forward = types.MethodType(functools.wraps(conv.forward.__func__)(lambda self, x: mine(x)), conv)
    assert_same(conv(x), want)
    kept = conv.__dict__["forward"]
    tilewise.restore(conv)
    assert conv.__dict__["forward"] is kept
    assert set(conv.__dict__) == {*nn.Conv2d(1, 1, 1).__dict__, "forward"}
    assert_same(conv(x), want)


def test_overrides_that_no_call_goes_through_do_not_stand_in_the_way() -> None:
    class Odd(nn.ConvTranspose2d):
        def _conv_forward(self, *_: Any) -> Any:
            raise AssertionError

    class Called(nn.Conv2d):
        def __call__(self, *args: Any) -> Any:
            return 2 * super().__call__(*args)

        padding_mode = "zeros"

    for kind in (Odd, Called):
        conv, x = of_kind(kind)
        want = conv(x)
        tilewise.optimize(conv, x, planner=Dividing())
        assert report(conv).layers[0].replaced
        assert_same(conv(x), want)


def test_arguments_by_property_are_left_alone() -> None:
    class Shifted(nn.Conv2d):
        @property
        def dilation(self) -> Any:
            return self.__dict__["_dilation"]

        @dilation.setter
        def dilation(self, value: Any) -> None:
            self.__dict__["_dilation"] = value

    conv, x = of_kind(Shifted)
    want = conv(x)
    tilewise.optimize(conv, x, planner=Dividing())
    assert report(conv).layers[0].reason == "Shifted has a dilation of its own"
    assert torch.equal(conv(x), want)


def test_a_weight_set_on_the_instance_or_given_by_the_class_is_used() -> None:
    conv, x = of_kind(nn.Conv2d)
    tilewise.optimize(conv, x, planner=Dividing())
    conv.__dict__["weight"] = conv.weight.detach() * 3
    assert_same(conv(x), F.conv2d(x, conv.weight, conv.bias, 2, 1))
    conv.__dict__.pop("weight")

    class Scaled(nn.Conv2d):
        weight = property(lambda self: 2 * self._parameters["weight"])

    for planned_first in (True, False):
        conv, x = of_kind(nn.Conv2d)
        if planned_first:
            tilewise.optimize(conv, x, planner=Dividing())
        conv.__class__ = Scaled
        if not planned_first:
            tilewise.optimize(conv, x, planner=Dividing())
            assert report(conv).layers[0].replaced
        assert_same(conv(x), F.conv2d(x, 2 * conv._parameters["weight"], conv.bias, 2, 1))


ON_A_CLASS = {
    "weight": property(lambda self: 2 * self._parameters["weight"]),
    "bias": None,
    "stride": property(lambda self: (1, 1), lambda self, value: None),
    "padding": property(lambda self: (0, 0), lambda self, value: None),
    "dilation": property(lambda self: (2, 2), lambda self, value: None),
    "padding_mode": property(lambda self: "circular", lambda self, value: None),
}


@pytest.mark.parametrize("owner", [nn.Conv2d, nn.Module])
@pytest.mark.parametrize("name", ON_A_CLASS)
def test_what_a_class_says_after_planning_is_heeded(name: str, owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    conv, x = of_kind(nn.Conv2d)
    tilewise.optimize(conv, x, planner=Dividing())
    before = conv(x)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, ON_A_CLASS[name], raising=False)
        assert_same(conv(x), nn.Conv2d.forward(conv, x))
        assert conv(x).shape != before.shape or not torch.allclose(conv(x), before)
    assert torch.equal(conv(x), before)


def test_same_padding_follows_a_weight_of_another_size() -> None:
    conv = nn.Conv2d(3, 4, 3, padding="same")
    x = torch.randn(3, 3, 9, 9)
    tilewise.optimize(conv, x, planner=Dividing())
    conv.weight = nn.Parameter(torch.randn(4, 3, 5, 5))
    assert_same(conv(x), F.conv2d(x, conv.weight, conv.bias, padding="same"))


@pytest.mark.parametrize("mode", ["reflect", "circular"])
def test_padding_of_ones_own(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode)
    x = torch.randn(3, 3, 9, 9)
    tilewise.optimize(conv, x, planner=Dividing())
    assert report(conv).layers[0].replaced
    pad = F.pad
    with monkeypatch.context() as patch:
        patch.setattr(F, "pad", lambda *args, **kwargs: 2 * pad(*args, **kwargs))
        assert_same(conv(x), nn.Conv2d.forward(conv, x))
    with monkeypatch.context() as patch:  # and where torch's module of convolutions has functions of somebody's
        patch.setattr(nn.modules.conv, "F", types.SimpleNamespace(**vars(F)))
        patch.setattr(nn.modules.conv.F, "pad", lambda *args, **kwargs: 2 * pad(*args, **kwargs))
        assert_same(conv(x), nn.Conv2d.forward(conv, x))
    same = nn.Conv2d(3, 4, 4, padding="same")  # which torch pads below its functions
    want = same(x)
    tilewise.optimize(same, x, planner=Dividing())
    monkeypatch.setattr(F, "pad", lambda *args, **kwargs: 2 * pad(*args, **kwargs))
    assert_same(same(x), want)


def on_instance_lambda(conv: Any, patch: pytest.MonkeyPatch) -> None:
    conv._conv_forward = lambda x, w, b: F.conv2d(x, w, b, padding=1) * 2


@pytest.mark.parametrize(
    "way",
    [on_instance_method, on_instance_lambda, on_class_method, on_class_forward, function],
    ids=lambda w: w.__name__,
)
@pytest.mark.parametrize("options", [{}, {"padding_mode": "reflect"}], ids=["zeros", "reflect"])
def test_compiled_models_see_overrides(way: Any, options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Set before the graph is made, and after, as torch's own graphs do at least for an instance's."""
    conv, x = nn.Conv2d(3, 3, 3, padding=1, **options), torch.randn(3, 3, 5, 5)
    tilewise.optimize(conv, x, planner=Dividing())
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph

    compiled = torch.compile(nn.Sequential(conv), backend=backend, fullgraph=True)
    assert_same(compiled(x), nn.Conv2d.forward(conv, x))
    assert "tilewise.conv" in graphs[-1]
    way(conv, monkeypatch)
    want = nn.Conv2d.forward(conv, x)
    assert_same(compiled(x), want)
    assert "tilewise.conv" not in graphs[-1]
    torch._dynamo.reset()
    assert_same(compiled(x), want)


def other_weight(conv: Any, kernel: int, channels: int) -> None:
    shape = (3, channels, *[kernel] * 2) if conv.transposed else (channels, 3, *[kernel] * 2)
    conv.weight, conv.bias = nn.Parameter(torch.randn(shape)), None


CHANGES: dict[str, Callable[[Any], object]] = {
    "stride": lambda conv: setattr(conv, "stride", (1, 1)),
    "padding": lambda conv: setattr(conv, "padding", (0, 0)),
    "dilation": lambda conv: setattr(conv, "dilation", (2, 2)),
    "larger kernel": lambda conv: other_weight(conv, 5, 3),
    "other channels": lambda conv: other_weight(conv, 3, 7),
    "no bias": lambda conv: setattr(conv, "bias", None),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_compiled_models_see_changed_arguments(kind: Any, mode: str, change: str) -> None:
    """Changed before the graph is made, and after."""
    conv, x = of_kind(kind)
    if mode != "zeros":
        if kind is nn.ConvTranspose2d:
            pytest.skip("torch has only zeros here")
        conv = nn.Conv2d(3, 3, 3, stride=2, padding=1, padding_mode=mode)
    tilewise.optimize(conv, x, planner=Dividing())
    compiled = torch.compile(conv, backend="eager")
    assert_same(compiled(x), kind.forward(conv, x))
    CHANGES[change](conv)
    want = kind.forward(conv, x)
    assert_same(compiled(x), want)
    torch._dynamo.reset()
    assert_same(compiled(x), want)


def test_planned_modules_run_by_their_plans_while_enabled() -> None:
    conv, x = of_kind(nn.Conv2d)
    tilewise.optimize(conv, x, planner=Dividing())
    with tilewise.enabled(wait=True, planner=Dividing()):
        assert "PlannedConv" in type(conv(x).grad_fn).__name__
        assert report(conv).layers[0].replaced
        fresh = nn.Conv2d(3, 3, 3)
        tilewise.optimize(fresh, x, planner=Dividing())
        assert report(fresh).layers[0].replaced


EARLY = """
import torch, warnings
import torch.nn.functional as F
from torch import nn
plain, own = F.conv2d, nn.Conv2d._conv_forward
def twice(*args, **kwargs):
    return 2 * plain(*args, **kwargs)
def thrice(self, *args):
    return 3 * own(self, *args)
if {function}:
    F.conv2d = twice
else:
    nn.Conv2d._conv_forward = thrice
torch.manual_seed(0)
conv, other, x = nn.Conv2d(3, 4, 3), nn.Conv1d(3, 4, 3), torch.randn(4, 3, 9, 9)
want = conv(x)
import tilewise
from tests.nn.dividing import Dividing
from tilewise.nn import report
tilewise.optimize(conv, x, planner=Dividing())
assert torch.equal(conv(x), want)
assert not report(conv).layers[0].replaced
print(report(conv).layers[0].reason)
tilewise.optimize(other, x[:, :, 0], planner=Dividing())
assert report(other).layers[0].replaced
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    with tilewise.enabled(wait=True, planner=Dividing()):
        for _ in range(3):
            got = conv(x)
assert torch.allclose(got, want, atol=1e-4)
assert any("F.conv2d" in str(w.message) or "functional.conv2d" in str(w.message) for w in seen) is {function}
F.conv2d, nn.Conv2d._conv_forward = plain, own
tilewise.optimize(conv, x, planner=Dividing())
assert report(conv).layers[0].replaced
"""


@pytest.mark.slow
@pytest.mark.parametrize("patched", ["function", "method"])
def test_torch_patched_before_the_import(patched: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EARLY.format(function=patched == "function")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    assert "is not torch's own" in done.stdout
