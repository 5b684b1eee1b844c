"""Recurrent layers from C++: the same bits as from Python, torch's numbers, and what C++ could do worse.

The module is for GPUs; here it is switched on for a CPU, with kernels that are functions of Python on addresses.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.native.standin import COMPILER
from tests.nn.recurrent_plans import CLASSES, flat, forced, with_gradients
from tests.nn.steps_by_address import StepsByAddress
from tests.nn.test_native_calls import _on_a_cpu  # noqa: F401 (a fixture)
from tests.sampling import some
from torch import Tensor, nn

from tilewise.kernels.native import autograd
from tilewise.nn.layers.recurrent import compiled
from tilewise.nn.layers.recurrent.native import NEVER
from tilewise.nn.layers.recurrent.run import PlannedRecurrent, RecurrentRun
from tilewise.solvers.recurrent._layers import StackedLayers
from tilewise.solvers.recurrent.stepped import Stepped

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
NODE = "PlannedRecurrentBackward"


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[StepsByAddress]]:
    """The recurrences that were made in a test."""
    found: list[weakref.ref[StepsByAddress]] = []

    def layer(self: object, p: Any, c: Any) -> StackedLayers:
        recurrence = StepsByAddress(p.cell, p.hidden, p.torch_dtype("x"), 0, ((1, 1, 1, 1), (1, 1, 1, 1)))
        found.append(weakref.ref(recurrence))
        return StackedLayers(p, recurrence)

    monkeypatch.setattr(Stepped, "layer", layer)
    monkeypatch.setattr(compiled, "_published", {})  # no compiled graph of another test may find these layers
    return found


@pytest.fixture
def no_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither a forward nor a backward may come from Python."""

    def called(*_: object, **__: object) -> None:
        raise AssertionError("Python was asked")

    with monkeypatch.context() as patch:
        for name in ("forward", "backward"):
            patch.setattr(RecurrentRun, name, called)
        yield


def from_python(module: nn.RNNBase, monkeypatch: pytest.MonkeyPatch) -> nn.RNNBase:
    """A planned copy of the module whose calls never come from C++."""
    twin, _ = forced(module)
    monkeypatch.setattr("tilewise.nn.layers.recurrent.run.recurrent_native", lambda *_: NEVER)
    twin(torch.zeros(1, 1, module.input_size))
    return twin


def types_or_error(module: nn.RNNBase, x: Tensor) -> list[torch.dtype] | str:
    """The types of the results, or why torch refuses the call, as an LSTM in bf16 on some processors."""
    try:
        return [t.dtype for t in flat(module(x))]
    except RuntimeError as error:
        return str(error)


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, check_stride=True)


def same(got: list[Tensor | None], want: list[Tensor | None]) -> None:
    for mine, its in zip(got, want, strict=True):
        assert (mine is None) == (its is None)
        assert mine is None or its is None or (torch.equal(mine, its) and mine.stride() == its.stride())


@settings(max_examples=some(30), deadline=None)
@given(draw=st.data())
def test_results_and_gradients_are_those_from_python_and_torchs(draw: st.DataObject) -> None:
    kind, directions = draw.draw(st.sampled_from(CLASSES)), draw.draw(st.integers(1, 2), "directions")
    layers, batch, time = (draw.draw(st.integers(1, n), name) for n, name in ((3, "layers"), (4, "batch"), (5, "time")))
    hidden, inputs = draw.draw(st.sampled_from((4, 8, 12)), "hidden"), draw.draw(st.sampled_from((4, 8)), "inputs")
    biases = draw.draw(st.booleans(), "biases")
    module = kind(inputs, hidden, layers, bias=biases, bidirectional=directions == 2)
    for weight in module.parameters():
        weight.requires_grad_(draw.draw(st.booleans(), "a weight's gradient"))
    x = torch.randn(time, batch, inputs).requires_grad_(draw.draw(st.booleans(), "the input's gradient"))
    hx: Any = None
    if draw.draw(st.booleans(), "states"):
        needs = draw.draw(st.booleans(), "the states' gradients")
        states = tuple(torch.randn(layers * directions, batch, hidden).requires_grad_(needs) for _ in range(2))
        hx = states if kind is nn.LSTM else states[0]
    used = draw.draw(st.sampled_from(((0, 1, 2), (0,), (1,), (0, 2))), "used")
    got = with_gradients(forced(module)[0], x, hx, used)
    close(got, with_gradients(module, x, hx, used))
    with pytest.MonkeyPatch.context() as patch:
        same(got, with_gradients(from_python(module, patch), x, hx, used))


@pytest.mark.parametrize("kind", CLASSES)
def test_usual_calls_need_no_python(kind: Any, no_python: None) -> None:
    module = kind(8, 8, 2, bidirectional=True)
    twin, _ = forced(module)
    x = torch.randn(3, 2, 8, requires_grad=True)
    y = twin(x)[0]
    assert type(y.grad_fn).__name__ == NODE
    assert not hasattr(y.grad_fn, "saved_tensors")  # which nodes of Python have
    assert [edge is None for edge, _ in y.grad_fn.next_functions] == [False, True, True, *[False] * 16]
    close(with_gradients(twin, x), with_gradients(module, x))
    with torch.no_grad():
        got, want = flat(twin(x)), flat(module(x))
        close(got, want)
        assert not any(t.requires_grad for t in got)
    with torch.autocast("cpu", torch.bfloat16):
        assert types_or_error(twin, x.detach()) == types_or_error(module, x.detach())
        assert types_or_error(twin, x.detach().bfloat16()) == types_or_error(module, x.detach().bfloat16())


@pytest.mark.parametrize("order", ["batch_first", "without a batch"])
def test_an_input_in_another_order_is_computed(order: str) -> None:
    """Its rows do not lie as kernels take them, or its results are views."""
    module = nn.GRU(8, 8, batch_first=order == "batch_first")
    twin, _ = forced(module)
    x = torch.randn(*((2, 3, 8) if order == "batch_first" else (3, 8)), requires_grad=True)
    close(with_gradients(twin, x), with_gradients(module, x))


@pytest.mark.parametrize("which", ["x", "h0", "weight"])
def test_operands_that_kernels_do_not_take_go_to_python(which: str) -> None:
    module = nn.RNN(8, 8)
    x, h0 = torch.randn(3, 2, 8), torch.randn(1, 2, 8)
    off = torch.randn(1 + 8 * 8)[1:]  # begins at 4 bytes
    if which == "x":
        x = off[:48].view(3, 2, 8)
    elif which == "h0":
        h0 = off[:16].view(1, 2, 8)
    else:
        module.weight_hh_l0.data = off.view(8, 8)
    twin, _ = forced(module)
    if which == "weight":
        twin.weight_hh_l0.data = off.view(8, 8)
    result = twin(x, h0)
    assert type(result[0].grad_fn).__name__ == f"{PlannedRecurrent.__name__}Backward"
    close(flat(result), flat(module(x, h0)))


def test_units_that_are_padded_stay_in_python() -> None:
    module = nn.GRU(8, 6)
    twin, _ = forced(module)
    x = torch.randn(3, 2, 8, requires_grad=True)
    close(with_gradients(twin, x), with_gradients(module, x))
    assert hasattr(twin(x)[0].grad_fn, "saved_tensors")


def test_dropout_between_layers_stays_in_python() -> None:
    twin, _ = forced(nn.GRU(8, 8, 2, dropout=0.5))
    x = torch.randn(3, 2, 8)
    assert hasattr(twin(x)[0].grad_fn, "saved_tensors")
    assert not hasattr(twin.eval()(x)[0].grad_fn, "saved_tensors")


def test_gradients_have_gradients() -> None:
    module = nn.LSTM(8, 8)
    twin, _ = forced(module)
    found = []
    for each in (twin, module):
        x = torch.linspace(-1, 1, 48).view(3, 2, 8).requires_grad_()
        (grad,) = torch.autograd.grad(each(x)[0].square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), [x, *each.parameters()]))
    close(*found)


def test_a_graph_is_gone_back_twice_only_where_it_is_retained() -> None:
    twin, _ = forced(nn.LSTM(8, 8))
    x = torch.randn(3, 2, 8, requires_grad=True)
    y = twin(x)[0].sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    assert torch.equal(first, torch.autograd.grad(y, x)[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_hooks_on_saved_tensors_see_them() -> None:
    twin, _ = forced(nn.LSTM(8, 8))
    x, seen = torch.randn(3, 2, 8, requires_grad=True), []

    def packed(t: Tensor) -> Tensor:
        seen.append(t)
        return t.clone()

    want = torch.autograd.grad(twin(x)[0].sum(), x)
    with torch.autograd.graph.saved_tensors_hooks(packed, lambda t: t):
        y = twin(x)[0]
    assert len(seen) >= 8
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want[0])


def test_a_weight_that_was_changed_after_is_an_error() -> None:
    twin, _ = forced(nn.GRU(8, 8))
    y = twin(torch.randn(3, 2, 8, requires_grad=True))[0]
    with torch.no_grad():
        twin.weight_hh_l0.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_results_may_be_changed_in_place() -> None:
    module = nn.GRU(8, 8)
    twin, _ = forced(module)
    x = torch.randn(3, 2, 8, requires_grad=True)
    found = []
    for each in (twin, module):
        results = flat(each(x))
        for t in results:
            t.mul_(2.0)
        total = torch.stack([t.sum() for t in results]).sum()
        found.append(torch.autograd.grad(total, [x, *each.parameters()]))
    close(*found)


def test_nothing_is_kept_once_a_layer_is_gone(made: list[weakref.ref[StepsByAddress]]) -> None:
    twin, table = forced(nn.RNN(8, 8))
    x = torch.randn(3, 2, 8, requires_grad=True)
    twin(x)[0].sum().backward()
    assert any(ref() is not None for ref in made)
    compiled._published.clear()  # a graph names its plans for as long as the process lasts
    del twin, table
    gc.collect()
    assert all(ref() is None for ref in made)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLASSES)
def test_compiled_autograd_traces_torchs_backward(kind: Any) -> None:
    module = kind(8, 8)
    twin, _ = forced(module)
    found = []
    for each in (twin, copy.deepcopy(module)):
        x = torch.linspace(-1, 1, 48).view(3, 2, 8).requires_grad_()
        y = each(x)[0]
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            y.square().sum().backward()
        found.append([x.grad, *(p.grad for p in each.parameters())])
    close(*found)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sizes": (1, 1, 1, 1, 1, 3, 1)}, "3 directions, 1 or 2 would do"),
        ({"sizes": (0, 1, 1, 1, 1, 1, 1)}, "number 0 is 0, at least 1 would do"),
        ({"forward": ()}, "one for each of 1 directions would do"),
        ({"forward": ((1, 2),)}, r"steps are \(launches, api, stream, device\)"),
    ],
)
def test_what_makes_no_sense_is_refused(changed: dict[str, Any], message: str) -> None:
    module = autograd.native_calls("cpu")
    assert module is not None
    steps = ((print, None, None, -1),)
    usual: dict[str, Any] = {
        "cell": "gru", "sizes": (1, 1, 1, 4, 1, 1, 3), "biases": True, "trains": True, "copies": True, "dtype": 6,
        "forward": steps, "grads": steps, "backward": print, "precision": None,
    }  # fmt: skip
    call = module.RecurrentCall(**usual)
    with pytest.raises(TypeError, match="takes x, h0 and c0 or None, and a tuple of weights"):
        call(None)
    with pytest.raises((ValueError, TypeError), match=message):
        module.RecurrentCall(**usual | changed)


def test_a_call_like_the_one_before_is_asked_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.LSTM(8, 8, batch_first=True)
    twin, _ = forced(module)
    calls = [(torch.randn(*shape, requires_grad=True), hx) for shape in ((2, 3, 8), (3, 8)) for hx in (True, False)]
    for x, with_states in calls:
        state = torch.randn(1, *x.shape[:-2], 8)
        hx = (state, 2 * state) if with_states else None
        want = with_gradients(twin, x, hx)
        with monkeypatch.context() as patch:
            patch.setattr("tilewise.nn.layers.recurrent.layer.given_of", None)
            same(with_gradients(twin, x, hx), want)
        close(want, with_gradients(module, x, hx))


def _replaced(module: nn.RNNBase) -> None:
    module.weight_hh_l0 = nn.Parameter(module.weight_hh_l0.detach() * 2)


def _in_the_parameters_place(module: nn.RNNBase) -> None:
    module.__dict__["weight_hh_l0"] = module.weight_hh_l0.detach() * 2


CHANGES: dict[str, Any] = {
    "another order": lambda module: setattr(module, "batch_first", True),
    "frozen weights": lambda module: module.requires_grad_(requires_grad=False),
    "another mode": lambda module: setattr(module, "mode", "RNN_RELU"),
    "training": lambda module: module.train(),
    "a weight replaced": _replaced,
    "a tensor in a weight's place": _in_the_parameters_place,
    "another type": lambda module: module.double(),
    "a weight's memory replaced": lambda module: setattr(module.weight_ih_l0, "data", torch.ones(8, 8)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_changed_between_calls_is_asked_again(change: str) -> None:
    module = nn.RNN(8, 8).eval()
    twin, _ = forced(module)
    x = torch.randn(3, 3, 8, requires_grad=True)
    for _ in range(2):
        close(with_gradients(twin, x), with_gradients(module, x))
    for each in (twin, module):
        CHANGES[change](each)
    x = x.detach().to(module.weight_ih_l0.dtype).requires_grad_()
    for _ in range(2):
        close(flat(twin(x)), flat(module(x)))


def test_tensors_and_settings_that_changed_between_calls_are_noticed() -> None:
    module = nn.GRU(8, 8)
    twin, _ = forced(module)
    x = torch.randn(3, 2, 8, requires_grad=True)
    for other in (x, torch.randn(4, 2, 8), torch.randn(3, 5, 8), x.detach().transpose(0, 1), x):
        twin(x)
        close(flat(twin(other)), flat(module(other)))
    with torch.no_grad():
        assert not twin(x)[0].requires_grad
    assert twin(x)[0].requires_grad
    packed = nn.utils.rnn.pack_padded_sequence(x.detach(), torch.tensor([3, 1]))
    close(twin(packed)[0].data, module(packed)[0].data)
    weights = {name: p.detach() * 2 for name, p in twin.named_parameters()}
    for _ in range(2):
        close(*(flat(torch.func.functional_call(each, weights, x)) for each in (twin, module)))
        close(flat(twin(x)), flat(module(x)))
    with pytest.raises((RuntimeError, TypeError, AttributeError)):
        twin("no tensor")


def test_tensors_are_alike_that_differ_in_numbers_alone() -> None:
    module = autograd.native_calls("cpu")
    assert module is not None
    x, w = torch.randn(3, 4), nn.Parameter(torch.randn(2))
    alike = module.AlikeTensors(x, w)
    assert alike(x, w)
    assert alike(torch.randn(3, 4), nn.Parameter(torch.zeros(2)))
    others = (
        torch.randn(4, 3).t(), x.double(), x.to("meta"), x.clone().requires_grad_(), nn.Parameter(x), x.to_sparse(),
        torch._neg_view(x), None, 3,
    )  # fmt: skip
    for other in others:
        assert not alike(other, w)
    assert not alike(x)
    assert not alike(x, w, x)
    with torch.inference_mode():
        assert not alike(x, w)
    with pytest.raises(TypeError, match="argument 1 is a int: a tensor would do"):
        module.AlikeTensors(x, 1)
