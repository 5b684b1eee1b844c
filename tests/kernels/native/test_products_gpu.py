"""Products by cuBLAS on a GPU, queued from C and called from Python: the same bits, and no Python on the way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.kernels.native.test_alike_strides import LAYERS, Multiplying, counted, usual
from tests.kernels.native.test_native_gpu import from_python, run
from tests.kernels.native.test_products import fail
from tests.solvers.test_cublas import BOUNDS, NAMES, layers
from torch import nn

import tilewise
from tilewise import execute, solvers
from tilewise.execute import Bound, bind
from tilewise.kernels.native import autograd, building
from tilewise.machine.device import device_name
from tilewise.machine.torch_state import framework_flags
from tilewise.nn.layers.runner import Runner
from tilewise.plan import Config, Plan
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers import SolverUnavailable

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _there() -> Iterator[None]:
    assert building.why_not() == "", "launches come from C where the GPU tests run"
    assert autograd.why_not() == "", "calls come from C++ where the GPU tests run"
    flag = torch.backends.cuda.matmul.allow_tf32
    with framework_flags("cuda", "ieee", deterministic=False):
        yield
    torch.backends.cuda.matmul.allow_tf32 = flag


def both(p: ConvProblem, plan: Plan) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The results from C and from Python; ``None`` for a plan that is more than products by address."""
    a, b = make_operands(p)
    try:
        native = bind(plan, p, a, b)
    except SolverUnavailable:
        return None
    if native._addressed is None:
        return None
    with from_python():
        plain = bind(plan, p, a, b)
    assert native._native is not None, plan
    assert plain._native is None
    if p.accumulate:
        native_out, plain_out = (make_result(p).fill_(1.0) for _ in range(2))
        return native.call(a, b, None, native_out), plain.call(a, b, None, plain_out)
    return run(native, p, a, b), run(plain, p, a, b)


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize(("dtype", "precision"), list(BOUNDS))
def test_both_ways_give_the_same_bits(dtype: str, precision: str, flag: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = flag
    seen = 0
    for what, p in layers(device_name("cuda"), dtype, precision):
        for name in NAMES[:2]:
            solver = solvers.get(name)
            for config in () if solver.why_not(p) else solver.configs(p):
                found = both(p, Plan(p.key, name, solver.version, config))
                if found is not None:
                    assert torch.equal(*found), (what, name, config)
                    seen += 1
    assert seen > 30
    assert torch.backends.cuda.matmul.allow_tf32 is flag


def large(pass_: Pass, dtype: str, precision: str = "ieee") -> ConvProblem:
    """A pointwise layer for which cuBLAS has kernels of several kinds, in sizes that divide by little."""
    axes = (Axis(29, 1), Axis(31, 1))
    return ConvProblem(
        pass_, 5, 193, 321, axes, dtype=dtype, precision=precision, layouts=("channels_last",) * 3,
        device=device_name("cuda"),
    )  # fmt: skip


def planned(p: ConvProblem) -> Plan:
    return Plan(p.key, "gemm", solvers.get("gemm").version, Config(order="pixels"))


@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize(("dtype", "precision"), list(BOUNDS))
def test_large_products_and_their_parts(dtype: str, precision: str, pass_: Pass) -> None:
    p = large(pass_, dtype, precision)
    found = both(p, planned(p))
    assert found is not None
    assert torch.equal(*found)
    if dtype == "fp32" or pass_ is not Pass.WGRAD:  # sums of other types are kept apart
        split = solvers.get("micro_batch")
        assert isinstance(split, solvers.Split)
        config = Config(sizes=(2, 2, 1))
        parts = [part.problem for part in split.children(p, config) if part.problem is not None]
        children = (planned(parts[0]), planned(parts[2]))
        found = both(p, Plan(p.key, split.name, split.version, config, children, (2, 1)))
        assert found is not None
        assert torch.equal(*found)


def bound_both() -> tuple[torch.Tensor, torch.Tensor, execute.Bound, torch.Tensor]:
    """Operands of a layer, its plan bound for C, and the result from Python."""
    p = large(Pass.FPROP, "fp32")
    a, b = make_operands(p)
    with from_python():
        want = bind(planned(p), p, a, b)(a, b)
    return a, b, bind(planned(p), p, a, b), want


def test_another_stream_and_a_graph() -> None:
    a, b, bound, want = bound_both()
    late, stream = torch.full_like(a, torch.nan), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(a)
        got = bound.call(late, b)
    stream.synchronize()
    assert torch.equal(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = bound.call(late, b)
    got.fill_(torch.nan)
    graph.replay()
    torch.testing.assert_close(got, want)  # a graph's workspace may be another one


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
def test_another_device_than_the_current_one() -> None:
    p = large(Pass.FPROP, "fp32")
    a, b = (t.to("cuda:1") for t in make_operands(p))
    bound = bind(planned(p), p, a, b)
    assert bound.kernels is not None
    with torch.cuda.device(1):
        want = bound.call(a, b)
    with torch.cuda.device(0):
        got = bound.call(a, b)
        assert torch.cuda.current_device() == 0
    assert got.device == torch.device("cuda", 1)
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["pointwise", "squeezed", "whole"])
def test_a_layer_runs_without_python(
    name: str, layout: torch.memory_format, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, under autocast too, with the strides of torch's own results."""
    options, size = LAYERS[name]
    torch.manual_seed(0)
    want = nn.Conv2d(16, 24, bias=True, **options).to(device="cuda", memory_format=layout)
    x = torch.randn(8, 16, size, size, device="cuda").contiguous(memory_format=layout)
    got, x = copy.deepcopy(want), x.requires_grad_()

    def results(model: nn.Module, dy: torch.Tensor | None = None) -> Any:
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            y = model(x)
        return y if dy is None else [y, *torch.autograd.grad(y, (x, *model.parameters()), dy)]

    by_python = counted(monkeypatch, Bound, "_from_python")
    with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
        tilewise.optimize(got, x, planner=Multiplying(), unplanned="torch", goal="passes")
    results(got)
    monkeypatch.setattr(Runner, "gradients", fail)
    by_python.clear()
    for dy in usual(results(want).detach()):
        for mine, its in zip(results(got, dy), results(want, dy), strict=True):
            scale = float(its.detach().abs().max())
            close = 2e-2 if dtype is not None else 1e-4
            torch.testing.assert_close(mine, its, rtol=close, atol=close * scale)
            assert mine.stride() == its.stride()
    if layout is torch.channels_last or name == "whole":
        assert not by_python, "each pass is one product"


@pytest.mark.parametrize("pass_", list(Pass))
def test_cudnns_plans_are_called_by_address(pass_: Pass) -> None:
    """They are not launches of ours, but what a call of one needs is made in C++."""
    p = ConvProblem(pass_, 4, 16, 32, (Axis(14, 3, 1, 1, 1, 1),) * 2, device=device_name("cuda"))
    solver = solvers.get("cudnn")
    if reasons := solver.why_not(p):
        pytest.skip(reasons[0])
    config = next(c for c in solver.configs(p) if solver.is_deterministic(p, c))
    a, b = make_operands(p)
    bound = bind(Plan(p.key, solver.name, solver.version, config), p, a, b)
    assert bound.kernels is not None
    kind = autograd.planned_call("cuda")
    assert kind is not None
    strides = tuple(torch.empty(p.shape(role), device="meta").stride() for role in "yxw")
    forward = kind(
        forward=(fail, bound.kernels), grad_input=None, grad_weight=None, backward=fail,
        geometry=((1, 1), (1, 1), (1, 1), (0, 0), False, 1), strides=strides, misaligned=15, autocast=-1,
    )  # fmt: skip
    got = forward(a, b, None)
    assert torch.equal(got, bound(a, b))
