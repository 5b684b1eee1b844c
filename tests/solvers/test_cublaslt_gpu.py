"""Products by every algorithm of cuBLASLt on a GPU, against float64: types, storage, graphs, streams, threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.products import fill, memory_of

from tilewise.execute import bind
from tilewise.kernels.native import building
from tilewise.machine.device import device_name
from tilewise.plan import Config, Plan
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers import SolverUnavailable, get
from tilewise.solvers.gemm import _lt_library as lt
from tilewise.solvers.gemm import cublaslt_gemm
from tilewise.solvers.gemm._lt_call import Descriptors, checked, config_of, rebuilt

pytestmark = pytest.mark.gpu

ROUNDING = {("fp32", "ieee"): 5e-6, ("fp32", "tf32"): 3e-3, ("bf16", "ieee"): 1.6e-2, ("fp16", "ieee"): 2e-3}
"""Relative L2 errors; split sums may be added up in the result's type."""


@pytest.fixture(autouse=True)
def _flag() -> Iterator[None]:
    flag = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = flag


def problem(m: int, n: int, k: int, op: str = "NT", **changes: Any) -> GemmProblem:
    return GemmProblem(m, n, k, op, device=device_name("cuda"), **changes)


def tensors(p: GemmProblem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Operands, a result of ones, and the bias where there is one."""
    a, b = (fill(memory_of(p, role)[0], i) for i, role in enumerate("ab"))
    out = memory_of(p, "c")[0].fill_(1.0)
    bias = (fill(torch.empty(p.n, dtype=out.dtype, device=out.device), 3),) if p.bias else ()
    return a, b, out, bias


def error_of(p: GemmProblem, c: Config) -> float:
    """The relative L2 error of an algorithm; NaN where it leaves any number unwritten."""
    solver = get("cublaslt_gemm")
    a, b, out, bias = tensors(p)
    if not p.accumulate:
        out.fill_(torch.nan)
    want = p.reference(a, b) + (1.0 if p.accumulate else 0.0)
    if bias:
        want = want + bias[0].double()
    size = solver.workspace(p, c)
    workspace = torch.empty(size, dtype=torch.uint8, device=a.device) if size else None
    run = solver.bind_checked(p, c, a, b, out)
    assert run(a, b, out, workspace, *bias) is out
    return float((out.double() - want).norm() / want.norm())


def plan_of(p: GemmProblem, c: Config) -> Plan:
    return Plan(p.key, "cublaslt_gemm", get("cublaslt_gemm").version, c)


def test_torchs_library_is_found() -> None:
    assert lt.missing() == ""


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize(("dtype", "precision"), list(ROUNDING))
@pytest.mark.parametrize("op", ["NN", "NT", "TN"])
def test_every_algorithm_computes_the_product(op: str, dtype: str, precision: str, flag: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = flag
    lead = {"NN": (0, 0, 0), "NT": (520, 520, 264), "TN": (0, 264, 0)}[op]
    p = problem(96, 256, 512, op, dtype=dtype, precision=precision, leading=lead)
    found = list(get("cublaslt_gemm").configs(p))
    assert len(found) > 1, "the heuristic returns more than its first"
    errors = {c: error_of(p, c) for c in found}
    assert not [c for c, error in errors.items() if not error < ROUNDING[dtype, precision]], errors
    if (dtype, precision) == ("fp32", "tf32"):
        assert max(errors.values()) > 1e-5, "TF32 was asked for"


@pytest.mark.parametrize(
    "changes",
    [
        {"bias": True},
        {"accumulate": True, "out_dtype": "fp32"},
        {"bias": True, "accumulate": True, "out_dtype": "fp32"},
        {"batch": 3},
        {"batch": 3, "leading": (264, 136, 0)},
        {"leading": (257, 129, 131), "alignment": (2, 2, 2)},
    ],
    ids=lambda changes: "-".join(changes),
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_variants(dtype: str, changes: dict[str, Any]) -> None:
    alignment = changes.get("alignment", (16, 16, 16))
    least = 4 if dtype == "fp32" else 2
    p = problem(65, 129, 256, "NN" if "leading" in changes else "NT", dtype=dtype)
    p = replace(p, **{**changes, "alignment": tuple(max(least, n) for n in alignment)})
    found = list(get("cublaslt_gemm").configs(p))
    assert found
    for c in found[:: max(1, len(found) // 8)]:
        assert error_of(p, c) < ROUNDING[dtype, "ieee"], c


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_algorithm_is_rebuilt_from_its_numbers(dtype: str) -> None:
    p = problem(64, 1760, 1760, dtype=dtype)
    library, _ = lt.load()
    assert library is not None
    handle, call = lt.handle_for(torch.cuda.current_device()), cublaslt_gemm._examples(p)
    descriptors, same, lost = Descriptors(library, call), 0, []
    found = cublaslt_gemm._listing(p, torch.cuda.current_device())
    for c, one in found.items():
        if "twin" in c:
            continue
        try:
            again = rebuilt(library, handle, call, c)
            checked(library, handle, descriptors, again)
        except SolverUnavailable as error:
            lost.append(f"{c}: {error}")
            continue
        assert config_of(library, again) == c
        same += again == one.algorithm
    print(f"{dtype}: {len(found)} algorithms, {same} rebuilt to the byte, lost: {lost}")
    assert len(lost) < len(found)


def test_in_a_captured_graph() -> None:
    p = problem(33, 512, 512, dtype="bf16", bias=True)
    a, b, _, (bias,) = tensors(p)
    for c in list(get("cublaslt_gemm").configs(p))[:6]:
        bound = bind(plan_of(p, c), p, a, b)
        want, stream, graph = bound(a, b, bias), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            bound(a, b, bias)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            out = bound(a, b, bias)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)


def test_on_another_stream_it_waits_its_turn() -> None:
    p = problem(64, 512, 512)
    a, b, *_ = tensors(p)
    bound = bind(plan_of(p, next(iter(get("cublaslt_gemm").configs(p)))), p, a, b)
    want, stream = bound(a, b), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(a)
        torch.cuda._sleep(20_000_000)
        late.copy_(a)  # on any other stream the product would read zeros
        out = bound(late, b)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, want)


def test_threads_share_a_plan_with_biases_of_their_own() -> None:
    p = problem(17, 256, 128, bias=True)
    a, b, _, (bias,) = tensors(p)
    bound = bind(plan_of(p, next(iter(get("cublaslt_gemm").configs(p)))), p, a, b)
    plain = bound(a, b, torch.zeros_like(bias))
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(scale: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            own = bias * scale
            for _ in range(200):
                out = bound(a, b, own)
                wrong.extend([] if torch.allclose(out, plain + own, rtol=1e-5, atol=1e-4) else [scale])

    threads = [threading.Thread(target=work, args=(scale,)) for scale in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_plan_is_queued_from_c() -> None:
    if building.native() is None:
        pytest.skip(building.why_not())
    p = problem(17, 256, 128, bias=True)
    a, b, _, (bias,) = tensors(p)
    for c in list(get("cublaslt_gemm").configs(p))[:4]:
        bound = bind(plan_of(p, c), p, a, b)
        assert bound.kernels is not None
        assert torch.equal(bound.call(a, b, bias), bound._from_python(a, b, bias))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_bias_may_lie_anywhere(dtype: str) -> None:
    """By the algorithm that the library names for a result at any address."""
    p = problem(48, 256, 128, dtype=dtype, bias=True)
    a, b, _, (bias,) = tensors(p)
    want = p.reference(a, b) + bias.double()
    for c in list(get("cublaslt_gemm").configs(p))[:4]:
        bound = bind(plan_of(p, c), p, a, b)
        for offset in (1, 3, 8):
            placed = torch.cat([bias.new_zeros(offset), bias])[offset:]
            got = bound(a, b, placed)
            torch.cuda.synchronize()
            assert float((got.double() - want).norm() / want.norm()) < ROUNDING[dtype, "ieee"], (c, offset)
