"""Planned calls whose kernels are queued from C++, against a driver without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import toys
from tests.kernels.native.conftest import STREAM
from tests.kernels.native.standin import Standin, words
from tests.kernels.native.test_pass_call import (  # noqa: F401  (two are fixtures)
    CALLS,
    _toys,
    leaf,
    problem,
    tensors,
    told_tensors,
)
from tests.nn.test_native_calls import _on_a_cpu  # noqa: F401  (a fixture)

from tilewise.execute import Bound, bind
from tilewise.kernels.native import autograd
from tilewise.kernels.native.sequence import addressed_of
from tilewise.machine.workspaces import GRAIN
from tilewise.problems.conv.problem import Pass
from tilewise.solvers import SolverUnavailable


def planned(passes: dict[Pass, Bound]) -> Any:
    """A planned call of :func:`problem` with kernels for these passes."""

    def pair(pass_: Pass) -> Any:
        bound = passes.get(pass_)
        if bound is None:
            return None
        assert bound.kernels is not None
        return bound.call, bound.kernels

    kind = autograd.planned_call("cpu")
    assert kind is not None
    p = problem()
    strides = tuple(torch.empty(p.shape(role), dtype=torch.float32, device="cpu").stride() for role in "yxw")
    return kind(
        forward=pair(Pass.FPROP), grad_input=pair(Pass.DGRAD), grad_weight=pair(Pass.WGRAD), backward=print,
        geometry=((1, 1), (1, 0), (1, 1), (0, 0), False, 1), strides=strides, misaligned=15, autocast=-1,
    )  # fmt: skip


def bound_to(pass_: Pass, name: str = "launching", **changes: Any) -> Bound:
    p = problem(pass_, **changes)
    return bind(leaf(p, name), p, *tensors(p)[:2])


def test_forward_and_gradients_are_launched_without_python(on_standin: Standin) -> None:
    call = planned({pass_: bound_to(pass_) for pass_ in Pass})
    x, w, _ = tensors(problem())
    y = call(x.requires_grad_(), w.requires_grad_(), None)
    p = problem()
    assert y.shape == p.shape(p.result)
    assert y.is_contiguous()
    dy = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    assert (dx.shape, dw.shape) == (x.shape, w.shape)
    told = told_tensors(on_standin)
    assert told[0] == (x.data_ptr(), y.data_ptr(), w.data_ptr())
    assert told[1] == (dy.data_ptr(), dx.data_ptr(), w.data_ptr())
    assert told[2] == (x.data_ptr(), dw.data_ptr(), dy.data_ptr())
    assert {one.stream for one in on_standin.told()} == {STREAM}
    assert all(one.parameters != words(256) for one in on_standin.told()[1::2]), "each pass had a workspace"


def test_each_type_and_layout_of_a_result(on_standin: Standin) -> None:
    changes: dict[str, Any] = {"dtype": "bf16", "out_dtype": "fp32"}
    layouts = ("contiguous", "contiguous", "channels_last")
    call = planned({Pass.FPROP: bound_to(Pass.FPROP, layouts=layouts, **changes)})
    x, w, _ = tensors(problem(**changes))
    y = call(x, w, None)
    assert y.dtype is torch.float32
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert on_standin.launched == 2


def test_biases(on_standin: Standin) -> None:
    x, w, _ = tensors(problem())
    p = problem()
    bias = torch.randn(p.shape(p.result)[1], dtype=torch.float32, device="cpu")
    adding = planned({Pass.FPROP: bound_to(Pass.FPROP, "launching_biased", bias=True)})
    adding(x, w, bias)
    assert on_standin.told()[-1].parameters[8:] == words(bias.data_ptr())
    on_standin.begin()
    adding(x, w, bias.double())
    adding(x, w, None)
    places = [one.parameters[8:] for one in on_standin.told()[1::2]]
    assert len(places) == 2
    assert not {words(0), words(bias.data_ptr())} & set(places)
    with pytest.raises(ValueError, match=r"would do"):
        adding(x, w, bias[:2])
    on_standin.begin()
    plain = planned({Pass.FPROP: bound_to(Pass.FPROP)})
    without = plain(x, w, None)
    assert on_standin.launched == 2
    y = plain(x, w, bias)
    assert y.shape == without.shape
    assert on_standin.launched == 4


def test_a_hook_has_the_plan_called_from_python(on_standin: Standin) -> None:
    call = planned({Pass.FPROP: bound_to(Pass.FPROP)})
    x, w, _ = tensors(problem())
    CALLS.append(print)
    y = call(x, w, None)
    assert on_standin.launched == 0
    torch.testing.assert_close(y.double(), problem().reference(x, w), rtol=1e-5, atol=1e-5)
    CALLS.clear()
    call(x, w, None)
    assert on_standin.launched == 2


def by_address(name: str, **changes: Any) -> tuple[Any, Bound]:
    """A planned call whose forward pass runs on addresses, and its plan bound."""
    bound = bound_to(Pass.FPROP, name, **changes)
    run = bound._addressed
    assert run is not None

    def aligned(a: int, b: int, out: int, workspace: int, *bias: int) -> None:
        run(a, b, out, -(-workspace // GRAIN) * GRAIN, *bias)  # as a GPU's memory is by itself

    like = torch.empty(bound._shape, dtype=bound._dtype, device="meta")
    kernels = addressed_of(aligned, like, workspace=bound.workspace + GRAIN, bias_dim=1, adds_bias=bound._adds)
    assert kernels is not None
    bound.kernels = kernels
    return planned({Pass.FPROP: bound}), bound


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_plan_on_addresses_is_called_with_numbers(
    on_standin: Standin, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, bound = by_address("addressed", dtype=dtype)
    x, w, _ = tensors(problem(dtype=dtype))
    bias = torch.randn(5, dtype=x.dtype, device="cpu")
    want = bound(x, w), bound(x, w, bias)
    monkeypatch.setattr(Bound, "_from_python", None)
    for given, expected in zip((None, bias), want, strict=True):
        got = call(x, w, given)
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()


def test_a_plan_on_addresses_that_adds_the_bias(on_standin: Standin) -> None:
    with toys.installed(AddressedBiased()):
        call, bound = by_address("addressed_biased", bias=True)
    x, w, _ = tensors(problem())
    bias = torch.randn(5, dtype=torch.float32, device="cpu")
    for given in (bias, None):
        assert torch.equal(call(x, w, given), bound(x, w, given))


class AddressedBiased(toys.Addressed):
    """The toy that runs on addresses, adding the bias itself."""

    name = "addressed_biased"
    adds_bias = True


def test_what_a_plan_on_addresses_raises_comes_out(on_standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*addresses: int) -> None:
        raise SolverUnavailable(f"{len(addresses)} addresses")

    bound = bound_to(Pass.FPROP, "addressed")
    bound._addressed = fails
    like = torch.empty(bound._shape, dtype=bound._dtype, device="meta")
    bound.kernels = addressed_of(fails, like, workspace=0, bias_dim=1, adds_bias=False)
    x, w, _ = tensors(problem())
    with pytest.raises(SolverUnavailable, match="4 addresses"):
        planned({Pass.FPROP: bound})(x, w, None)
    assert addressed_of(fails, like.to(torch.int32), workspace=0, bias_dim=1, adds_bias=False) is None


def test_a_failed_launch_is_an_error(on_standin: Standin) -> None:
    call = planned({Pass.FPROP: bound_to(Pass.FPROP)})
    x, w, _ = tensors(problem())
    on_standin.fail(719, 1)
    with pytest.raises(RuntimeError, match="launch 2 of 2"):
        call(x, w, None)
    on_standin.fail(0, 0)


def test_what_is_no_pass_is_refused() -> None:
    kind, found = autograd.planned_call("cpu"), bound_to(Pass.FPROP)
    assert kind is not None
    assert found.kernels is not None
    given: dict[str, Any] = {
        "grad_input": None, "grad_weight": None, "backward": print,
        "geometry": ((1, 1), (1, 0), (1, 1), (0, 0), False, 1), "strides": ((1,), (1,), (1,)),
        "misaligned": 15, "autocast": -1,
    }  # fmt: skip
    for wrong in (found.call, (found.call,), (found.call, found.kernels[:-1]), [found.call, None]):
        with pytest.raises(TypeError):
            kind(forward=wrong, **given)
    for name, value in (("api", 3), ("shape", [1]), ("bias_dim", 9)):
        with pytest.raises((TypeError, ValueError)):
            kind(forward=(found.call, found.kernels._replace(**{name: value})), **given)
