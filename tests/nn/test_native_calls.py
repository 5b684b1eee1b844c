"""Planned calls from C++: the same numbers and the same refusals as from Python, and what C++ could do worse.

The module is for GPUs; here it is switched on for a CPU.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.native.standin import COMPILER
from tests.nn import test_autograd
from tests.nn.dividing import Dividing, assert_same
from tests.nn.test_ranges import ranges
from torch import nn

import tilewise
from tilewise.kernels.native import autograd, extension
from tilewise.nn.layers.layer import Layer
from tilewise.nn.layers.runner import Runner

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


@pytest.fixture(scope="module", autouse=True)
def _on_a_cpu(kernels: Path) -> Iterator[None]:
    """Calls come from C++ on a CPU, too, by a module that is compiled once for all workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilewise.machine.cache.kernel_dir", lambda: kernels)
        patch.setattr(autograd, "DEVICES", {"cpu", "cuda"})
        autograd.start(["cpu"])
        if reason := autograd.why_not():
            pytest.skip(reason)
        yield


class Made:
    """What was made in a test: calls in C++, and layers, which it does not keep."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.layers: list[weakref.ref[Layer]] = []

    @property
    def layer(self) -> Layer:
        """The one layer."""
        (found,) = {layer for ref in self.layers if (layer := ref()) is not None}
        return found


@pytest.fixture(autouse=True)
def made() -> Iterator[Made]:
    """Every test here makes calls from C++, or what it shows is nothing."""
    kind, found = autograd.planned_call("cpu"), Made()
    assert kind is not None

    def counted(**arguments: Any) -> object:
        found.calls.append(kind(**arguments))
        return found.calls[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilewise.nn.layers.runner.planned_call", lambda device_type: counted)
        patch.setattr("tilewise.nn.layers.layer.when_there", lambda layer: found.layers.append(weakref.ref(layer)))
        yield found
    assert found.calls


class TestAsFromPython:
    """What holds from Python holds from C++."""

    some_passes = staticmethod(test_autograd.test_some_passes_replaced)


def pair(**options: Any) -> tuple[nn.Conv2d, nn.Conv2d, torch.Tensor]:
    """A planned layer, the same by torch, and an input that needs its gradient."""
    torch.manual_seed(0)
    want = nn.Conv2d(4, 6, 3, padding=1, **options)
    got, x = copy.deepcopy(want), torch.randn(3, 4, 7, 9)
    tilewise.optimize(got, x.clone().requires_grad_(), planner=Dividing(), unplanned="torch")
    return got, want, x.requires_grad_()


def node_of(y: torch.Tensor) -> Any:
    assert y.grad_fn is not None
    assert type(y.grad_fn).__name__ == "PlannedConvBackward"
    return y.grad_fn


def grads_of(model: nn.Module, x: torch.Tensor, dy: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    y = model(x)
    return torch.autograd.grad(y, (x, *model.parameters()), torch.ones_like(y) if dy is None else dy)


def test_the_node_is_one_of_cpp_and_has_torchs_edges() -> None:
    got, _, x = pair()
    node = node_of(got(x))
    assert not hasattr(node, "saved_tensors")  # which nodes of Python have
    edges = [edge for edge, _ in node.next_functions]
    assert [edge.variable for edge in edges] == [x, got.weight, got.bias]
    node = node_of(pair(bias=False)[0](x.detach()))
    assert [edge is None for edge, _ in node.next_functions] == [True, False, True]


def test_a_profiler_sees_its_passes() -> None:
    got, _, x = pair()
    y = got(x)
    node_of(y)
    passes = ("forward", "grad_input", "grad_weight")
    assert ranges(lambda: got(x).sum().backward()) == {f"tilewise: {name} micro_batch": 1 for name in passes}


@pytest.mark.parametrize("autocast", [True, False])
def test_usual_gradients_need_no_python(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got, _, x = pair()
        y, other = got(x), got(x)

    def called(*_: object) -> None:
        raise AssertionError("Python was asked")

    monkeypatch.setattr(Runner, "gradients", called)
    y.backward(torch.ones_like(y))
    with pytest.raises(AssertionError, match="Python was asked"):
        other.backward(torch.ones_like(y).contiguous(memory_format=torch.channels_last))


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_every_layout(bias: bool) -> None:
    """Of the result's gradient: as the plans take it, in another layout, expanded, a slice, and misaligned."""
    got, want, x = pair(bias=bias)
    y = want(x).detach()
    wide = torch.randn(*y.shape[:-1], y.shape[-1] + 3)
    shifted = torch.randn(y.numel() + 1)[1:].view_as(y)
    for dy in (
        torch.randn_like(y),
        torch.randn_like(y).contiguous(memory_format=torch.channels_last),
        torch.ones((), dtype=y.dtype).expand_as(y),
        wide[..., 1:-2],
        shifted,
    ):
        for mine, its in zip(grads_of(got, x, dy), grads_of(want, x, dy), strict=True):
            assert_same(mine, its)
            assert mine.stride() == its.stride()


def test_backward_twice_and_after_its_tensors_are_gone() -> None:
    got, _, x = pair()
    y = got(x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y, x)[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_an_operand_that_was_changed_in_place_is_refused() -> None:
    got, _, x = pair()
    y = got(x).sum()
    with torch.no_grad():
        got.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_saved_tensors_go_through_hooks() -> None:
    """As where activations are kept elsewhere: what comes back may lie differently."""
    got, want, x = pair()
    packed = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        packed.append(tuple(t.shape))
        return t.detach().to(torch.float64).contiguous(memory_format=torch.channels_last)

    def unpack(t: torch.Tensor) -> torch.Tensor:
        return t.to(torch.float32)

    results = []
    for model in (got, want):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = model(x)
        results.append(torch.autograd.grad(y.square().sum(), (x, *model.parameters())))
    assert packed[:2] == [tuple(x.shape), tuple(want.weight.shape)]
    for mine, its in zip(*results, strict=True):
        assert_same(mine, its)


def test_hooks_on_the_node_and_gradients_that_are_not_asked_for() -> None:
    got, want, x = pair()
    seen = []
    y = got(x)
    node_of(y).register_hook(lambda inputs, outputs: seen.append([t is not None for t in inputs]))
    (dw,) = torch.autograd.grad(y.sum(), got.weight)
    assert seen == [[False, True, False]]
    assert_same(dw, torch.autograd.grad(want(x).sum(), want.weight)[0])


def test_under_autocast_a_weight_is_cast_once_and_gradients_are_its_own() -> None:
    got, want, x = pair()
    results, casts = [], []
    tilewise.restore(got)
    with torch.autocast("cpu", torch.bfloat16):
        tilewise.optimize(got, x, planner=Dividing(), unplanned="torch")
    for model in (got, want):
        with torch.autocast("cpu", torch.bfloat16):
            model(x)  # a call of a new kind is looked up
        with torch.profiler.profile() as profile, torch.autocast("cpu", torch.bfloat16):
            y = model(x) + model(x)
        casts.append(sum(event.name == "aten::_to_copy" for event in profile.events()))
        results.append([y, *torch.autograd.grad(y.float().square().sum(), (x, *model.parameters()))])
    assert casts[0] == casts[1]
    for mine, its in zip(*results, strict=True):
        assert mine.dtype is its.dtype
        assert_same(mine.to(torch.bfloat16), its.to(torch.bfloat16))


def test_backward_within_autocast() -> None:
    got, want, x = pair()
    results = []
    for model in (got, want):
        y = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(torch.autograd.grad(y, (x, *model.parameters()), torch.ones_like(y)))
    for mine, its in zip(*results, strict=True):
        assert mine.dtype is its.dtype is torch.float32
        assert_same(mine, its)


def test_an_error_of_a_plan_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    got, _, x = pair()
    y = got(x)

    def broken(*_: object) -> None:
        raise ArithmeticError("the kernel is broken")

    monkeypatch.setattr(Runner, "gradients", broken)
    with pytest.raises(ArithmeticError, match="the kernel is broken"):
        y.backward(torch.ones_like(y).contiguous(memory_format=torch.channels_last))


def test_a_model_that_is_gone_is_freed(made: Made) -> None:
    got, _, x = pair()
    y = got(x)
    y.sum().backward()
    del got, y
    made.calls[:] = [None]
    gc.collect()
    assert made.layers
    assert all(ref() is None for ref in made.layers)


def test_references_are_given_back(made: Made) -> None:
    got, _, x = pair()
    got(x).sum().backward()
    # Of what was made, the one that the layer runs: operators of compiled graphs have others, made once for its like.
    (call,) = [runner.run for runner in made.layer.runners.values() if runner.run in made.calls]
    counts = sys.getrefcount(call), sys.getrefcount(got.weight), sys.getrefcount(x)
    for _ in range(50):
        got(x).sum().backward()
    assert (sys.getrefcount(call), sys.getrefcount(got.weight), sys.getrefcount(x)) == counts
    y = got(x)  # a graph that nobody runs
    assert sys.getrefcount(call) == counts[0] + 1
    del y
    assert sys.getrefcount(call) == counts[0]


def test_wrong_arguments_are_errors() -> None:
    pair()  # makes one, as every test here must
    kind = autograd.planned_call("cpu")
    assert kind is not None
    given: dict[str, Any] = {
        "forward": None, "grad_input": None, "grad_weight": None, "backward": print,
        "geometry": ((1,), (0,), (1,), (0,), False, 1), "strides": ((1,), (1,), (1,)), "misaligned": 15, "autocast": -1,
    }  # fmt: skip
    call = kind(**given)
    for arguments in ((), (1, 2, 3), (torch.ones(1), torch.ones(1))):
        with pytest.raises(TypeError, match="an input, a weight, and a bias or None"):
            call(*arguments)
    with pytest.raises(TypeError, match=r"\[1\]: a tuple of whole numbers"):
        kind(**given | {"strides": ([1], (1,), (1,))})
    with pytest.raises(TypeError):
        kind(**given | {"strides": ((1.5,), (1,), (1,))})


@pytest.mark.parametrize("bias", [True, False])
def test_compiled_graphs_need_no_python(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for a call that the plans do not take, which is the same in Python."""
    torch._dynamo.reset()
    got, want, x = pair(bias=bias)
    compiled = torch.compile(got, backend="aot_eager", fullgraph=True)
    for mine, its in zip(grads_of(compiled, x), grads_of(want, x), strict=True):
        assert_same(mine, its)
    called = []

    def counted(name: str, function: Any) -> Any:
        def call(*given: Any) -> Any:
            called.append(name)
            return function(*given)

        return call

    for name in ("converted", "gradients"):
        monkeypatch.setattr(Runner, name, counted(name, getattr(Runner, name)))
    for mine, its in zip(grads_of(compiled, x), grads_of(want, x), strict=True):
        assert_same(mine, its)
    assert not called
    shifted = torch.randn(x.numel() + 1)[1:].view_as(x).requires_grad_()
    for mine, its in zip(grads_of(compiled, shifted), grads_of(want, shifted), strict=True):
        assert_same(mine, its)
    assert called == ["converted", "gradients"]
    torch._dynamo.reset()


def test_an_operator_without_plans_is_an_error_from_cpp_too() -> None:
    got, _, x = pair()
    torch.compile(got, backend="aot_eager")(x)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="plans='none' are not known in this process"):
        torch.ops.tilewise.conv(x.detach(), got.weight.detach(), None, "none")


def test_compiled_autograd_traces_torchs_backward() -> None:
    got, want, x = pair()
    results = []
    for model in (got, want):
        y = model(x)
        leaves = (x, *model.parameters())
        for leaf in leaves:
            leaf.grad = None
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            y.square().sum().backward()
        results.append([leaf.grad for leaf in leaves])
    for mine, its in zip(*results, strict=True):
        assert_same(mine, its)


BROKEN = replace(autograd.EXTENSION, main="no_such_file.cpp")


class Unfinished:
    """An attempt to load the module that still waits for the compiler."""

    module, ended = None, False


def test_layers_change_over_once_the_module_is_there(monkeypatch: pytest.MonkeyPatch, made: Made) -> None:
    """Those made before run from Python until then."""
    with monkeypatch.context() as patch:
        patch.setattr("tilewise.nn.layers.runner.planned_call", lambda device_type: None)
        got, want, x = pair()
        before = got(x)
        assert hasattr(before.grad_fn, "saved_tensors")
    told: list[str] = []
    found = extension.Loading(BROKEN, lambda: told.append("there")).finished()
    assert "no_such_file" in found.reason
    assert not told
    with monkeypatch.context() as patch:
        patch.setattr(autograd, "_loading", functools.cache(lambda: Unfinished()))
        autograd._loading()
        autograd.when_there(made.layer)
    assert hasattr(got(x).grad_fn, "saved_tensors")
    autograd._tell()
    node_of(got(x))
    for mine, its in zip(grads_of(got, x), grads_of(want, x), strict=True):
        assert_same(mine, its)
    before.sum().backward()


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [("CXX", "false", "false ended with 1"), ("TILEWISE_NATIVE", "0", "TILEWISE_NATIVE is 0")],
)
def test_where_it_cannot_be_compiled(
    variable: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    pair()  # makes one, as every test here must
    monkeypatch.setattr("tilewise.machine.cache.kernel_dir", lambda: tmp_path)
    monkeypatch.setattr(autograd, "_loading", functools.cache(autograd._loading.__wrapped__))
    monkeypatch.setenv(variable, value)
    autograd.start(["cpu"])
    assert reason in autograd.why_not()
    assert autograd.planned_call("cpu") is None
    assert reason in autograd.expected()
    assert not os.listdir(tmp_path)


def test_what_is_expected_is_told_without_compiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    pair()  # makes one, as every test here must
    assert not autograd.expected()
    monkeypatch.setattr("tilewise.machine.cache.kernel_dir", lambda: tmp_path)
    monkeypatch.setattr(autograd, "_loading", functools.cache(autograd._loading.__wrapped__))
    assert not autograd.expected()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler: one named c++, g++, clang++ or by CXX would do" in autograd.expected()
    assert not os.listdir(tmp_path)
