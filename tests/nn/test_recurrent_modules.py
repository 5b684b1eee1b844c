"""Recurrent modules by plans: results, gradients, options, what is left to torch, copies, schedules, reports."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import rnn as sequences

import tilewise
from tilewise.nn.layers.kinds import is_planned, kind_of, run_by_plans
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.recurrent.call import describe, given_of
from tilewise.nn.layers.recurrent.layer import RecurrentLayer
from tilewise.nn.layers.recurrent.saved import apart, together
from tilewise.nn.layers.swaps import swap_back
from tilewise.plan import Config, Plan
from tilewise.planner import Options, Planner
from tilewise.problems.base import Problem
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers import get
from tilewise.wisdom import Wisdom

CLASSES: tuple[Any, ...] = (nn.LSTM, nn.GRU, nn.RNN)


class Forced(PlanTable):
    """A table whose plans are ``stepped``, or torch's own choice where ``solver`` says so."""

    def __init__(self, solver: str = "stepped") -> None:
        super().__init__(Options(), "plan")
        self.solver, self.asked = solver, list[Problem]()

    def plan(self, problems: Any, deterministic: bool) -> None:
        for p in self.missing(problems, deterministic):
            self.asked.append(p)
            self.learn(p, deterministic, Plan(p.key, self.solver, get(self.solver).version, Config()))


def forced(module: nn.RNNBase) -> tuple[nn.RNNBase, Forced]:
    """A copy of ``module`` that runs by plans."""
    twin, table = copy.deepcopy(module), Forced()
    run_by_plans(twin, RecurrentLayer(table))
    return twin, table


def flat(result: Any) -> list[Tensor]:
    """y and the last states."""
    y, last = result
    return [y, *(last if isinstance(last, tuple) else (last,))]


def with_gradients(module: nn.RNNBase, x: Tensor, hx: Any = None, used: Sequence[int] = (0, 1, 2)) -> list[Any]:
    """The results of a call, and the gradient of all that needs one, of a sum over the results that are ``used``."""
    module.zero_grad()
    states = [] if hx is None else list(hx) if isinstance(hx, tuple) else [hx]
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in (x, *states)]
    given: Any = None if hx is None else tuple(leaves[1:]) if isinstance(hx, tuple) else leaves[1]
    results = flat(module(leaves[0], given))
    loss = sum(
        (r * torch.linspace(-1, 1, r.numel(), dtype=r.dtype).view(r.shape)).sum()
        for i, r in enumerate(results)
        if i in used
    )
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    gradients = [t.grad for t in (*leaves, *module.parameters())]
    return [*(r.detach() for r in results), *(None if g is None else g.clone() for g in gradients)]


def close(got: Any, want: Any) -> None:
    """Results of the same call agree, in their strides as well."""
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, check_stride=True)


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
    module: nn.RNNBase = kind(draw(st.integers(1, 6), "inputs"), draw(st.integers(1, 9), "hidden"), **options)
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
    state = (module.num_layers * (2 if module.bidirectional else 1), *((batch,) if batched else ()), module.hidden_size)
    states = tuple(torch.randn(state).requires_grad_(needs) for _ in range(2))
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
@pytest.mark.parametrize("kind", CLASSES)
def test_gradients_of_gradients_are_torchs(kind: Any, dropout: float) -> None:
    module = kind(3, 4, 2, dropout=dropout)
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
        return torch.autograd.grad(y.square().sum(), x)[0] if not reentrant else leaf_gradient(y)

    def leaf_gradient(y: Tensor) -> Tensor:
        x.grad = None
        y.square().sum().backward()
        assert x.grad is not None
        return x.grad

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
    yield "packed", lambda m, x: m(sequences.pack_padded_sequence(x, [5, 3]))[0].data
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
        return torch.autograd.forward_ad.unpack_dual(y).tangent.clone()  # type: ignore[no-any-return, no-untyped-call]


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
        (dw,) = torch.autograd.grad(y, each.weight_hh_l0, create_graph=True)
        penalties.append(torch.autograd.grad(dw.square().sum(), each.weight_hh_l0)[0])
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


class Net(nn.Module):
    """A layer that is called twice, and one that has no plan's class."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(6, 8, 2, batch_first=True)
        self.last = nn.GRU(8, 5, bidirectional=True)
        self.projected = nn.LSTM(10, 6, proj_size=3)

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.first(x)
        y, _ = self.first(x.flip(1), hx=state)
        return self.projected(self.last(y)[0])[0]  # type: ignore[no-any-return]


def optimized(model: nn.Module, x: Any, folder: Path, **options: Any) -> nn.Module:
    """By ``stepped``: torch's own choice is excluded, and nothing is measured."""
    planner = Planner(Wisdom(folder / "wisdom.sqlite3"))
    others = tuple(name for name in ("aten_rnn",) if name not in options.get("keep", ()))
    chosen = {"goal": "passes", "rigor": "estimate", "exclude": others, **options}
    return tilewise.optimize(model, x, planner=planner, **chosen)


def stepped(model: nn.Module, x: Tensor) -> list[Any]:
    """A training step: loss and gradients."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters())]


def test_a_model_is_planned_reported_copied_and_restored(tmp_path: Path) -> None:
    net, x = Net(), torch.randn(3, 4, 6)
    want, state = stepped(net, x), net.state_dict()
    optimized(net, x, tmp_path)
    assert is_planned(net.first)
    assert is_planned(net.last)
    assert not is_planned(net.projected)
    close(stepped(net, x), want)
    report = tilewise.nn.report(net)
    layers = {layer.name: layer for layer in report.layers}
    assert [each.role for each in layers["first"].passes()] == ["forward"]
    assert {each.problem.task for each in layers["first"].passes()} == {"training"}
    assert layers["first"].calls[0].shape == (4, 3, 6)
    assert "proj_size=3" in layers["projected"].reason
    assert "stepped" in str(report)
    assert list(net.state_dict()) == list(state)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        close(stepped(twin, x), want)
        twin.load_state_dict(Net().state_dict())
        plain = tilewise.restore(copy.deepcopy(twin))
        close(stepped(twin, x), stepped(plain, x))
        close(stepped(net, x), want)
    assert is_planned(copy.deepcopy(net).first)
    with torch.no_grad():
        close(net(x), tilewise.restore(copy.deepcopy(net))(x))
    tilewise.restore(net)
    assert "forward" not in vars(net.first)
    assert all(torch.equal(a, b) for a, b in zip(stepped(net, x), want, strict=True))


def test_a_model_for_inference_is_planned(tmp_path: Path) -> None:
    net, x = Net().eval(), torch.randn(3, 4, 6)
    optimized(net, x, tmp_path, training=False)
    layers = {layer.name: layer for layer in tilewise.nn.report(net).layers}
    assert {each.problem.task for each in layers["first"].passes()} == {"inference"}
    with torch.no_grad():
        close(net(x), tilewise.restore(copy.deepcopy(net))(x))


def test_other_calls_are_torchs_where_nothing_is_planned_later(tmp_path: Path) -> None:
    net, x = nn.LSTM(6, 8), torch.randn(4, 3, 6)
    optimized(net, x, tmp_path, unplanned="torch")
    plain = tilewise.restore(copy.deepcopy(net))
    assert is_planned(net)
    for other in (torch.randn(5, 3, 6), torch.randn(4, 6)):
        assert all(torch.equal(a, b) for a, b in zip(flat(net(other)), flat(plain(other)), strict=True))
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(flat(net(x)), flat(plain(x)), strict=True))


def test_where_torch_wins_a_module_stays_as_it_was(tmp_path: Path) -> None:
    net = nn.LSTM(6, 8)
    before = dict(vars(net))
    optimized(net, torch.randn(4, 3, 6), tmp_path, exclude=("stepped",))
    assert vars(net) == before
    (layer,) = tilewise.nn.report(net).layers
    assert not layer.replaced
    assert not layer.reason


@pytest.mark.parametrize("limit", [{"workspace": "64MiB"}, {"total_workspace": "64MiB"}])
def test_under_a_memory_limit_they_are_torchs(limit: dict[str, str], tmp_path: Path) -> None:
    net, x = nn.Sequential(nn.Conv1d(3, 4, 1), nn.LSTM(5, 2)), torch.randn(2, 3, 5)
    optimized(net, x, tmp_path, exclude=(), **limit)
    layers = {layer.name: layer for layer in tilewise.nn.report(net).layers}
    assert layers["1"].reason == "is planned without memory limits alone"
    assert not layers["0"].reason


def test_a_schedule_is_followed(tmp_path: Path) -> None:
    net, x = Net(), torch.randn(3, 4, 6)
    optimized(net, x, tmp_path)
    tilewise.nn.schedule(net).save(tmp_path / "schedule.json")
    tilewise.restore(net)
    want = stepped(net, x)
    planner = Planner(Wisdom(tmp_path / "other.sqlite3"))
    tilewise.optimize(net, x, planner=planner, schedule=tmp_path / "schedule.json", goal="passes")
    assert is_planned(net.first)
    assert not [each.note for layer in tilewise.nn.report(net).layers for each in layer.passes() if each.note]
    close(stepped(net, x), want)


def test_plans_are_taken_back(tmp_path: Path) -> None:
    net, x = nn.LSTM(6, 8), torch.randn(4, 3, 6)
    optimized(net, x, tmp_path)
    layers = net.forward.__func__._tilewise_planned  # type: ignore[attr-defined]
    run = layers.resolve(describe(given_of(net, x, None)))  # type: ignore[arg-type]
    assert run.planned
    layers.plan_table.withhold([(run.problem, False)], "taken back")
    layers.forget()
    assert torch.equal(net(x)[0], tilewise.restore(copy.deepcopy(net))(x)[0])


@pytest.mark.parametrize("kind", CLASSES)
def test_what_was_changed_is_left_alone(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = kind(3, 4)
    known = kind_of(module)
    assert known is not None
    assert not known.obstacle(module)
    derived = type("Derived", (kind,), {})(3, 4)
    assert "Derived" in known.obstacle(derived)
    module.forward = lambda x: x
    assert "forward set on the instance" in known.obstacle(module)
    del module.forward
    twin, table = forced(module)
    monkeypatch.setattr(kind, "forward", lambda self, input, hx=None: "changed")
    assert "not torch's own" in known.obstacle(module)
    assert twin(torch.ones(2, 1, 3)) == "changed"
    assert not table.asked
    swap_back(twin)


def test_calls_of_reasons_are_reported(tmp_path: Path) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.rnn(sequences.pack_padded_sequence(x, [5, 3]))[0].data
            return y

    net = Packed()
    optimized(net, torch.randn(5, 2, 3), tmp_path)
    assert "packed sequence" in tilewise.nn.report(net).layers[0].reason


def test_hooks_see_the_planned_result(tmp_path: Path) -> None:
    net, x, seen = nn.GRU(6, 8), torch.randn(4, 3, 6), []
    optimized(net, x, tmp_path)
    net.register_forward_hook(lambda module, args, result: seen.append(result[0].shape))
    net(x)
    assert seen == [(4, 3, 8)]
