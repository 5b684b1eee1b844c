"""Planned recurrent modules under torch.compile and torch.export, and the operators behind them."""

from __future__ import annotations

import copy
import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nn.fresh_dynamo import fresh_dynamo as fresh_dynamo
from tests.nn.recurrent_plans import CLASSES, close, drawn_projection, flat, forced, with_gradients
from tests.sampling import EVERY, some
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise.machine.torch_state import fp32_precision
from tilewise.nn.layers.kinds import is_planned
from tilewise.nn.layers.recurrent import by_torch
from tilewise.nn.layers.recurrent.dynamo import _OnceImported
from tilewise.planner import Planner
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers import get
from tilewise.wisdom import Wisdom

COMPILER = pytest.mark.skipif(not EVERY or shutil.which("g++") is None, reason="compiles C++ for half a minute")
NUMBA = not get("resident_rnn").why_not(RecurrentProblem("lstm", 1, 1, 1, 1))


class Net(nn.Module):
    """A recurrent module in the middle of a model."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.first, self.rnn = nn.Linear(3, 3), rnn

    def forward(self, x: Tensor, hx: Any = None) -> Any:
        y, last = self.rnn(torch.relu(self.first(x)), hx)
        return y.square(), last


class Graphs:
    """A backend that counts the operators of its graphs, and runs them as they are or by AOTAutograd."""

    def __init__(self, backend: str = "eager") -> None:
        self._backend = torch._dynamo.lookup_backend(backend)
        self.operators: list[tuple[int, int]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        code = str(graph.code)
        self.operators.append((code.count("torch.ops.tilewise.rnn("), code.count("torch.ops.tilewise.rnn_by_torch(")))
        return self._backend(graph, inputs)


def nets(module: nn.RNNBase, solver: str = "stepped") -> tuple[Net, Net]:
    """A model that runs by plans, and torch's with the same parameters."""
    want = Net(module)
    got = Net(forced(module, solver)[0])
    got.first.load_state_dict(want.first.state_dict())
    return got, want


def in_turn(model: nn.Module, x: Tensor, hx: Any = None) -> list[Any]:
    """Results and gradients of a call, with the same random numbers each time."""
    torch.manual_seed(3)
    return with_gradients(model, x, hx)  # type: ignore[arg-type]


@pytest.mark.parametrize("projection", [0, 2])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=COMPILER)])
def test_a_training_step_is_one_graph(backend: str, projection: int) -> None:
    kind = nn.GRU if backend == "inductor" and not projection else nn.LSTM
    options: dict[str, Any] = {"proj_size": projection} if projection else {}
    module = kind(3, 5, 2, batch_first=True, bidirectional=True, **options)
    got, want = nets(module, "resident_rnn" if NUMBA else "stepped")
    x = torch.randn(4, 6, 3, requires_grad=True)
    got(x)
    graphs = Graphs(backend)
    compiled = torch.compile(got, fullgraph=True, backend=graphs)
    for _ in range(2):
        close(in_turn(compiled, x), in_turn(want, x))
    assert graphs.operators == [(1, 0)]
    with torch.no_grad():
        got(x)
        torch._dynamo.reset()
        close(flat(compiled(x)), flat(want(x)))
    assert graphs.operators[1:] == [(1, 0)]


@settings(max_examples=some(24), deadline=None)
@given(data=st.data())
def test_every_option_compiles(data: st.DataObject) -> None:
    torch._dynamo.reset()
    draw = data.draw
    kind = draw(st.sampled_from(CLASSES))
    options: dict[str, Any] = {name: draw(st.booleans(), name) for name in ("bias", "batch_first", "bidirectional")}
    hidden = draw(st.integers(1, 5))
    options |= drawn_projection(draw, kind, hidden)
    module = kind(3, hidden, draw(st.integers(1, 3)), dropout=draw(st.sampled_from((0.0, 0.5))), **options)
    got, want = nets(module)
    time, batch, batched = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.booleans(), "batched")
    shape = ((batch, time) if module.batch_first else (time, batch)) if batched else (time,)
    x = torch.randn(*shape, 3, requires_grad=draw(st.booleans(), "input's gradient"))
    hx: Any = None
    if draw(st.booleans(), "states"):
        rows = module.num_layers * (2 if module.bidirectional else 1)
        widths = module.proj_size or module.hidden_size, module.hidden_size
        states = [torch.randn(rows, *([batch] if batched else []), width) for width in widths]
        hx = tuple(states) if kind is nn.LSTM else states[0]
    planned = draw(st.booleans(), "planned")
    if planned:
        got(x, hx)
    graphs = Graphs("aot_eager")
    compiled = torch.compile(got, fullgraph=True, backend=graphs, dynamic=False)
    close(in_turn(compiled, x, hx), in_turn(want, x, hx))
    assert graphs.operators == [(1, 0) if planned else (0, 1)]


def test_other_shapes_are_torchs_operator_and_nothing_is_planned() -> None:
    module = nn.GRU(3, 5)
    twin, table = forced(module)
    x = torch.randn(4, 2, 3, requires_grad=True)
    twin(x)
    graphs = Graphs("aot_eager")
    compiled = torch.compile(twin, fullgraph=True, backend=graphs)
    for shape in ((4, 2, 3), (5, 2, 3), (6, 2, 3), (7, 2, 3), (4, 2, 3)):
        other = torch.randn(shape, requires_grad=True)
        close(with_gradients(compiled, other), with_gradients(module, other))  # type: ignore[arg-type]
    assert len(table.asked) == 1
    assert graphs.operators[0] == (1, 0)
    assert set(graphs.operators[1:]) == {(0, 1)}
    assert len(graphs.operators) <= 3  # the third is of any length


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_torchs_operator_computes_once_and_again_where_its_graph_is_lost(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[None] = []
    own = by_torch.ByTorch.gradients
    monkeypatch.setattr(by_torch.ByTorch, "gradients", lambda *a: again.append(None) or own(*a))  # type: ignore[func-returns-value]
    got, want = nets(nn.LSTM(3, 5, 2, dropout=dropout))
    x = torch.randn(4, 2, 3, requires_grad=True)
    compiled = torch.compile(got, fullgraph=True, backend="aot_eager")
    close(in_turn(compiled, x), in_turn(want, x))
    assert not again
    compiled = torch.compile(got, fullgraph=True, backend="eager")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        close(in_turn(compiled, x), in_turn(want, x))
    assert again


@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN])
def test_under_autocast(kind: Any) -> None:
    class Casting(Net):
        def forward(self, x: Tensor, hx: Any = None) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x, hx)

    module = kind(3, 5)
    got, want = Casting(forced(module)[0]), Casting(module)
    got.first.load_state_dict(want.first.state_dict())
    x = torch.randn(4, 2, 3, requires_grad=True)
    graphs = Graphs("aot_eager")
    compiled = torch.compile(got, fullgraph=True, backend=graphs)
    for planned in (False, True):
        if planned:
            got(x)
            torch._dynamo.reset()
        for one, other in zip(in_turn(compiled, x), in_turn(want, x), strict=True):
            torch.testing.assert_close(one, other, rtol=0.1, atol=0.1)
    assert graphs.operators == [(0, 1), (1, 0)]


def test_gradients_of_gradients_are_torchs() -> None:
    found = []
    for each in nets(nn.GRU(3, 5)):
        x = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
        each(x)
        compiled = torch.compile(each, backend="eager", fullgraph=is_planned(each.rnn))
        (dx,) = torch.autograd.grad(compiled(x)[0].sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), each.rnn.weight_hh_l0)[0])
    close(*found)


@pytest.mark.parametrize("planned", [False, True])
def test_operators_keep_torchs_contract(planned: bool) -> None:
    module = nn.LSTM(3, 4, 2, bidirectional=True)
    twin, _ = forced(module)
    twin(torch.randn(5, 2, 3))
    (known,) = twin.forward.__func__._tilewise_planned.known  # type: ignore[attr-defined]
    x, h0, c0 = torch.randn(5, 2, 3), torch.randn(4, 2, 4), torch.randn(4, 2, 4)
    weights = [w.detach().clone().requires_grad_() for w in module.parameters()]
    if planned:
        torch.library.opcheck(torch.ops.tilewise.rnn, (x, h0, c0, weights, known.plans, 0.0))
    else:
        torch.library.opcheck(torch.ops.tilewise.rnn_by_torch, (x, h0, c0, weights, "lstm", True, 2, 2, 0.0, True))


def test_what_is_not_planned_breaks_the_graph_as_before() -> None:
    forced(nn.GRU(3, 4))
    compiled = torch.compile(nn.GRU(3, 4), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="RNN, GRU, or LSTM"):
        compiled(torch.randn(5, 2, 3))


def test_a_module_that_torch_computes_faster_is_one_graph_until_it_is_restored(tmp_path: Path) -> None:
    net, x = nn.Sequential(nn.LSTM(3, 4)), torch.randn(5, 2, 3)
    want = copy.deepcopy(net)
    planner = Planner(Wisdom(tmp_path / "wisdom.sqlite3"))
    others = tuple(name for name in ("stepped", "resident_rnn", "persistent_grid"))
    tilewise.optimize(net, x, planner=planner, goal="passes", rigor="estimate", exclude=others)
    before = dict(vars(net[0]))
    assert not is_planned(net[0])
    torch.compile(net, backend="eager")(x)
    assert vars(net[0]) == before
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = torch.compile(net, fullgraph=True, backend=graphs)
    close(flat(compiled(x)), flat(want(x)))
    close(flat(net(x)), flat(want(x)))
    assert graphs.operators == [(0, 1)]
    tilewise.restore(net)
    assert vars(net[0]) == before
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="RNN, GRU, or LSTM"):
        torch.compile(net, fullgraph=True, backend="eager")(x)


def test_a_module_that_was_changed_is_not_traced_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    twin, _ = forced(nn.GRU(3, 4))
    twin(torch.randn(5, 2, 3))
    monkeypatch.setattr(nn.GRU, "forward", lambda self, input, hx=None: input + 1)
    x = torch.randn(5, 2, 3)
    assert torch.equal(torch.compile(twin, backend="eager")(x), x + 1)


def test_what_a_graph_names_must_be_there_and_fit() -> None:
    x, h0 = torch.zeros(5, 2, 3), torch.zeros(1, 2, 4)
    weights = [w.detach() for w in nn.GRU(3, 4).parameters()]
    with pytest.raises(RuntimeError, match="'nothing' are not known"):
        torch.ops.tilewise.rnn(x, h0, None, weights, "nothing", 0.0)
    twin, _ = forced(nn.GRU(3, 4))
    twin(x)
    (known,) = twin.forward.__func__._tilewise_planned.known  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="not for tensors of"):
        torch.ops.tilewise.rnn(x[:4], h0, None, weights, known.plans, 0.0)
    elsewhere = [t.to("meta") for t in (x, h0, *weights)]
    with pytest.raises(RuntimeError, match=r"on cpu, not for tensors of .* on meta"):
        torch.ops.tilewise.rnn(*elsewhere[:2], None, elsewhere[2:], known.plans, 0.0)


def test_a_checkpoint_within_a_graph() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor, hx: Any = None) -> Any:
            return checkpoint(super().forward, x, hx, use_reentrant=False)

    module = nn.LSTM(3, 5, 2, dropout=0.5)
    got, want = Checkpointed(forced(module)[0]), Checkpointed(module)
    got.first.load_state_dict(want.first.state_dict())
    x = torch.randn(4, 2, 3, requires_grad=True)
    got(x)
    compiled = torch.compile(got, fullgraph=True, backend="aot_eager")
    close(in_turn(compiled, x), in_turn(want, x))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_on_a_gpu(kind: Any, planned: bool) -> None:
    with fp32_precision("cuda", "rnn", "ieee"), fp32_precision("cuda", "matmul", "ieee"):
        module = kind(24, 48, 2, bidirectional=True).cuda()
        twin, _ = forced(module, "persistent_grid")
        x = torch.randn(5, 7, 24, device="cuda", requires_grad=True)
        if planned:
            twin(x)
        graphs = Graphs("aot_eager")
        compiled = torch.compile(twin, fullgraph=True, backend=graphs)
        for _ in range(2):
            got, want = with_gradients(compiled, x), with_gradients(module, x)  # type: ignore[arg-type]
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
        assert graphs.operators == [(1, 0) if planned else (0, 1)]
    if planned:
        with fp32_precision("cuda", "rnn", "tf32"), pytest.raises(RuntimeError, match=r"torch\.compiler\.reset"):
            compiled(x)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_an_exported_program_has_torchs_layer(kind: Any) -> None:
    module, x = kind(3, 4), torch.randn(5, 2, 3)
    twin, _ = forced(module)
    twin(x)
    program = torch.export.export(twin, (x,))
    names = [str(node.target) for node in program.graph.nodes]
    assert any(name.startswith(f"aten.{kind.__name__.lower()}") for name in names)
    assert not any("tilewise" in name for name in names)
    close(flat(program.module()(x)), flat(module(x)))


def test_what_waits_for_an_import_is_called_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_late.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[int] = []
    finder = _OnceImported("imported_late", lambda module: seen.append(module.value))
    sys.meta_path.insert(0, finder)
    module = importlib.import_module("imported_late")
    assert seen == [7]
    assert finder not in sys.meta_path
    importlib.reload(module)
    assert seen == [7]
    monkeypatch.delitem(sys.modules, "imported_late")
