"""Linear layers while planning is enabled: what is planned, what stays torch's, and that models do not mind."""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from tests.nn.product_plans import Thin
from tests.sampling import some
from torch import nn

import tilewise
from tilewise.nn.layers.kinds import is_planned
from tilewise.planner import Planner
from tilewise.wisdom import Wisdom

TORCHS_OWN = torch._C._nn.linear


@pytest.fixture(autouse=True)
def _puts_everything_back() -> Iterator[None]:
    yield
    tilewise.disable()
    assert F.linear is TORCHS_OWN


def planned(y: torch.Tensor) -> bool:
    return type(y.grad_fn).__name__.startswith("PlannedLinear")


def with_gradients(function: Callable[..., torch.Tensor], tensors: Any) -> list[torch.Tensor]:
    """The result of ``function``, and the gradient of each tensor that needs one."""
    y = function(*tensors)
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y.detach(), *(torch.autograd.grad(y, wanted, dy) if wanted else ())]


def operands(rows: int = 3, into: int = 24, outputs: int = 33) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape, requires_grad=True) for shape in ((rows, into), (outputs, into), (outputs,)))


@settings(max_examples=some(40), deadline=None)
@given(
    leading=st.lists(st.integers(1, 5), max_size=2),
    into=st.integers(1, 40),
    outputs=st.integers(1, 40),
    bias=st.booleans(),
    needs=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_any_layer_as_torch(
    leading: list[int], into: int, outputs: int, bias: bool, needs: tuple[bool, bool, bool]
) -> None:
    shapes = ((*leading, into), (outputs, into), *([(outputs,)] if bias else []))
    tensors = [torch.randn(shape).requires_grad_(need) for shape, need in zip(shapes, needs, strict=False)]
    want = with_gradients(TORCHS_OWN, [t.detach().double().requires_grad_(t.requires_grad) for t in tensors])
    first = with_gradients(TORCHS_OWN, tensors)
    with tilewise.enabled(wait=True, planner=Thin()) as session:
        assert all(map(torch.equal, with_gradients(F.linear, tensors), first))  # the first call is torch's
        for _ in range(2):
            got = with_gradients(F.linear, tensors)
            for mine, its in zip(got, want, strict=True):
                torch.testing.assert_close(mine.double(), its, rtol=1e-4, atol=1e-4)
    roles = ["forward", *(["grad_input"] if needs[0] else []), *(["grad_weight"] if needs[1] else [])]
    assert [one.role for _, _, one in session.report().passes()] == roles


class Transformer(nn.Module):
    """A block with attention, whose ``out_proj`` is a weight that is never called as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.first = nn.Linear(32, 48)
        self.last = nn.Linear(48, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.last(torch.relu(self.first(x)))


def test_modules_and_attention_are_planned() -> None:
    torch.manual_seed(0)
    model, x = Transformer(), torch.randn(2, 5, 32)

    def stepped(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        module.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in module.parameters())]

    plain = pickle.loads(pickle.dumps(model)).double()
    want = stepped(plain, x.double())
    with tilewise.enabled(wait=True, planner=Thin()) as session:
        for _ in range(3):
            for mine, its in zip(stepped(model, x), want, strict=True):
                torch.testing.assert_close(mine.double(), its, rtol=1e-4, atol=1e-5)
    forwards = {layer.name: layer.replaced for layer in session.report().layers}
    assert forwards == {
        "10x32:32x96": True,  # the three inputs of attention at once
        "10x32:32x32": True,  # its out_proj
        "10x32:32x48": True,
        "10x48:48x32": True,
    }


def test_what_stood_there_comes_back_and_a_kept_name_is_torchs() -> None:
    x, w, b = operands()
    with tilewise.enabled(wait=True, planner=Thin()):
        kept = F.linear
        assert kept is not TORCHS_OWN
        assert kept.__doc__ == TORCHS_OWN.__doc__
        F.linear(x, w, b)
        assert planned(F.linear(input=x, weight=w, bias=b))
        assert pickle.loads(pickle.dumps(kept)) is kept
    assert F.linear is TORCHS_OWN
    assert not planned(kept(x, w, b))
    assert not planned(kept(x, w))


def test_what_others_put_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*_: Any) -> torch.Tensor:
        return torch.zeros(1)

    with monkeypatch.context() as patch:
        patch.setattr(F, "linear", theirs)
        with pytest.warns(UserWarning, match=r"functional\.linear is not torch's own"), tilewise.enabled():
            assert nn.Linear(3, 4)(torch.ones(2, 3)).shape == (1,)
        assert F.linear is theirs


def test_one_weight_used_with_several_inputs_and_by_other_functions() -> None:
    _, w, b = operands(into=24, outputs=33)
    shapes = [(n, 24) for n in range(1, 12)]
    with tilewise.enabled(wait=True, planner=Thin()) as session:
        for _ in range(3):
            for shape in shapes:
                x = torch.randn(shape)
                torch.testing.assert_close(F.linear(x, w, b), TORCHS_OWN(x, w, b), rtol=1e-4, atol=1e-4)
            F.conv1d(torch.randn(2, 24, 5), w[..., None])
    assert len(session.sites) < 12
    assert sum(layer.replaced for layer in session.report().layers) >= len(shapes) - 1


def test_layers_whose_shapes_keep_changing_are_left_to_torch() -> None:
    _, w, b = operands()

    def call_often() -> None:
        for rows in range(1, 40):
            F.linear(torch.randn(rows, 24), w, b)

    with tilewise.enabled(wait=True, planner=Thin()) as session, pytest.warns(UserWarning, match="keep changing"):
        call_often()
    assert any("keep changing" in layer.reason for layer in session.report().layers)


def test_under_a_memory_limit_they_are_torchs() -> None:
    x, w, b = operands()
    planner = Thin()
    with tilewise.enabled(wait=True, planner=planner, workspace="64MiB") as session:
        for _ in range(12):
            assert not planned(F.linear(x, w, b))
    assert not planner.planned
    (layer,) = session.report().layers
    assert layer.reason == "is planned without memory limits alone"


def test_what_is_left_to_torch_is_right_and_has_a_reason() -> None:
    x, w, b = operands()
    planner = Thin()

    class Tagged(torch.Tensor):
        pass

    with tilewise.enabled(wait=True, planner=planner) as session:
        for _ in range(3):
            assert F.linear(x.double(), w.double()).dtype is torch.float64
            assert type(F.linear(x.detach().as_subclass(Tagged), w, b)) is Tagged
            assert F.linear(torch.empty(3, 24, device="meta"), w.to("meta")).shape == (3, 33)
            rows = torch.func.vmap(lambda row: F.linear(row, w, b))(x)
            torch.testing.assert_close(rows, TORCHS_OWN(x, w, b))
            graph = torch.fx.symbolic_trace(lambda x: F.linear(x, w, b)).graph
            assert any(node.target is TORCHS_OWN for node in graph.nodes)
        for wrong in ((None, w), (x, None), (x, w[:, :3]), (x, w, b[:2]), (x, w, 3)):
            with pytest.raises((RuntimeError, TypeError)) as ours:
                F.linear(*wrong)
            with pytest.raises((RuntimeError, TypeError)) as theirs:
                TORCHS_OWN(*wrong)
            assert str(ours.value) == str(theirs.value)
    assert not planner.planned
    reasons = " ".join(layer.reason for layer in session.report().layers)
    assert "float64" in reasons
    assert "class of its own" in reasons
    assert "torch.func" in reasons


def test_an_optimized_module_runs_by_its_own_plans(tmp_path: Any) -> None:
    model, x = nn.Sequential(nn.Linear(24, 33), nn.Linear(33, 24)), torch.randn(3, 24)
    own = Planner(Wisdom(tmp_path / "wisdom.sqlite3"))
    others = ("aten_gemm", "onednn_gemm", "turned_gemm", "padded_gemm", "split_k_gemm", "row_blocks", "row_shares")
    tilewise.optimize(model[0], x, planner=own, goal="passes", rigor="estimate", exclude=others, unplanned="torch")
    planner = Thin()
    with tilewise.enabled(wait=True, planner=planner):
        assert is_planned(model[0])
        for _ in range(3):
            y = model(x)
        assert planned(y)
        assert planned(model[0](x))
        model[0].forward = types.MethodType(lambda self, x: F.linear(x, self.weight) * 0, model[0])
        assert not model[0](x).any()
    assert [p.shape("c") for p in planner.planned if p.task == "nt"] == [(3, 24)]  # the second layer's alone


def test_in_the_background_calls_are_torchs_until_the_session_has_waited() -> None:
    model, x = nn.Sequential(nn.Linear(24, 33), nn.ReLU(), nn.Linear(33, 10)), torch.randn(3, 24)
    want = model(x).detach()
    with tilewise.enabled(wait=False, planner=Thin(), goal="passes") as session:
        for _ in range(2):
            y = model(x)
            assert torch.equal(y, want)
            y.sum().backward()
        del y
        session.wait()
        torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-4)
        assert planned(model(x))
    assert all(layer.replaced for layer in session.report().layers)


def test_under_autocast_calls_are_planned_for_that_type() -> None:
    x, w, b = operands()
    planner = Thin()
    with tilewise.enabled(wait=True, planner=planner):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                y = F.linear(x, w, b)
        assert planned(y)
        with torch.autocast("cpu", torch.bfloat16):
            want = TORCHS_OWN(x, w, b)
        assert y.dtype is want.dtype
        torch.testing.assert_close(y, want, rtol=2e-2, atol=2e-2)
        gradients = torch.autograd.grad(y.float().sum(), (x, w, b))
        assert {g.dtype for g in gradients} == {torch.float32}
        assert not planned(F.linear(x, w, b))  # without autocast it is another call, which was not seen yet
    assert {p.dtype for p in planner.planned} == {"bf16"}


def test_compiled_and_scripted_models() -> None:
    model, x = nn.Sequential(nn.Linear(24, 33), nn.ReLU(), nn.Linear(33, 10)), torch.randn(3, 24)
    want = model(x).detach()
    with tilewise.enabled(wait=True, planner=Thin()):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for module in (compiled, torch.jit.script(model)):
            torch.testing.assert_close(module(x), want)
    torch._dynamo.reset()
