"""Calls of recurrent modules by plans: results and gradients as torch's, whatever the options, and what is torch's."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nn.recurrent_plans import CLASSES, close, drawn_projection, flat, forced, with_gradients
from torch import Tensor, nn

from tilewise.nn.layers.recurrent.call import describe, given_of
from tilewise.nn.layers.recurrent.saved import apart, together
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers import get


def drawn_module(draw: Any, **fixed: Any) -> nn.RNNBase:
    """A small module of any class and options."""
    kind = draw(st.sampled_from(CLASSES), "class")
    options: dict[str, Any] = {
        "num_layers": draw(st.integers(1, 3), "layers"),
        "bias": draw(st.booleans(), "bias"),
        "batch_first": draw(st.booleans(), "batch_first"),
        "bidirectional": draw(st.booleans(), "bidirectional"),
        **fixed,
    }
    if kind is nn.RNN:
        options["nonlinearity"] = draw(st.sampled_from(("tanh", "relu")), "nonlinearity")
    hidden = draw(st.integers(1, 9), "hidden")
    options |= drawn_projection(draw, kind, hidden)
    module: nn.RNNBase = kind(draw(st.integers(1, 6), "inputs"), hidden, **options)
    return module


def drawn_input(draw: Any, module: nn.RNNBase) -> tuple[Tensor, Any]:
    """An input of the module, dense or not, and first states or none."""
    time, batch = draw(st.integers(1, 5), "time"), draw(st.integers(1, 4), "batch")
    batched, needs = draw(st.booleans(), "batched"), draw(st.booleans(), "input's gradient")
    shape = ((batch, time) if module.batch_first else (time, batch)) if batched else (time,)
    x = torch.randn(*shape, module.input_size)
    if draw(st.booleans(), "strided"):
        x = x.repeat_interleave(2, -1)[..., ::2]
    x.requires_grad_(needs)
    if not draw(st.booleans(), "states"):
        return x, None
    state = (module.num_layers * (2 if module.bidirectional else 1), *((batch,) if batched else ()))
    widths = module.proj_size or module.hidden_size, module.hidden_size
    states = tuple(torch.randn(*state, width).requires_grad_(needs) for width in widths)
    return x, states if isinstance(module, nn.LSTM) else states[0]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_results_and_gradients_are_torchs(data: st.DataObject) -> None:
    module = drawn_module(data.draw)
    x, hx = drawn_input(data.draw, module)
    used = data.draw(st.sampled_from(((0, 1, 2), (0,), (1,), (0, 2))), "used")
    twin, table = forced(module)
    for _ in range(2):
        close(with_gradients(twin, x, hx, used), with_gradients(module, x, hx, used))
    with torch.no_grad():
        close(flat(twin(x, hx)), flat(module(x, hx)))
    assert [p.task for p in table.asked if isinstance(p, RecurrentProblem)] == ["training", "inference"]


@pytest.mark.skipif(
    bool(get("resident_rnn").why_not(RecurrentProblem("lstm", 1, 1, 1, 1))), reason="the solver needs Numba"
)
@pytest.mark.parametrize(
    ("kind", "both", "projection"), [(nn.LSTM, True, 0), (nn.LSTM, True, 4), (nn.GRU, False, 0), (nn.RNN, True, 0)]
)
def test_a_compiled_kernel_keeps_what_its_backward_needs(kind: Any, both: bool, projection: int) -> None:
    module = kind(5, 9, 2, bidirectional=both, **({"proj_size": projection} if projection else {}))
    twin, _ = forced(module, "resident_rnn")
    x = torch.randn(7, 3, 5, requires_grad=True)
    close(with_gradients(twin, x), with_gradients(module, x))
    y = twin(x)[0].sum()
    first = torch.autograd.grad(y, [x, *twin.parameters()], retain_graph=True)
    close(torch.autograd.grad(y, [x, *twin.parameters()]), first)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_what_is_dropped_is_what_torch_drops(data: st.DataObject) -> None:
    module = drawn_module(data.draw, num_layers=3, dropout=0.5)
    x, hx = drawn_input(data.draw, module)
    twin, _ = forced(module)
    for training in (True, False, True):
        module.train(training)
        twin.train(training)
        found = []
        for each in (twin, module):
            torch.manual_seed(3)
            found.append([*with_gradients(each, x, hx), torch.rand(1)])
        close(*found)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(("kind", "projection"), [*((kind, 0) for kind in CLASSES), (nn.LSTM, 2)])
def test_gradients_of_gradients_are_torchs(kind: Any, projection: int, dropout: float) -> None:
    module = kind(3, 4, 2, dropout=dropout, **({"proj_size": projection} if projection else {}))
    twin, _ = forced(module)
    x = torch.randn(5, 2, 3, requires_grad=True)

    def penalty(module: nn.RNNBase) -> list[Tensor]:
        torch.manual_seed(1)
        y = module(x)[0].square().sum()
        gradients = torch.autograd.grad(y, [x, *module.parameters()], create_graph=True)
        torch.rand(1)
        return [*gradients, *torch.autograd.grad(gradients[0].square().sum(), [x, *module.parameters()])]

    close([t.detach() for t in penalty(twin)], [t.detach() for t in penalty(module)])


def test_a_batch_of_gradients_is_torchs() -> None:
    module = nn.GRU(3, 4)
    twin, _ = forced(module)
    x = torch.randn(5, 2, 3, requires_grad=True)

    def rows(module: nn.RNNBase) -> Tensor:
        y = module(x)[1].flatten()
        return torch.autograd.grad(y, x, torch.eye(y.numel()), is_grads_batched=True)[0]

    close(rows(twin), rows(module))


def test_a_graph_is_gone_back_once_or_kept() -> None:
    twin, _ = forced(nn.LSTM(3, 4))
    x = torch.randn(5, 2, 3, requires_grad=True)
    y = twin(x)[0].sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    assert torch.equal(torch.autograd.grad(y, x)[0], first[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, x)


@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l1", "bias_hh_l0"])
def test_a_weight_that_changes_before_the_backward_is_noticed(name: str) -> None:
    twin, _ = forced(nn.LSTM(3, 4, 2))
    loss = twin(torch.randn(5, 2, 3))[0].sum()
    with torch.no_grad():
        getattr(twin, name).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_results_may_be_changed_in_place(kind: Any) -> None:
    """Those of oneDNN's LSTM may not: that is what torch saves."""
    module = kind(3, 4)
    twin, _ = forced(module)
    x = torch.randn(5, 2, 3, requires_grad=True)

    def gradient(module: nn.RNNBase) -> Tensor:
        y, h = module(x)
        return torch.autograd.grad(y.relu_().sum() + h.mul_(2).sum(), x)[0]

    close(gradient(twin), gradient(module))


def test_what_is_saved_goes_through_hooks_and_is_released() -> None:
    twin, _ = forced(nn.LSTM(3, 4, 2))
    x = torch.randn(50, 2, 3, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        saved = torch.autograd.grad(twin(x)[0].sum(), x)[0]
    close(saved, torch.autograd.grad(twin(x)[0].sum(), x)[0])
    y = twin(x)[0]
    node: Any = y.grad_fn
    assert not [t for t in leaves_of(node.kept) if isinstance(t, Tensor)]
    y.sum().backward()
    with pytest.raises(RuntimeError, match=r"second time|already been freed"):
        _ = node.saved_tensors


def leaves_of(value: Any) -> Iterator[Any]:
    """All entries of nested tuples, lists and dataclasses."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from leaves_of(each)
    elif hasattr(value, "__dict__"):
        yield from leaves_of(list(vars(value).values()))
    else:
        yield value


def test_checkpoints_compute_again() -> None:
    module = nn.LSTM(3, 4, 2, dropout=0.5)
    twin, _ = forced(module)
    x = torch.randn(5, 2, 3, requires_grad=True)

    def gradient(reentrant: bool, module: nn.RNNBase) -> Tensor:
        torch.manual_seed(2)
        y = torch.utils.checkpoint.checkpoint(lambda x: module(x)[0], x, use_reentrant=reentrant)
        x.grad = None
        y.square().sum().backward()
        return torch.as_tensor(x.grad)

    for reentrant in (False, True):
        close(gradient(reentrant, twin), gradient(reentrant, module))


def test_saved_values_are_taken_apart_and_put_together() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    tensors: list[Tensor | None] = [a]
    value = ([a, None], (b, a), 3)
    places = apart(value, tensors)
    assert [t is u for t, u in zip(tensors, (a, b), strict=True)] == [True, True]
    (first, none), (second, third), three = together(places, [b, a])
    assert first is b
    assert second is a
    assert third is b
    assert (none, three) == (None, 3)


class Marked(Tensor):
    """A subclass with torch's own handler."""


def left_to_torch() -> Iterator[tuple[str, Callable[[nn.RNNBase, Tensor], Any]]]:
    yield "float64", lambda m, x: copy.deepcopy(m).double()(x.double())[0]
    yield "subclass", lambda m, x: m(x.as_subclass(Marked))[0].as_subclass(Tensor)
    yield "torch.func", lambda m, x: torch.func.grad(lambda x: m(x)[0].sum())(x)
    yield "forward mode", lambda m, x: forward_mode(m, x)
    yield "autocast", lambda m, x: autocast(m, x)
    yield "compiled", lambda m, x: torch.compile(m, backend="eager")(x)[0]
    yield "traced", lambda m, x: torch.jit.trace(m, x, check_trace=False)(x)[0]


def forward_mode(module: nn.RNNBase, x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        y: Tensor = module(torch.autograd.forward_ad.make_dual(x, x))[0]
        return torch.autograd.forward_ad.unpack_dual(y).tangent.clone()  # type: ignore[no-any-return]


def autocast(module: nn.RNNBase, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y: Tensor = module(x)[0]
    return y


@pytest.mark.parametrize(("what", "call"), list(left_to_torch()), ids=lambda value: value if type(value) is str else "")
def test_what_is_left_to_torch_is_torchs(what: str, call: Any) -> None:
    module = nn.GRU(3, 4)
    twin, table = forced(module)
    x = torch.randn(5, 2, 3)
    with torch.no_grad():
        assert torch.equal(call(twin, x), call(module, x))
    assert not table.asked, what
    assert twin(x)[0].requires_grad
    assert len(table.asked) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((torch.ones(5, 2, 4),), "sizes that do not fit"),
        ((torch.ones(5, 2, 3), torch.ones(1, 2, 4)), "sizes that do not fit"),
        ((torch.ones(5, 2, 3), (torch.ones(1, 3, 4), torch.ones(1, 2, 4))), "sizes that do not fit"),
        ((torch.ones(5, 3), (torch.ones(1, 1, 4), torch.ones(1, 1, 4))), "sizes that do not fit"),
        ((torch.ones(5, 2, 3), (torch.ones(1, 2, 4), None)), "something else"),
        ((torch.ones(0, 2, 3),), "empty"),
        ((torch.ones(5, 2, 3, dtype=torch.bfloat16),), "several types"),
        ((7,), "something else"),
    ],
)
def test_what_torch_refuses_is_refused_by_torch(arguments: tuple[Any, ...], says: str) -> None:
    module = nn.LSTM(3, 4)
    twin, table = forced(module)
    reason = given_of(module, *arguments, *[None] * (2 - len(arguments)))
    assert isinstance(reason, str)
    assert says in reason
    with pytest.raises(Exception) as wanted:  # noqa: PT011 - torch's, whichever it is
        module(*arguments)
    with pytest.raises(type(wanted.value)) as raised:
        twin(*arguments)
    assert str(raised.value) == str(wanted.value)
    assert not table.asked


def test_an_empty_batch_is_torchs() -> None:
    module = nn.GRU(3, 4)
    twin, table = forced(module)
    x = torch.ones(5, 0, 3)
    assert [t.shape for t in flat(twin(x))] == [t.shape for t in flat(module(x))]
    assert not table.asked


def test_a_call_of_another_kind_is_looked_up() -> None:
    module = nn.GRU(3, 4)
    twin, table = forced(module)
    for shape in ((5, 2, 3), (3, 2, 3), (7, 3), (5, 2, 3)):
        x = torch.randn(shape)
        close(with_gradients(twin, x), with_gradients(module, x))
    assert len(table.asked) == 3
    for p in twin.parameters():
        p.requires_grad_(False)
    assert not twin(torch.randn(5, 2, 3))[0].requires_grad
    torch.use_deterministic_algorithms(True)
    try:
        twin(torch.randn(5, 2, 3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(table.asked) == 5
    call = describe(given_of(twin, torch.randn(5, 3), None))  # type: ignore[arg-type]
    assert call.shape == (5, 1, 3)
    assert call.needs == (False,)


def test_parameters_may_be_shared_replaced_and_swapped() -> None:
    module = nn.LSTM(4, 4, 2)
    module.weight_hh_l1 = module.weight_hh_l0
    twin, _ = forced(module)
    x = torch.randn(5, 2, 4)
    close(with_gradients(twin, x), with_gradients(module, x))
    other = {name: torch.randn_like(p) for name, p in module.named_parameters()}
    close(*(flat(torch.func.functional_call(each, other, (x,))) for each in (twin, module)))
    state = nn.LSTM(4, 4, 2).state_dict()
    for each in (twin, module):
        each.load_state_dict(state)
    close(with_gradients(twin, x), with_gradients(module, x))
    penalties = []
    for each in (twin, module):
        y = each(x)[0].square().sum()
        shared = each._flat_weights[1]
        (dw,) = torch.autograd.grad(y, shared, create_graph=True)  # type: ignore[arg-type]
        penalties.append(torch.autograd.grad(dw.square().sum(), shared)[0])  # type: ignore[arg-type]
    close(*penalties)


def test_two_threads_train_at_once() -> None:
    module = nn.LSTM(3, 8, 2)
    twin, _ = forced(module)
    inputs = [torch.randn(9, n, 3, requires_grad=True) for n in (1, 2, 3, 4)]
    want = [torch.autograd.grad(module(x)[0].square().sum(), x)[0] for x in inputs]
    got: dict[int, Tensor] = {}

    def work(first: int) -> None:
        for _ in range(5):
            for i in range(first, 4, 2):
                got[i] = torch.autograd.grad(twin(inputs[i])[0].square().sum(), inputs[i])[0]

    threads = [threading.Thread(target=work, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    close([got[i] for i in range(4)], want)


def test_16_bit_layers_are_planned() -> None:
    module = nn.GRU(3, 4, 2, dtype=torch.bfloat16)
    twin, table = forced(module)
    x = torch.randn(5, 2, 3, dtype=torch.bfloat16)
    torch.testing.assert_close(with_gradients(twin, x), with_gradients(module, x), rtol=0.1, atol=0.05)
    assert [p.dtype for p in table.asked] == ["bf16"]
