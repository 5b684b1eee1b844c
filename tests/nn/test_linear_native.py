"""Linear layers from C++: the same numbers as torch's, whichever passes run by plan, and what C++ could do worse.

The module is for GPUs; here it is switched on for a CPU. Plans are Numba's kernels, which C++ calls in Python, or
products by a stand-in for cuBLASLt, which C++ queues itself.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from tests.kernels.native.conftest import native, on_standin, standin  # noqa: F401 (fixtures)
from tests.kernels.native.standin import COMPILER, Standin
from tests.nn.test_linear import PASSES, Given, by_plans, values, with_gradients
from tests.nn.test_native_calls import _on_a_cpu  # noqa: F401 (a fixture)
from tests.nn.test_ranges import ranges
from tests.solvers.lt_standin import LtStand, bound
from tests.solvers.lt_standin import stand as stand  # a fixture

from tilewise.nn.layers.linear.layer import LinearLayer
from tilewise.nn.layers.linear.run import LinearRun
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.plan import Config, Plan
from tilewise.planner import Options
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.gemm import cublaslt_gemm

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
F = torch.nn.functional
SHAPES = ((12,), (5, 12), (2, 3, 12), (1, 1, 12))


class ByLt(PlanTable):
    """A table whose plans are products by cuBLASLt."""

    def __init__(self) -> None:
        super().__init__(Options(), "plan")

    def plan(self, problems: Any, deterministic: bool) -> None:
        for p in self.missing(problems, deterministic):
            self.learn(p, deterministic, Plan(p.key, "cublaslt_gemm", 1, Config(algo=1), time_ms=1.0))


@pytest.fixture
def by_lt(stand: LtStand, on_standin: Standin, monkeypatch: pytest.MonkeyPatch) -> LtStand:  # noqa: F811
    """cuBLASLt takes tensors on the CPU."""

    def bind(self: object, p: GemmProblem, c: Config, *tensors: Any) -> Any:
        return bound(p, c, *tensors)

    monkeypatch.setattr(cublaslt_gemm.CublasLtGemm, "devices", frozenset({"cpu"}))
    monkeypatch.setattr(cublaslt_gemm.CublasLtGemm, "bind", bind)
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    return stand


def node_of(y: torch.Tensor) -> Any:
    assert type(y.grad_fn).__name__ == "PlannedLinearBackward"
    assert not hasattr(y.grad_fn, "saved_tensors")  # which nodes of Python have
    return y.grad_fn


def assert_alike(got: Any, want: Any) -> None:
    for mine, its in zip(got, want, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)
        assert mine.stride() == its.stride()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_results_and_gradients_are_torchs(shape: tuple[int, ...], bias: bool) -> None:
    for passes in itertools.chain(*(itertools.combinations(PASSES, n) for n in (1, 2, 3))):
        layer = LinearLayer(Given(passes))
        for needs in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
            tensors = values(shape, 20, bias, needs)
            want = with_gradients(F.linear, tensors)
            assert_alike(with_gradients(by_plans(layer), tensors), want)
            y = layer(*tensors)
            if y is not NotImplemented and (needs[0] or needs[1] or (bias and needs[2])):
                node_of(y)


@pytest.mark.parametrize("turned", [True, False])
def test_products_by_a_library_need_no_python(by_lt: LtStand, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LinearLayer(ByLt())
    for shape, bias in itertools.product(SHAPES, (True, False)):
        x, w, b = values(shape, 20, bias)
        if turned:
            w = w.detach().t().contiguous().t().requires_grad_()
        want = with_gradients(F.linear, (x, w, b))
        assert_alike(with_gradients(layer, (x, w, b)), want)
        with monkeypatch.context() as patch:
            for name in ("_laid_out", "_grad_input", "_grad_weight", "gradients", "result"):
                patch.setattr(LinearRun, name, None)
            by_lt.products.clear()
            y = layer(x, w, b)
            y.backward(torch.ones_like(y))
            assert len(by_lt.products) == 3


def test_a_profiler_sees_products_that_need_no_python(by_lt: LtStand, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, tensors = LinearLayer(ByLt(), name="head"), values((5, 12), 20, True)
    layer(*tensors)
    for name in ("_laid_out", "_grad_input", "_grad_weight", "gradients", "result"):
        monkeypatch.setattr(LinearRun, name, None)
    passes = ("forward", "grad_input", "grad_weight")
    ones = torch.ones(5, 20)  # a sum's gradient would be expanded, which Python takes
    found = ranges(lambda: layer(*tensors).backward(ones))
    assert found == {f"tilewise: head {name} cublaslt_gemm": 1 for name in passes}


def test_a_call_without_gradients_needs_none_either(by_lt: LtStand) -> None:
    layer = LinearLayer(ByLt())
    x, w, b = values((3, 12), 20, True, (False, False, False))
    for _ in range(2):
        torch.testing.assert_close(layer(x, w, b), F.linear(x, w, b), rtol=1e-4, atol=1e-4)
    assert layer.latest is not None
    assert not isinstance(layer.latest.run, LinearRun)


def test_the_node_has_torchs_edges_and_saves_what_gradients_need() -> None:
    layer, (x, w, b) = LinearLayer(Given()), values((5, 12), 20, True)
    node = node_of(layer(x, w, b))
    assert [edge.variable for edge, _ in node.next_functions] == [x, w, b]
    frozen = w.detach()
    y = layer(x, frozen, None)
    assert [edge is None for edge, _ in node_of(y).next_functions] == [False, True, True]
    gone = weakref.ref(x2 := torch.randn(5, 12).requires_grad_() * 1)
    y = layer(x2, frozen, None)
    del x2
    gc.collect()
    assert gone() is None, "the input is needed for the weight's gradient alone"
    assert y.grad_fn is not None


def test_gradients_of_every_layout() -> None:
    """Of the result's gradient: as plans take it, expanded, a slice, transposed and at an odd address."""
    layer, tensors = LinearLayer(Given()), values((4, 5, 12), 20, True)
    wide = torch.randn(4, 5, 24)
    for dy in (
        torch.randn(4, 5, 20),
        torch.ones(()).expand(4, 5, 20),
        wide[..., 1:-3],
        torch.randn(5, 4, 20).transpose(0, 1),
        torch.randn(401)[1:].view(4, 5, 20),
    ):
        wanted = [t for t in tensors if t is not None]
        got = torch.autograd.grad(layer(*tensors), wanted, dy)
        assert_alike(got, torch.autograd.grad(F.linear(*tensors), wanted, dy))


def test_a_result_may_be_changed_in_place(by_lt: LtStand) -> None:
    for table in (Given(), ByLt()):
        layer, tensors = LinearLayer(table), values((2, 3, 12), 20, True)

        def changed(function: Any, tensors: Any = tensors) -> Any:
            return with_gradients(lambda *given: function(*given).add_(1).relu_(), tensors)

        assert_alike(changed(layer), changed(F.linear))


def test_gradients_of_gradients_and_backward_twice() -> None:
    layer, tensors = LinearLayer(Given()), values((2, 3, 12), 20, True)

    def penalty(function: Any) -> Any:
        x, w, b = tensors
        (dx,) = torch.autograd.grad(function(x, w, b).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), (x, w))

    assert_alike(penalty(layer), penalty(F.linear))
    y = layer(*tensors).sum()
    first = torch.autograd.grad(y, tensors[0], retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y, tensors[0])[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


@pytest.mark.slow
@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False)])
def test_compiled_autograd_traces_torchs_backward(needs: tuple[bool, bool, bool]) -> None:
    layer, tensors = LinearLayer(Given()), values((2, 3, 12), 20, True, needs)
    leaves = [t for t in tensors if t is not None and t.requires_grad]
    results = []
    for function in (layer, F.linear):
        y = function(*tensors)
        for leaf in leaves:
            leaf.grad = None
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            y.square().sum().backward()
        results.append([leaf.grad for leaf in leaves])
    assert_alike(*results)


def test_calls_change_over_once_the_module_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those made before run from Python until then."""
    layer, tensors = LinearLayer(Given()), values((5, 12), 20, True)
    with monkeypatch.context() as patch:
        patch.setattr("tilewise.nn.layers.linear.run.linear_call", lambda device_type: None)
        assert hasattr(layer(*tensors).grad_fn, "saved_tensors")
    layer.use_native()
    node_of(layer(*tensors))


def test_a_weight_that_was_changed_after_is_an_error() -> None:
    layer, (x, w, b) = LinearLayer(Given()), values((5, 12), 20, True)
    y = layer(x, w, b)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("shape", SHAPES)
def test_autocast_casts_as_torch_does(shape: tuple[int, ...]) -> None:
    layer, tensors = LinearLayer(Given()), values(shape, 20, True)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = layer(*tensors), F.linear(*tensors)
        assert got.dtype is want.dtype is torch.bfloat16
        again = layer(*tensors)
    wanted = [t for t in tensors if t is not None]
    dy = torch.ones_like(got)
    for mine, its in zip(torch.autograd.grad(got, wanted, dy), torch.autograd.grad(want, wanted, dy), strict=True):
        assert mine.dtype is its.dtype
        torch.testing.assert_close(mine, its, rtol=3e-2, atol=3e-2)
    node_of(again)


def test_a_layer_goes_when_nobody_holds_it(by_lt: LtStand) -> None:
    layer, tensors = LinearLayer(ByLt()), values((5, 12), 20, True)
    y = layer(*tensors)
    assert by_lt.held, "the descriptors of its products"
    del layer
    gc.collect()
    y.sum().backward()
    assert tensors[0].grad is not None
    del y
    gc.collect()
    assert not by_lt.held


def test_wrong_arguments_are_errors() -> None:
    layer, (x, w, b) = LinearLayer(Given()), values((5, 12), 20, True)
    layer(x, w, b)
    assert layer.latest is not None
    call: Any = layer.latest.run
    with pytest.raises(TypeError, match="an input, a weight, and a bias or None"):
        call(x, w)
    with pytest.raises(TypeError, match="an input, a weight, and a bias or None"):
        call(x, 1, None)
    kind = type(call)
    usual: dict[str, Any] = {
        "forward": None, "grad_input": None, "grad_weight": None, "backward": None, "shapes": ((5, 12), (5, 20)),
        "strides": ((12, 1), (20, 1), (12, 1)), "turned": False, "misaligned": 15, "autocast": -1,
    }  # fmt: skip
    kind(**usual)
    for change, message in (
        ({"shapes": ((5, 12), (20,))}, "those of an input and of its result would do"),
        ({"shapes": ((), ())}, "those of an input and of its result would do"),
        ({"strides": (1, 2, 3)}, "a tuple of whole numbers would do"),
        ({"forward": 3}, "a pass is None or"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            kind(**{**usual, **change})
