"""Repeated calls of linear layers, recognised in C++: whatever differs from the call before is noticed.

The module is for GPUs; here it is switched on for a CPU.
"""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kernels.native.standin import COMPILER
from tests.nn.product_plans import Thin
from tests.nn.test_native_calls import _on_a_cpu  # noqa: F401 (a fixture)
from tests.nn.test_repeated import STATES, assert_alike, hidden_weight, parametrized, plain_weight, set_parameter
from torch import nn

import tilewise
from tilewise.nn.layers.linear.layer import LinearLayer
from tilewise.nn.layers.linear.repeated import RepeatedLinear

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


def batch(*sizes: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(*(sizes or (3, 4, 24))).requires_grad_()


def module(planned: bool, bias: bool = True) -> nn.Linear:
    """A linear layer that C++ has seen a call of, if it is ``planned``."""
    torch.manual_seed(0)
    made = nn.Linear(24, 36, bias=bias)
    if planned:
        tilewise.optimize(made, batch(), planner=Thin(), goal="passes", unplanned="torch")
        made(batch())
    return made


def repeated_of(planned: nn.Module) -> RepeatedLinear:
    found = inspect.getclosurevars(planned.forward.__func__).nonlocals["repeated"]  # type: ignore[union-attr]
    assert isinstance(found, RepeatedLinear)
    return found


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The calls that come to Python's table of calls from now on."""
    calls, original = list[object](), LinearLayer.__call__

    def call(self: LinearLayer, *tensors: Any) -> Any:
        calls.append(tensors)
        return original(self, *tensors)

    monkeypatch.setattr(LinearLayer, "__call__", call)
    return calls


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_repeated_call_needs_no_python(bias: bool, needs_grad: bool, autocast: bool, watched: list[object]) -> None:
    with torch.set_grad_enabled(needs_grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got, want, x = module(True, bias), module(False, bias), batch()
        got(x), got(x)
        watched.clear()
        y = got(x)
        assert not watched
        expected = want(x)
        torch.testing.assert_close(y, expected, rtol=1e-3, atol=2e-2 if autocast else 1e-5)
        assert y.requires_grad is needs_grad
    if needs_grad:
        mine, its = (torch.autograd.grad(each.sum(), x)[0] for each in (y, expected))
        torch.testing.assert_close(mine, its, rtol=2e-2, atol=2e-2)


def test_what_torch_computes_needs_no_python_either(watched: list[object]) -> None:
    got, want, x = module(True), module(False), batch(2, 24)  # sizes that were not planned
    with torch.no_grad():
        got(x), got(x)
        assert repeated_of(got)._layer.latest.run is None
        watched.clear()
        assert torch.equal(got(x), want(x))
        assert not watched


CHANGES: dict[str, Callable[[Any], object]] = {
    "no bias": lambda m: setattr(m, "bias", None),
    "doubled weight": set_parameter("weight", lambda w: w * 2),
    "weight of another size": set_parameter("weight", lambda w: torch.cat([w, w])[:36]),
    "turned weight": set_parameter("weight", lambda w: w.t().contiguous().t()),
    "weight misaligned": set_parameter("weight", lambda w: torch.cat([w.new_zeros(1), w.flatten()])[1:].view(w.shape)),
    "frozen weight": lambda m: m.weight.requires_grad_(False),
    "weight without a parameter": plain_weight,
    "weight before the parameter": hidden_weight,
    "parametrized": parametrized,
    "double": lambda m: m.double(),
    "half": lambda m: m.bfloat16(),
    "forward of the instance": lambda m: m.__dict__.__setitem__("forward", lambda x: x * 2),
}
INPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "other sizes": lambda x: batch(2, 24),
    "one row": lambda x: batch(24),
    "other strides": lambda x: x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(),
    "no gradient": lambda x: x.detach(),
    "misaligned": lambda x: torch.cat([x.detach().new_zeros(1), x.detach().flatten()])[1:].view(x.shape),
    "double": lambda x: x.detach().double(),
    "complex": lambda x: x.detach().to(torch.complex64),
    "negated": lambda x: torch._neg_view(x.detach()),
    "expanded": lambda x: x.detach()[:1].expand(3, -1, -1),
    "meta": lambda x: x.detach().to("meta"),
    "nothing": lambda x: None,
    "a number": lambda x: 3,
    "wrong channels": lambda x: x.detach()[..., :3],
    "empty": lambda x: x.detach()[:0],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_module_is_noticed(name: str) -> None:
    got, want, x = module(True), module(False), batch()
    got(x)
    assert repeated_of(got).call is not None
    for each in (got, want):
        CHANGES[name](each)
    for _ in range(3):
        assert_alike(lambda: got(x), lambda: want(x))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", INPUTS)
def test_another_input_is_noticed(name: str) -> None:
    got, want, x = module(True), module(False), batch()
    other = INPUTS[name](x)
    got(x)
    for _ in range(3):
        assert_alike(lambda: got(other), lambda: want(other))
    assert_alike(lambda: got(x), lambda: want(x))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", STATES)
def test_another_state_of_torch_is_noticed(name: str) -> None:
    got, want, x = module(True), module(False), batch()
    got(x)
    for _ in range(3):
        with STATES[name]():
            assert_alike(lambda: got(x), lambda: want(x))
        assert_alike(lambda: got(x), lambda: want(x))


@pytest.mark.parametrize("where", ["class", "function", "base"])
def test_changed_code_is_noticed(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    got, x = module(True), batch()
    got(x)
    assert repeated_of(got).call is not None
    if where == "class":
        monkeypatch.setattr(nn.Linear, "forward", lambda self, input: input * 2)
    elif where == "function":
        monkeypatch.setattr(nn.functional, "linear", lambda x, w, b: x * 2)
    else:
        monkeypatch.setattr(nn.Module, "twice", 2, raising=False)  # a new version of the class
    want = x * 2 if where != "base" else module(False)(x)
    for _ in range(2):
        torch.testing.assert_close(got(x), want, rtol=1e-4, atol=1e-5)


def test_plans_that_change_are_noticed() -> None:
    got, x = module(True), batch()
    got(x)
    repeated = repeated_of(got)
    assert repeated.call is not None
    repeated._layer.forget()
    assert repeated.call(got, x) is None


def test_copies_have_their_own_numbers() -> None:
    got, x = module(True), batch()
    got(x)
    twin = copy.deepcopy(got)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(twin(x), 2 * got(x))
    torch.testing.assert_close(twin(x), 2 * got(x))


def test_a_module_goes_when_nobody_holds_it() -> None:
    got, x = module(True), batch()
    got(x), got(x)
    gone = weakref.ref(got)
    del got
    gc.collect()
    assert gone() is None
