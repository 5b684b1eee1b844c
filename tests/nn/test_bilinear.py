"""``nn.Bilinear`` as one product: results and gradients as torch's in float64, in models, and what stays torch's."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tests.nn.product_plans import Thin
from tests.nn.test_linear import Given, with_gradients
from tests.sampling import some
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import tilewise
from tilewise.nn.layers.bilinear import MOST_BYTES, BilinearLayer, Bilinears, by_product, describe, why_torchs
from tilewise.nn.layers.kinds import is_planned, kind_of
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.weights import Weights
from tilewise.nn.modules import PlannedModules
from tilewise.planner import Options, Planner
from tilewise.wisdom import Wisdom

BY_TORCH = torch._C._VariableFunctions.bilinear


def operands(rows: int = 3, first: int = 5, second: int = 4, outputs: int = 6) -> tuple[torch.Tensor, ...]:
    shapes = (rows, first), (rows, second), (outputs, first, second), (outputs,)
    return tuple(torch.randn(shape, requires_grad=True) for shape in shapes)


@settings(max_examples=some(60), deadline=None)
@given(
    leading=st.lists(st.integers(1, 4), max_size=2),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12)),
    bias=st.booleans(),
    needs=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    strided=st.booleans(),
    passes=st.sets(st.sampled_from(("forward", "grad_input", "grad_weight"))),
)
def test_results_and_gradients_are_torchs(
    leading: list[int], sizes: tuple[int, int, int], bias: bool, needs: Any, strided: bool, passes: set[str]
) -> None:
    outputs, first, second = sizes
    shapes = ((*leading, first), (*leading, second), sizes, *([(outputs,)] if bias else []))
    tensors: Any = [torch.randn(shape) for shape in shapes]
    if strided:
        tensors[:2] = [t.repeat_interleave(2, -1)[..., ::2] for t in tensors[:2]]
    for t, need in zip(tensors, needs, strict=False):
        t.requires_grad_(need)
    exact = with_gradients(BY_TORCH, [t.detach().double().requires_grad_(t.requires_grad) for t in tensors])
    layer = BilinearLayer(Given(tuple(passes)))
    layer.plan_table.options = tilewise.Settings(rigor="estimate").options()
    for _ in range(2):
        got = with_gradients(lambda x1, x2, w, b=None: by_layer(layer, x1, x2, w, b), tensors)
        torch.testing.assert_close([t.double() for t in got], exact, rtol=1e-4, atol=1e-4)
    if passes and "forward" in passes:
        assert layer(*tensors[:3], tensors[3] if bias else None) is not NotImplemented


def by_layer(layer: BilinearLayer, *tensors: Any) -> torch.Tensor:
    y = layer(*tensors)
    return BY_TORCH(*tensors) if y is NotImplemented else y


@pytest.mark.parametrize("second", [3, 7])
def test_the_product_has_gradients_of_gradients(second: int) -> None:
    tensors = [t.detach().double().requires_grad_() for t in operands(2, 3, second, 5)]
    torch.testing.assert_close(by_product(*tensors), BY_TORCH(*tensors))
    assert gradcheck(by_product, tensors)
    assert gradgradcheck(by_product, tensors)


@pytest.mark.parametrize("second", [4, 7])
def test_the_call_of_the_product_is_the_one_that_is_made(second: int) -> None:
    for needs in ((True,) * 4, (False, True, False, False), (True, False, True, False), (False,) * 4):
        tensors = [t.detach().requires_grad_(need) for t, need in zip(operands(3, 5, second), needs, strict=True)]
        table = Given()
        layer = BilinearLayer(table)
        problems = set(layer.problems(describe(*tensors)).values())
        assert layer(*tensors) is not NotImplemented
        assert set(table.asked) == problems


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.both = nn.Bilinear(12, 24, 33)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.both(self.first(x), other)


def stepped(model: nn.Module, *inputs: torch.Tensor) -> list[Any]:
    model.zero_grad()
    loss = model(*inputs).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


INPUTS = torch.linspace(-1, 1, 30).view(5, 6), torch.linspace(1, -1, 120).view(5, 24).sin()


@pytest.mark.parametrize("tasks", [("nt", "nn", "tn"), ("none",)])
def test_modules_run_by_a_product_and_are_restored(tasks: tuple[str, ...]) -> None:
    """Also where torch's own product is the fastest one; without measuring that is taken for granted in training."""
    torch.manual_seed(0)
    net = Net()
    want, names = stepped(copy.deepcopy(net).double(), *(t.double() for t in INPUTS)), list(net.state_dict())
    tilewise.optimize(net, INPUTS, planner=Thin(*tasks), goal="passes", rigor="estimate")
    assert is_planned(net.both)
    for twin in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        got = [t.double() for t in stepped(twin, *INPUTS)]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    layer = tilewise.nn.report(net).layers[1]
    assert [one.role for one in layer.passes()] == ["forward", "grad_input", "grad_weight"]
    assert layer.replaced is (tasks != ("none",))
    assert list(net.state_dict()) == names
    tilewise.restore(net)
    assert "forward" not in vars(net.both)


def test_without_gradients_nothing_is_swapped_that_is_not_known_to_gain() -> None:
    net = nn.Bilinear(12, 24, 33)
    with torch.no_grad():
        inputs = torch.randn(5, 12), torch.randn(5, 24)
        for options in ({"training": False}, {}):
            tilewise.optimize(net, inputs, planner=Thin("none"), goal="passes", rigor="estimate", **options)
            assert is_planned(net) is (not options)


def test_torchs_own_product_is_timed_against_torchs_own_function(tmp_path: Any) -> None:
    net = Net()
    others = ("thin_gemm", "onednn_gemm", "turned_gemm", "padded_gemm", "split_k_gemm", "row_blocks", "row_shares")
    planner = Planner(Wisdom(tmp_path / "wisdom.sqlite3"))
    tilewise.optimize(net, INPUTS, planner=planner, goal="passes", exclude=others)
    timed = tilewise.nn.report(net).facts["bilinear"]
    assert timed["compared"] == 2  # with gradients and without
    assert timed["kept"] in (0, 1, 2)
    twin = tilewise.restore(copy.deepcopy(net))
    torch.testing.assert_close(stepped(net, *INPUTS), stepped(twin, *INPUTS), rtol=1e-4, atol=1e-5)


def test_where_all_plans_are_taken_back_the_module_is_torchs() -> None:
    """As where the step by plans is not faster than torch's: that is with the product in both layers' places."""
    net = Net()
    modules = PlannedModules(net, PlanTable(Options(), "plan", Thin()), Weights.CHANGING)
    modules.record([INPUTS])
    modules.plan_table.plan(modules.problems(), False)
    modules.install({})
    keys = list(modules.gains())
    assert len(keys) == 5  # the linear layer's input needs no gradient
    modules.withhold(keys[:-1], "not faster")
    assert is_planned(net.both)
    modules.withhold(keys, "not faster")
    assert not is_planned(net.first)
    assert not is_planned(net.both)
    modules.withhold((), "")
    assert is_planned(net.both)


def test_planned_in_the_background() -> None:
    net = Net()
    want = net(*INPUTS).detach()
    tilewise.optimize(net, INPUTS, planner=Thin(), goal="passes", wait=False)
    stepped(net, *INPUTS)
    tilewise.wait(net)
    assert is_planned(net.both)
    torch.testing.assert_close(net(*INPUTS).detach(), want, rtol=1e-4, atol=1e-4)


def left() -> dict[str, Callable[[], tuple[Any, ...]]]:
    x1, x2, w, b = operands()

    class Tagged(torch.Tensor):
        pass

    return {
        "float64": lambda: (x1.double(), x2.double(), w.double(), b.double()),
        "class of its own": lambda: (x1.detach().as_subclass(Tagged), x2, w, b),
        "empty": lambda: (x1[:0], x2[:0], w, b),
        "sizes": lambda: (x1, x2[:2], w, b),
        "weight or bias": lambda: (x1, x2, w.repeat_interleave(2, 2)[..., ::2], b),
    }


@pytest.mark.parametrize("reason", list(left()))
def test_what_is_left_to_torch_has_a_reason(reason: str) -> None:
    tensors = left()[reason]()
    assert reason in why_torchs(*tensors)
    table = Given()
    assert BilinearLayer(table)(*tensors) is NotImplemented
    assert not table.asked


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_autocast_transforms_and_large_calls_are_torchs() -> None:
    x1, x2, w, b = operands()
    layer = BilinearLayer(Given())
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x1, x2, w, b) is NotImplemented
    mapped = torch.func.vmap(lambda one, other: by_layer(layer, one, other, w, b))(x1, x2)
    torch.testing.assert_close(mapped, BY_TORCH(x1, x2, w, b))
    rows = MOST_BYTES // (4 * 5 * 4) + 1
    assert "between them" in why_torchs(x1[:1].expand(rows, 5), x2[:1].expand(rows, 4), w, b)


def replaced(module: nn.Bilinear) -> None:
    module.forward = types.MethodType(lambda self, x1, x2: x1, module)  # type: ignore[method-assign]


def derived(module: nn.Bilinear) -> None:
    module.__class__ = type("Derived", (nn.Bilinear,), {})


@pytest.mark.parametrize(("change", "says"), [(replaced, "a forward set on the instance"), (derived, "is a Derived")])
def test_modules_that_are_changed_are_left_alone(change: Callable[[nn.Bilinear], None], says: str) -> None:
    module = nn.Bilinear(3, 4, 5)
    change(module)
    kind = kind_of(module)
    assert isinstance(kind, Bilinears)
    assert says in kind.obstacle(module)


def test_a_changed_function_is_seen_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    tilewise.optimize(net, INPUTS, planner=Thin(), goal="passes", rigor="estimate")
    monkeypatch.setattr(torch.nn.functional, "bilinear", lambda *_: torch.zeros(1))
    assert torch.equal(net(*INPUTS), torch.zeros(1))


def test_compiled_code_has_torchs_own() -> None:
    net = Net()
    want = net(*INPUTS)
    tilewise.optimize(net, INPUTS, planner=Thin(), goal="passes", rigor="estimate")
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*INPUTS), want, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
