"""Products by address on a GPU, against float64: precision whatever torch's flag, graphs, streams, threads, parts."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.solvers.test_cublas import BOUNDS, layers, products

from tilewise import solvers
from tilewise.execute import bind
from tilewise.machine.device import device_name
from tilewise.plan import Config, Plan
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.common import cublas as _cublas

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _flag() -> Iterator[None]:
    flag = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = flag


def test_torchs_library_is_found() -> None:
    assert _cublas.missing() == ""


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize(("dtype", "precision"), list(BOUNDS))
def test_products_on_a_gpu(dtype: str, precision: str, flag: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = flag
    count = 0
    for what, p in layers(device_name("cuda"), dtype, precision):
        a, b = make_operands(p)
        want = p.reference(a, b)
        out = make_result(p)
        for name, run in products(p, a, b, out):
            out.fill_(1.0 if p.accumulate else math.nan)
            assert run(a, b, out, None) is out
            total = want + 1 if p.accumulate else want
            error = (out.double() - total).norm() / total.norm()
            assert error < BOUNDS[dtype, precision], (what, name)
            count += 1
    assert count > 30
    assert torch.backends.cuda.matmul.allow_tf32 is flag


def large(dtype: str, precision: str = "ieee", **changes: Any) -> ConvProblem:
    """Enough channels that TF32 shows in the error, and that kernels for large matrices run."""
    axes = (Axis(2, 2, 2), Axis(14, 14, 14), Axis(14, 14, 14))
    p = ConvProblem(Pass.FPROP, 512, 3, 640, axes, dtype=dtype, precision=precision, device=device_name("cuda"))
    return replace(p, **changes)


def planned(p: ConvProblem, name: str = "gemm") -> Plan:
    solver = solvers.get(name)
    return Plan(p.key, name, solver.version, next(iter(solver.configs(p))))


@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize(("dtype", "precision"), list(BOUNDS))
def test_precision_is_the_problems_whatever_the_flag(dtype: str, precision: str, flag: bool, pass_: Pass) -> None:
    p = large(dtype, precision, pass_=pass_)
    a, b = make_operands(p)
    want = p.reference(a, b)
    torch.backends.cuda.matmul.allow_tf32 = flag
    bound = bind(planned(p), p, a, b)
    assert bound._addressed is not None
    before = torch.mm(torch.ones(64, 64, device="cuda"), torch.full((64, 64), 1 + 2.0**-12, device="cuda"))
    error = ((bound(a, b).double() - want).norm() / want.norm()).item()
    assert error < BOUNDS[dtype, precision]
    if (dtype, precision) == ("fp32", "tf32"):
        assert error > 1e-5, "TF32 was asked for"
    after = torch.mm(torch.ones(64, 64, device="cuda"), torch.full((64, 64), 1 + 2.0**-12, device="cuda"))
    assert torch.equal(before, after), "torch's own products keep their flag"


def test_in_a_captured_graph() -> None:
    p = large("bf16")
    a, b = make_operands(p)
    bound = bind(planned(p), p, a, b)
    want, stream, graph = bound(a, b), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        bound(a, b)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        out = bound(a, b)
    for scale in (1.0, 2.0):
        out.fill_(torch.nan)
        a.mul_(scale)
        graph.replay()
        torch.testing.assert_close(out, want * scale)


def test_on_another_stream_it_waits_its_turn() -> None:
    p = large("fp32")
    a, b = make_operands(p)
    bound = bind(planned(p), p, a, b)
    want, stream = bound(a, b), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(a)
        torch.cuda._sleep(20_000_000)
        late.copy_(a)  # on any other stream the product would read zeros
        out = bound(late, b)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(out, want)


def test_threads_share_a_plan() -> None:
    p = large("fp32")
    a, b = make_operands(p)
    bound = bind(planned(p), p, a, b)
    want = bound(a, b)
    torch.cuda.synchronize()
    wrong: list[int] = []
    done: list[int] = []

    def work(scale: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            own = a * scale
            for _ in range(200):
                near = torch.allclose(bound(own, b), want * scale, rtol=1e-4, atol=1e-3)
                wrong.extend([] if near else [scale])
        done.append(scale)

    threads = [threading.Thread(target=work, args=(scale,)) for scale in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [1, 2]
    assert not wrong


def test_parts_run_by_address() -> None:
    p = large("bf16")
    a, b = make_operands(p)
    split = solvers.get("micro_batch")
    sizes = (200, 200, 112)
    children = [replace(p, batch=size) for size in (200, 112)]
    plan = Plan(
        p.key, split.name, split.version, Config(sizes=sizes), tuple(planned(child) for child in children), (2, 1)
    )
    bound = bind(plan, p, a, b)
    assert bound._addressed is not None
    want = p.reference(a, b)
    assert ((bound(a, b).double() - want).norm() / want.norm()).item() < BOUNDS["bf16", "ieee"]
