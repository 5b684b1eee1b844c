"""Linear layers on a GPU by planned products of every solver, called from C++: results and gradients as torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.benchmark
from tests.nn.test_linear import with_gradients
from torch import nn

from tilewise.kernels.native import autograd, building
from tilewise.nn.layers.linear.layer import LinearLayer
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.plan import Plan
from tilewise.planner import Options
from tilewise.solvers import get

pytestmark = pytest.mark.gpu
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class By(PlanTable):
    """A table whose plans are the first of one solver."""

    def __init__(self, solver: str) -> None:
        super().__init__(Options(), "plan")
        self.solver = get(solver)

    def plan(self, problems: Any, deterministic: bool) -> None:
        for p in self.missing(problems, deterministic):
            c = next(iter(self.solver.configs(p)))
            self.learn(p, deterministic, Plan(p.key, self.solver.name, self.solver.version, c, time_ms=1.0))


@pytest.fixture(autouse=True)
def _native() -> None:
    autograd.start(["cuda"])
    if reason := autograd.why_not() or building.why_not():
        pytest.skip(reason)


def values(shape: tuple[int, ...], outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = (shape, (outputs, shape[-1]), (outputs,))
    made = (torch.randn(size, dtype=dtype, device="cuda", generator=generator) for size in sizes)
    return tuple(t.requires_grad_() for t in made)


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("solver", ["cublaslt_gemm", "stream_k_gemm", "thin_gemm"])
def test_layers_in_cpp_are_torchs(solver: str, dtype: torch.dtype) -> None:
    layer = LinearLayer(By(solver))
    for shape in ((33, 256), (4, 8, 256), (1, 256)):
        tensors = values(shape, 48, dtype)
        y = layer(*tensors)
        assert type(y.grad_fn).__name__ == "PlannedLinearBackward"
        assert not hasattr(y.grad_fn, "saved_tensors")  # which nodes of Python have
        got, want = (with_gradients(each, tensors) for each in (layer, nn.functional.linear))
        for mine, its in zip(got, want, strict=True):
            assert mine is not None
            assert its is not None
            assert mine.stride() == its.stride()
            error = (mine.double() - its.double()).norm() / its.double().norm()
            assert float(error) < BOUNDS[dtype], (solver, shape)


def test_under_autocast() -> None:
    layer, tensors = LinearLayer(By("cublaslt_gemm")), values((16, 256), 64, torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        got, want = layer(*tensors), nn.functional.linear(*tensors)
    assert got.dtype is want.dtype is torch.bfloat16
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-1)
    for mine, its in zip(*(torch.autograd.grad(y.float().sum(), tensors) for y in (got, want)), strict=True):
        assert mine.dtype is its.dtype
        torch.testing.assert_close(mine, its, rtol=3e-2, atol=3e-1)


def test_in_a_captured_graph_with_backward() -> None:
    layer, (x, w, b) = LinearLayer(By("cublaslt_gemm")), values((32, 512), 256, torch.bfloat16)

    def step() -> tuple[torch.Tensor, ...]:
        y = layer(x, w, b)
        return (y, *torch.autograd.grad(y, (x, w, b), torch.ones_like(y)))

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # autograd's nodes stay on the stream that they were made on, which is captured
        want = [t.detach().clone() for t in step()]
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        got = step()
    for t in got:
        t.detach().fill_(torch.nan)
    graph.replay()
    for mine, its in zip(got, want, strict=True):
        assert torch.equal(mine, its)


def test_host_time_of_a_call(record_property: Callable[[str, object], None]) -> None:
    """What a call takes of the host, planned and by torch, in microseconds: noted, not asserted."""
    layer, (x, w, b) = LinearLayer(By("cublaslt_gemm")), values((4, 64), 64, torch.bfloat16)
    took = {}
    with torch.no_grad():
        for name, call in (("planned", layer), ("torch", torch._C._nn.linear)) * 3:
            for _ in range(200):
                call(x, w, b)
            torch.cuda.synchronize()
            timer = torch.utils.benchmark.Timer("call(x, w, b)", globals={"call": call, "x": x, "w": w, "b": b})
            took[name] = min(took.get(name, 1e9), timer.timeit(500).mean * 1e6)
    torch.cuda.synchronize()
    for name, us in took.items():
        record_property(name, us)
    print(took)
    assert set(took) == {"planned", "torch"}
