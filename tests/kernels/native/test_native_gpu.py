"""Plans of our own kernels on a GPU, queued from C and launched from Python: the same bits, on any stream or device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilewise import execute, solvers
from tilewise.execute import bind
from tilewise.kernels.native import building
from tilewise.machine.device import device_name
from tilewise.machine.torch_state import framework_flags
from tilewise.plan import Config, Plan
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers import SolverUnavailable

pytestmark = pytest.mark.gpu
TRITON = ("implicit_gemm", "direct_gemm", "winograd_gemm", "patch_gemm", "depthwise", "polyphase")
CUDA = ("depthwise_fft", "summed_fft", "winograd_fused")
SAME = Axis(14, 3, 1, 1, 1, 1)
STRIDED = Axis(14, 3, 2, 1, 1, 1)


@contextlib.contextmanager
def from_python() -> Iterator[None]:
    """Bind plans whose kernels are launched from Python."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "_native", lambda: (None, "for a test"))
        yield


@pytest.fixture(autouse=True)
def _there() -> Iterator[None]:
    assert building.why_not() == "", "launches come from C where the GPU tests run"
    with framework_flags("cuda", "ieee", deterministic=False):
        yield


def problems(name: str, pass_: Pass) -> list[ConvProblem]:
    """Small problems of many kinds, some of which each solver takes."""
    device = device_name("cuda")
    plain = ConvProblem(pass_, 4, 16, 32, (SAME, SAME), device=device)
    found = [
        plain,
        replace(plain, bias=pass_ is not Pass.WGRAD),
        replace(plain, in_channels=3, axes=(STRIDED, STRIDED)),
        replace(plain, axes=(Axis(14, 1), Axis(14, 1))),
        replace(plain, in_channels=16, out_channels=16, groups=16, axes=(Axis(28, 7, 1, 1, 3, 3),) * 2),
        replace(plain, in_channels=16, out_channels=16, groups=16, axes=(Axis(512, 65, 1, 1, 32, 32),)),
        replace(plain, axes=(Axis(4, 2, 2), Axis(4, 2, 2))),
    ]
    return [p for p in found if not solvers.get(name).why_not(p)]


def plans(name: str, pass_: Pass) -> Iterator[tuple[ConvProblem, Plan]]:
    """Plans of the solver for two problems: each compiles several kernels, which takes seconds."""
    solver = solvers.get(name)
    for p in problems(name, pass_)[:2]:
        for config in solver.configs(p):
            yield p, Plan(p.key, name, solver.version, config)
            break


def run(bound: execute.Bound, p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The result, written over NaN, of operands that lie in memory full of NaN."""
    out = make_result(p).fill_(torch.nan)
    bias = torch.linspace(-1, 1, p.shape(p.result)[1], dtype=out.dtype, device=out.device) if p.bias else None
    poison = [torch.full((1 << 20,), torch.nan, dtype=torch.float32, device="cuda") for _ in range(4)]
    del poison  # its memory is the next workspace's
    assert bound.call(a, b, bias, out) is out
    new = bound.call(a, b, bias)
    torch.testing.assert_close(new, out, rtol=0, atol=0)
    assert new.stride() == out.stride()
    return out


@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("name", TRITON + CUDA)
def test_both_ways_give_the_same_bits(name: str, pass_: Pass) -> None:
    if name not in {s.name for s in solvers.all_solvers()}:
        pytest.skip(f"there is no solver {name}")
    seen = 0
    for p, plan in plans(name, pass_):
        inner = plan.config.get("solver", name)  # one that a rewrite leaves the work to may call libraries
        if inner not in TRITON + CUDA or not solvers.get(name).is_deterministic(p, plan.config):
            continue
        a, b = make_operands(p)
        try:
            native = bind(plan, p, a, b)
            with from_python():
                plain = bind(plan, p, a, b)
        except SolverUnavailable:
            continue
        what = f"{plan.solver} {plan.config} of {p.key}"
        first, second = run(native, p, a, b), run(plain, p, a, b)
        assert not bool(first.isnan().any()), what
        torch.testing.assert_close(first, second, rtol=0, atol=0, msg=what)
        assert plain._native is None
        assert native._native is not None, f"{what} is called from Python"
        seen += 1
    if not seen:
        pytest.skip(f"{name} takes none of the problems in {pass_.value}")


def implicit(p: ConvProblem) -> Plan:
    """A plan of three launches or so."""
    solver = solvers.get("implicit_gemm")
    return Plan(p.key, solver.name, solver.version, next(iter(solver.configs(p))))


def layer(**changes: Any) -> ConvProblem:
    p = ConvProblem(Pass.FPROP, 4, 16, 32, (SAME, SAME), device=device_name("cuda"))
    return replace(p, **changes)


@pytest.mark.parametrize("pass_", list(Pass))
def test_parts_are_one_list(pass_: Pass) -> None:
    p = layer(pass_=pass_, batch=6)
    split = solvers.get("micro_batch")
    config = Config(sizes=(4, 2))
    assert isinstance(split, solvers.Split)
    children = tuple(implicit(part.problem) for part in split.children(p, config) if part.problem is not None)
    plan = Plan(p.key, split.name, split.version, config, children, (1, 1))
    a, b = make_operands(p)
    native = bind(plan, p, a, b)
    with from_python():
        plain = bind(plan, p, a, b)
    assert native._native is not None
    torch.testing.assert_close(run(native, p, a, b), run(plain, p, a, b), rtol=0, atol=0)


def bound_both() -> tuple[ConvProblem, torch.Tensor, torch.Tensor, execute.Bound, torch.Tensor]:
    """A problem, its operands, its plan bound for C, and the result from Python."""
    p = layer()
    a, b = make_operands(p)
    with from_python():
        want = bind(implicit(p), p, a, b)(a, b)
    return p, a, b, bind(implicit(p), p, a, b), want


def test_another_stream() -> None:
    """Operands are written there after a wait: kernels of another stream would read what was there before."""
    _, a, b, bound, want = bound_both()
    late_a, late_b = torch.full_like(a, torch.nan), torch.full_like(b, torch.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late_a.copy_(a)
        late_b.copy_(b)
        got = bound.call(late_a, late_b)
    stream.synchronize()
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_graph_captures_the_launches() -> None:
    p, a, b, bound, want = bound_both()
    static = torch.zeros_like(a)
    bound.call(static, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = bound.call(static, b)
    got.fill_(torch.nan)
    static.copy_(a)
    graph.replay()
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert got.shape == p.shape(p.result)


def test_a_thread_that_has_not_touched_the_gpu() -> None:
    _, a, b, bound, want = bound_both()
    torch.cuda.synchronize()
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(bound.call(a, b))
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got in found:
        assert isinstance(got, torch.Tensor), got
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
def test_another_device_than_the_current_one() -> None:
    p = layer()
    a, b = (t.to("cuda:1") for t in make_operands(p))
    with from_python(), torch.cuda.device(1):
        want = bind(implicit(p), p, a, b)(a, b)
    bound = bind(implicit(p), p, a, b)
    assert bound._native is not None
    with torch.cuda.device(0):
        got = bound.call(a, b)
        assert torch.cuda.current_device() == 0
    assert got.device == torch.device("cuda", 1)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_tritons_hooks_are_told_of_every_launch() -> None:
    from triton import knobs

    _, a, b, bound, want = bound_both()
    heard: list[str] = []

    def hook(metadata: Any) -> None:
        heard.append(metadata.get()["name"])

    bound.call(a, b)
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        got = bound.call(a, b)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    launches = len(heard)
    assert launches
    bound.call(a, b)
    assert len(heard) == launches
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_wrong_memory_is_reported_by_the_drivers_name() -> None:
    """A launch that cannot be queued raises, and later ones work."""
    _, a, b, bound, want = bound_both()
    found = building.native()
    assert found is not None
    assert bound._native is not None
    native: Any = bound._native
    launches = found.module.LaunchList  # a list with a block larger than any device takes
    sequence = _sequence(bound)
    too_large = tuple(one._replace(block=(4096, 1, 1)) for one in sequence.launches)
    run = launches(found.driver, sequence.sources, too_large, (), print)
    with pytest.raises(RuntimeError, match=r"launch 1 of \d+ failed: CUDA_ERROR_"):
        run(torch.cuda.current_stream().cuda_stream, a.data_ptr(), b.data_ptr(), 0, 0)
    torch.testing.assert_close(native(a, b), want, rtol=0, atol=0)


def _sequence(bound: execute.Bound) -> Any:
    """What the driver is told of a bound plan of one leaf."""
    p = bound.problem
    a, b = make_operands(p)
    node = execute.nodes.node_of(bound.plan, p, (a, b), (make_result(p),))
    sequence = node.launches()
    assert sequence is not None
    return sequence
