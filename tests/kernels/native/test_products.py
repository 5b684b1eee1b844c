"""Products by cuBLAS that are queued from C: as those by ctypes, against stand-ins for cuBLAS and for the driver."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.nn.test_native_calls import _on_a_cpu  # noqa: F401  (a fixture)
from tests.solvers.test_cublas import CUDA, Stand, laid, memory, problem

from tilewise import solvers
from tilewise.execute import Bound, bind
from tilewise.kernels.native import autograd, building
from tilewise.kernels.native.sequence import Address, LaunchSequence, Product, joined, launch_list
from tilewise.plan import Config, Plan
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers import SolverUnavailable
from tilewise.solvers.common import cublas as _cublas
from tilewise.solvers.common.buffers import Strided
from tilewise.solvers.common.cublas import CublasRun
from tilewise.solvers.common.matmul import straight

ALPHA, BETA = 6, 15
"""Where cuBLAS is told the addresses of scales."""
SQUARE = Strided((1, 1, 4, 4), (16, 16, 4, 1))
GENERATED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def fail(*given: object) -> None:
    raise AssertionError(f"called from Python with {given}")


def told(blas: Stand, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, ...]]:
    """From now on, all that cuBLAS is told of each product. Scales are values, as they may lie anywhere."""
    found: list[tuple[float, ...]] = []
    multiply = blas._multiply

    def recorded(*given: int) -> int:
        scales = (ctypes.c_float.from_address(given[i]).value for i in (ALPHA, BETA))
        found.append((*given[:ALPHA], *given[ALPHA + 1 : BETA], *given[BETA + 1 :], *scales))
        return multiply(*given)

    monkeypatch.setattr(blas, "_multiply", recorded)
    return found


def queued(run: CublasRun) -> Any:
    """The list of C that queues a product, which never asks Python."""
    found = launch_list(run.sequence, fail)
    assert found is not None
    return found


@settings(max_examples=150, suppress_health_check=GENERATED, deadline=None)
@given(
    data=st.data(),
    sizes=st.tuples(*[st.integers(1, 5)] * 4),
    dtypes=st.sampled_from((("fp32", "fp32"), ("fp16", "fp16"), ("fp16", "fp32"))),
    precision=st.sampled_from(("ieee", "tf32")),
    add=st.booleans(),
)
def test_any_matrices_that_blas_takes(
    blas: Stand,
    data: st.DataObject,
    sizes: tuple[int, ...],
    dtypes: tuple[str, str],
    precision: str,
    add: bool,
) -> None:
    batch, rows, columns, depth = sizes
    assume(precision == "ieee" or dtypes[0] == "fp32")
    p = problem(*dtypes, accumulate=add, precision=precision)
    shapes = ((rows, depth), (depth, columns), (rows, columns))
    views = [data.draw(laid(batch, *shape, result=i == 2), "matrix") for i, shape in enumerate(shapes)]
    b, a, out = (memory(v, p.torch_dtype(role)) for v, role in zip(views, (*p.operands, p.result), strict=True))
    for tensor in (a, b, out):
        tensor.copy_(torch.randn(tensor.shape, dtype=torch.float32))
    run = straight(p, *(Strided((1, *v.sizes), (7, *v.strides), v.offset) for v in views), CUDA)
    assert isinstance(run, CublasRun)
    native, before, results = queued(run), out.clone(), []
    with pytest.MonkeyPatch.context() as patch:
        calls = told(blas, patch)
        blas.calls.clear()
        for call in (run.run_pointers, functools.partial(native, 0)):
            out.copy_(before)
            call(a.data_ptr(), b.data_ptr(), out.data_ptr(), 0)
            results.append(out.clone().view(torch.uint8))
    assert torch.equal(*results)
    assert calls[0] == calls[1]
    half = len(blas.calls) // 2
    assert blas.calls[:half] == blas.calls[half:], "the same functions, in the same mode"


@st.composite
def layers(draw: st.DrawFn) -> tuple[ConvProblem, Config]:
    """A problem that ``gemm`` solves by products alone, and a config."""
    axes = []
    for _ in range(draw(st.integers(1, 3))):
        kernel = draw(st.integers(1, 3))
        axes.append(Axis(kernel * draw(st.integers(1, 3)), kernel, kernel))
    groups = draw(st.sampled_from((1, 1, 2)))
    layout = draw(st.sampled_from(("contiguous", "channels_last")))
    p = ConvProblem(
        draw(st.sampled_from(list(Pass))), draw(st.integers(1, 4)), groups * draw(st.integers(1, 3)),
        groups * draw(st.integers(1, 5)), tuple(axes), groups=groups, layouts=(layout,) * 3,
    )  # fmt: skip
    solver = solvers.get("gemm")
    assume(not solver.why_not(p))
    return p, draw(st.sampled_from(list(solver.configs(p))))


@settings(max_examples=100, suppress_health_check=GENERATED, deadline=None)
@given(drawn=layers(), bias=st.booleans())
def test_plans_are_queued_from_c_with_the_same_bits(blas: Stand, drawn: tuple[ConvProblem, Config], bias: bool) -> None:
    p, config = drawn
    plan = Plan(p.key, "gemm", solvers.get("gemm").version, config)
    a, b = make_operands(p)
    native = bind(plan, p, a, b)
    assume(native._addressed is not None)
    assert native.kernels is not None, "products by address are queued from C"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "_native", lambda: (None, "for a test"))
        plain = bind(plan, p, a, b)
    assert plain.kernels is None
    added = torch.randn(p.shape(p.result)[1], dtype=torch.float32, device="cpu") if bias else None
    with pytest.MonkeyPatch.context() as patch:
        want = plain.call(a, b, added)
        patch.setattr(CublasRun, "run_pointers", fail)
        got, into = native.call(a, b, added), make_result(p)
        assert native.call(a, b, added, into) is into
    assert got.stride() == want.stride()
    assert torch.equal(got, want)
    assert torch.equal(into, want)


def pointwise(pass_: Pass, **changes: Any) -> ConvProblem:
    return ConvProblem(pass_, 3, 4, 6, (Axis(5, 1), Axis(4, 1)), layouts=("channels_last",) * 3, **changes)


def bound(p: ConvProblem) -> Bound:
    solver = solvers.get("gemm")
    return bind(Plan(p.key, "gemm", solver.version, Config(order="pixels")), p, *make_operands(p))


def planned() -> Callable[..., torch.Tensor]:
    """A planned call with autograd, of which all passes are products."""
    kind = autograd.planned_call("cpu")
    assert kind is not None
    passes = {}
    for name, pass_ in (("forward", Pass.FPROP), ("grad_input", Pass.DGRAD), ("grad_weight", Pass.WGRAD)):
        found = bound(pointwise(pass_))
        passes[name] = found.call, found.kernels
    x, w = make_operands(pointwise(Pass.FPROP))
    y = make_result(pointwise(Pass.FPROP))
    made: Callable[..., torch.Tensor] = kind(
        **passes, backward=fail, geometry=((1, 1), (0, 0), (1, 1), (0, 0), False, 1),
        strides=(y.stride(), x.stride(), w.stride()), misaligned=15, autocast=-1,
    )  # fmt: skip
    return made


def test_a_planned_call_multiplies_forward_and_backward(blas: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    call = planned()
    x, w = make_operands(pointwise(Pass.FPROP))
    wanted = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = torch.nn.functional.conv2d(*wanted)
    dy = torch.randn_like(y)
    y.backward(dy)
    for name in ("__call__", "run_pointers"):
        monkeypatch.setattr(CublasRun, name, fail)
    monkeypatch.setattr(Bound, "_from_python", fail)
    blas.calls.clear()
    got = call(x.requires_grad_(), w.requires_grad_(), None)
    torch.testing.assert_close(got, y)
    got.backward(dy)
    for ours, theirs in zip((x, w), wanted, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert blas.calls == [("mode", 0), ("gemm", 68)] * 3


def test_parts_are_one_list(blas: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    p = pointwise(Pass.WGRAD)
    gemm, split = solvers.get("gemm"), solvers.get("micro_batch")
    whole = Plan(p.key, "gemm", gemm.version, Config(order="pixels"))
    plan = Plan(p.key, split.name, split.version, Config(sizes=(1, 1, 1)), (whole,), (3,))
    a, b = make_operands(p)
    cut = bind(plan, p, a, b)
    assert cut.kernels is not None
    monkeypatch.setattr(CublasRun, "run_pointers", fail)
    blas.calls.clear()
    torch.testing.assert_close(cut.call(a, b).double(), p.reference(a, b), rtol=1e-5, atol=1e-5)
    assert blas.calls == [("mode", 0), ("gemm", 68)] * 3


def test_a_status_is_the_same_error(blas: Stand) -> None:
    p = pointwise(Pass.FPROP)
    a, b = make_operands(p)
    call = bound(p).call
    for blas.fails, name in ((13, "CUBLAS_STATUS_EXECUTION_FAILED"), (99, "cuBLAS returned 99")):
        with pytest.raises(SolverUnavailable, match=name):
            call(a, b)
    blas.fails = 0
    torch.testing.assert_close(call(a, b).double(), p.reference(a, b), rtol=1e-5, atol=1e-5)


def test_no_handle_is_an_error(blas: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    def handle() -> int:
        raise RuntimeError("no handle here")

    monkeypatch.setattr(_cublas, "_load", lambda: (blas.library._replace(handle=handle), ""))
    run = straight(problem(), SQUARE, SQUARE, SQUARE, CUDA)
    assert isinstance(run, CublasRun)
    with pytest.raises(RuntimeError, match="no handle here"):
        queued(run)(0, 1, 2, 3)


def test_another_current_device_leaves_the_list_to_python(blas: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    run = straight(problem(), SQUARE, SQUARE, SQUARE, CUDA)
    assert isinstance(run, CublasRun)
    heard: list[tuple[int, ...]] = []
    native = launch_list(run.sequence, lambda *addresses: heard.append(addresses))
    tensors = [torch.ones(16, dtype=torch.float32, device="cpu") for _ in range(3)]
    addresses = [t.data_ptr() for t in tensors]
    for current[0] in (0, 1, 0):
        native(0, *addresses)
    assert heard == [tuple(addresses)]
    assert len(blas.calls) == 4
    assert bool((tensors[2] == 4).all())


def test_threads_have_handles_of_their_own(blas: Stand) -> None:
    """The lock is released while cuBLAS works."""
    p = pointwise(Pass.FPROP)
    a, b = make_operands(p)
    call, want, found = bound(p).call, p.reference(a, b).float(), []

    def work(scale: int) -> None:
        own = a * scale
        found.extend([torch.allclose(call(own, b), want * scale, rtol=1e-4, atol=1e-4) for _ in range(50)])

    threads = [threading.Thread(target=work, args=(scale,)) for scale in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 150
    assert all(found)


def test_sequences_move_and_join(blas: Stand) -> None:
    run, rounded = (straight(problem(precision=how), SQUARE, SQUARE, SQUARE, CUDA) for how in ("ieee", "tf32"))
    assert isinstance(run, CublasRun)
    assert isinstance(rounded, CublasRun)
    (product,) = run.sequence.moved((8, 16, 24)).launches
    assert isinstance(product, Product)
    assert product.parameters == (Address(0, 8), Address(1, 16), Address(2, 24)) or product.parameters == (
        Address(1, 16), Address(0, 8), Address(2, 24)
    )  # fmt: skip
    assert run.sequence.sources == 3
    whole = joined([run.sequence, run.sequence])
    assert whole is not None
    assert len(whole.launches) == 2
    assert joined([run.sequence, rounded.sequence]) is None, "one sets the handle's mode, the other keeps torch's"


@pytest.fixture
def described(blas: Stand) -> Product:
    run = straight(problem(), SQUARE, SQUARE, SQUARE, CUDA)
    assert isinstance(run, CublasRun)
    (product,) = run.sequence.launches
    assert isinstance(product, Product)
    return product


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"function": 0}, "a product has a function"),
        ({"parameters": (Address(0, 0),) * 2}, "two factors and a result"),
        ({"parameters": (Address(0, 0), Address(1, 0), Address(3, 0))}, "source 3: 0 to 2 would do"),
        ({"parameters": (Address(0, 0), Address(1, 0), b"12345678")}, "matrix is"),
        ({"sizes": (1, 2)}, "described by sequence.py"),
        ({"calls": ()}, "described by sequence.py"),
    ],
)
def test_what_is_no_product_is_refused(described: Product, change: dict[str, Any], message: str) -> None:
    found = building.native()
    assert found is not None
    wrong = described._replace(**change)
    with pytest.raises((TypeError, ValueError), match=message):
        found.module.LaunchList(found.driver, 3, (wrong,), (), fail)
    if "sizes" in change:
        with pytest.warns(RuntimeWarning, match="launched from Python"):
            assert launch_list(LaunchSequence((wrong,), 0), fail) is None
