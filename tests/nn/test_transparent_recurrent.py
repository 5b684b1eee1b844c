"""Recurrent modules while planning is enabled: what is planned, what stays torch's, and that models do not mind."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tests.nn.recurrent_plans import CLASSES, close, drawn_projection, flat, with_gradients
from tests.sampling import some
from torch import Tensor, nn
from torch.nn.utils import rnn as sequences

import tilewise
from tilewise import solvers
from tilewise.nn.layers.kinds import is_planned
from tilewise.plan import Plan
from tilewise.planner import Options, Planner
from tilewise.problems.base import Problem

OWN = {name: getattr(torch._C._VariableFunctions, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}


class Stepping(Planner):
    """Plans recurrent layers by ``stepped``, and leaves all else to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: list[Problem] = []

    def plan(self, problem: Problem, options: Options | None = None) -> Plan:
        self.planned.append(problem)
        solver = solvers.get("stepped")
        if solver.why_not(problem):
            baseline = solvers.baseline(problem)
            return Plan(problem.key, baseline.name, baseline.version, time_ms=2.0)
        return Plan(problem.key, solver.name, solver.version, next(iter(solver.configs(problem))), time_ms=1.0)


@pytest.fixture(autouse=True)
def _puts_everything_back() -> Iterator[None]:
    yield
    tilewise.disable()
    assert all(getattr(torch._VF, name) is own for name, own in OWN.items())


def enabled(**options: Any) -> Any:
    return tilewise.enabled(**{"wait": True, "planner": Stepping(), **options})


@settings(max_examples=some(32), deadline=None)
@given(data=st.data())
def test_any_module_as_torch(data: st.DataObject) -> None:
    draw = data.draw
    kind = draw(st.sampled_from(CLASSES))
    options: dict[str, Any] = {name: draw(st.booleans(), name) for name in ("bias", "batch_first", "bidirectional")}
    if kind is nn.RNN:
        options["nonlinearity"] = draw(st.sampled_from(("tanh", "relu")))
    layers = draw(st.integers(1, 3))
    hidden = draw(st.integers(1, 5))
    options |= drawn_projection(draw, kind, hidden)
    module = kind(3, hidden, layers, dropout=0.5 if layers > 1 else 0.0, **options)
    module.train(draw(st.booleans(), "training"))
    x = torch.randn(*draw(st.sampled_from(((4, 2, 3), (4, 3), (1, 1, 3)))), requires_grad=draw(st.booleans(), "needs"))

    def called() -> list[Any]:
        torch.manual_seed(3)
        return with_gradients(module, x)

    want = called()
    with enabled() as session:
        for _ in range(3):
            close(called(), want)
        with torch.no_grad():
            for _ in range(2):
                flat(module(x))
    problems = [each.problem for _, _, each in session.report().passes()]
    assert [p.task for p in problems] == ["training", "inference"]
    assert all(layer.replaced for layer in session.report().layers)


@pytest.mark.parametrize("kind", CLASSES)
def test_packed_sequences_as_torch(kind: Any) -> None:
    module = kind(3, 4, 2, bidirectional=True)

    def called(lengths: list[int]) -> list[Tensor]:
        module.zero_grad()
        x = torch.randn(lengths[0], len(lengths), 3, generator=torch.Generator().manual_seed(1))
        packed, last = module(sequences.pack_padded_sequence(x, lengths))
        results = [packed.data, *(last if isinstance(last, tuple) else (last,))]
        sum(r.square().sum() for r in results).backward()
        return [*(r.detach() for r in results), *(p.grad.clone() for p in module.parameters())]

    batches = [[6, 3, 1], [6, 3, 2], [6, 4, 1]]
    want = [called(lengths) for lengths in batches]
    with enabled() as session:
        for _ in range(3):
            for lengths, wanted in zip(batches, want, strict=True):
                torch.testing.assert_close(called(lengths), wanted, rtol=1e-4, atol=1e-5)
    passes = [each for _, _, each in session.report().passes()]
    assert passes
    assert all(each.problem.packed and each.replaced for each in passes)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(6, 8, 2, batch_first=True)
        self.last = nn.GRU(8, 5, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.first(x)
        return self.last(self.first(y[..., :6], hx=state)[0])[0]  # type: ignore[no-any-return]


def stepped(model: nn.Module, x: Tensor) -> list[Any]:
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("wait", [True, False])
def test_a_model_that_knows_nothing_of_it(wait: bool) -> None:
    net, x = Net(), torch.randn(3, 4, 6)
    want = stepped(net, x)
    with enabled(wait=wait) as session:
        for _ in range(3):
            close(stepped(net, x), want)
        session.wait()
        close(stepped(net, x), want)
    assert {layer.name for layer in session.report().layers if layer.replaced} == {
        "lstm:t4n3i6h8l2",
        "gru:t3n4i8h5d2",
    }
    assert not is_planned(net.first)
    assert all(torch.equal(a, b) for a, b in zip(stepped(net, x), want, strict=True))


def test_every_length_is_planned_few_times() -> None:
    module, planner = nn.GRU(3, 4), Stepping()
    with enabled(planner=planner) as session, torch.no_grad():
        for time in (*range(20, 60), 21):
            x = torch.randn(time, 2, 3)
            close(flat(module(x)), flat(copy.copy(module)(x)))
            close(flat(module(x)), list(OWN["gru"](x, torch.zeros(1, 2, 4), module._flat_weights, *torchs(module))))
    assert 4 <= len(planner.planned) <= 6
    assert not [layer.reason for layer in session.report().layers if layer.reason]


def torchs(module: nn.RNNBase) -> tuple[Any, ...]:
    """torch's further arguments."""
    return module.bias, module.num_layers, module.dropout, module.training, module.bidirectional, module.batch_first


def test_what_stood_there_comes_back_and_a_kept_name_is_torchs() -> None:
    module, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    hx = (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    with enabled() as session:
        kept = torch._VF.lstm  # type: ignore[attr-defined]
        assert kept is not OWN["lstm"]
        assert kept.__doc__ == OWN["lstm"].__doc__
        for _ in range(2):
            module(x)
    assert session.report().layers[0].replaced
    want = OWN["lstm"](x, hx, module._flat_weights, *torchs(module))
    for got in (
        kept(x, hx, module._flat_weights, *torchs(module)),
        torch._VF.lstm(x, hx, module._flat_weights, *torchs(module)),
    ):  # type: ignore[attr-defined]
        assert all(map(torch.equal, got, want))


def test_what_others_put_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*_: Any) -> Any:
        return torch.zeros(1), torch.zeros(1)

    with monkeypatch.context() as patch:
        patch.setattr(torch._VF, "gru", theirs)
        with pytest.warns(UserWarning, match=r"torch\._VF\.gru is not torch's own"), tilewise.enabled():
            assert nn.GRU(3, 4)(torch.ones(2, 1, 3))[0].shape == (1,)
        assert torch._VF.gru is theirs  # type: ignore[attr-defined]


def torchs_own() -> Iterator[tuple[str, nn.RNNBase, Any, Any]]:
    x = torch.randn(5, 2, 3)
    yield "float64", nn.GRU(3, 4, dtype=torch.float64), x.double(), None


@pytest.mark.parametrize(("says", "module", "x", "hx"), list(torchs_own()), ids=range(1))
def test_what_is_left_to_torch_is_reported(says: str, module: nn.RNNBase, x: Any, hx: Any) -> None:
    want = module(x, hx)
    planner = Stepping()
    with enabled(planner=planner) as session:
        for _ in range(3):
            got = module(x, hx)
    assert torch.equal(getattr(got[0], "data", got[0]), getattr(want[0], "data", want[0]))
    assert not planner.planned
    assert any(says in layer.reason for layer in session.report().layers)


def test_under_a_memory_limit_they_are_torchs() -> None:
    module, planner = nn.GRU(3, 4), Stepping()
    with enabled(planner=planner, workspace="64MiB") as session:
        for _ in range(3):
            module(torch.ones(5, 2, 3))
    assert not planner.planned
    assert [layer.reason for layer in session.report().layers] == ["is planned without memory limits alone"]


def test_what_torch_refuses_is_refused_by_torch() -> None:
    function: Any = torch._C._VariableFunctions.gru
    with enabled():
        for arguments in ((torch.ones(5, 2, 3),), (torch.ones(5, 2, 3), torch.ones(1, 2, 4), []), (1, 2, 3)):
            with pytest.raises(Exception) as wanted:  # noqa: PT011 - torch's, whichever it is
                function(*arguments)
            with pytest.raises(type(wanted.value)):
                torch._VF.gru(*arguments)  # type: ignore[attr-defined]


def test_optimized_modules_run_by_their_own_plans() -> None:
    net, x = nn.GRU(3, 4), torch.randn(5, 2, 3)
    with enabled() as session:
        tilewise.optimize(net, x, planner=Stepping(), goal="passes", rigor="estimate")
        assert is_planned(net)
        for _ in range(3):
            net(x)
    assert not any(layer.replaced for layer in session.report().layers)


def test_a_compiled_model_has_torchs_layer() -> None:
    net, x = nn.Sequential(nn.GRU(3, 4)), torch.randn(5, 2, 3)
    with enabled():
        for _ in range(3):
            net(x)
        torch._dynamo.reset()
        close(flat(torch.compile(net, backend="eager")(x)), flat(net(x)))


def test_functions_are_pickled_by_name() -> None:
    with enabled():
        assert isinstance(torch._VF.gru, types.FunctionType)  # type: ignore[attr-defined]
        assert pickle.loads(pickle.dumps(nn.GRU(3, 4)))(torch.ones(2, 1, 3))[0].shape == (2, 1, 4)
