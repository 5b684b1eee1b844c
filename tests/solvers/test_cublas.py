"""Products by address: against a stand-in for cuBLAS on host memory that does what its manual says."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterator
from ctypes import c_int, c_longlong, c_void_p
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewise import solvers
from tilewise.execute import bind
from tilewise.plan import Config, Plan
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers import SolverUnavailable
from tilewise.solvers.base import Run
from tilewise.solvers.common import cublas as _cublas
from tilewise.solvers.common import matmul as _matmul
from tilewise.solvers.common.buffers import Strided
from tilewise.solvers.common.cublas import CublasRun, Library, column_major
from tilewise.solvers.common.matmul import as_matrix, at_precision, straight
from tilewise.solvers.lowering import _lowering, _patches, _weight_gradient

CUDA = torch.device("cuda", 0)
HANDLE = 0x7FFF_0000_1234
SUCCESS, INVALID_VALUE, EXECUTION_FAILED = 0, 7, 13
TYPES = {0: np.float32, 2: np.float16}
BOUNDS = {("fp32", "ieee"): 1e-5, ("fp32", "tf32"): 2e-3, ("fp16", "ieee"): 1e-3, ("bf16", "ieee"): 8e-3}


class Stand:
    """cuBLAS's functions on host memory, called as C functions, and what they were called with."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fails = SUCCESS
        size = [c_int] * 3
        factor, stride = [c_void_p, c_int, c_int], [c_longlong]
        gemm = [c_void_p, c_int, c_int, *size, c_void_p, *factor, *factor, c_void_p, *factor, c_int, c_int]
        batched = [c_void_p, c_int, c_int, *size, c_void_p, *factor, *stride, *factor, *stride, c_void_p, *factor,
                   *stride, c_int, c_int, c_int]  # fmt: skip
        self._kept = [
            ctypes.CFUNCTYPE(c_int, *gemm)(self._gemm),
            ctypes.CFUNCTYPE(c_int, *batched)(self._batched),
            ctypes.CFUNCTYPE(c_int, c_void_p, c_int)(self._mode),
        ]
        # By address and without declared arguments, as the functions of a library are.
        functions = [ctypes.CFUNCTYPE(c_int)(ctypes.cast(f, c_void_p).value) for f in self._kept]
        self.library = Library(*functions, handle=lambda: HANDLE)  # type: ignore[misc, call-arg]

    def _mode(self, handle: int, mode: int) -> int:
        assert handle == HANDLE
        self.calls.append(("mode", mode))
        return SUCCESS

    def _gemm(self, handle: int, ta: int, tb: int, m: int, n: int, k: int, alpha: int, a: int, a_type: int, lda: int,
              b: int, b_type: int, ldb: int, beta: int, c: int, c_type: int, ldc: int, compute: int,
              algo: int) -> int:  # fmt: skip
        self.calls.append(("gemm", compute))
        return self._multiply(handle, ta, tb, m, n, k, alpha, a, a_type, lda, 0, b, b_type, ldb, 0, beta, c, c_type,
                              ldc, 0, 1, algo)  # fmt: skip

    def _batched(self, *values: int) -> int:
        *rest, compute, algo = values
        self.calls.append(("batched", compute))
        return self._multiply(*rest, algo)

    def _multiply(self, handle: int, ta: int, tb: int, m: int, n: int, k: int, alpha: int, a: int, a_type: int,
                  lda: int, a_step: int, b: int, b_type: int, ldb: int, b_step: int, beta: int, c: int, c_type: int,
                  ldc: int, c_step: int, count: int, algo: int) -> int:  # fmt: skip
        try:
            if self.fails:
                return self.fails
            valid = (handle == HANDLE and algo == -1 and {ta, tb} <= {0, 1} and a_type == b_type and min(m, n, k) > 0
                     and lda >= (k if ta else m) and ldb >= (n if tb else k) and ldc >= m)  # fmt: skip
            if not valid:
                return INVALID_VALUE
            scales = [ctypes.c_float.from_address(scale).value for scale in (alpha, beta)]
            for i in range(count):
                left = _matrix(a, a_type, i * a_step, (k, m) if ta else (m, k), lda)
                right = _matrix(b, b_type, i * b_step, (n, k) if tb else (k, n), ldb)
                result = _matrix(c, c_type, i * c_step, (m, n), ldc)
                product = (left.T if ta else left).astype(float) @ (right.T if tb else right).astype(float)
                before = result.astype(float) * scales[1] if scales[1] else 0.0  # else it is not read
                result[:] = scales[0] * product + before
            return SUCCESS
        except Exception:  # none may leave a callback
            return EXECUTION_FAILED


def _matrix(address: int, kind: int, step: int, shape: tuple[int, int], leading: int) -> np.ndarray[Any, Any]:
    """Memory at ``address``, ``step`` elements on, as a matrix of columns that lie ``leading`` elements apart."""
    dtype = np.dtype(TYPES[kind])
    size = (shape[1] - 1) * leading + shape[0]
    memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(address + step * dtype.itemsize)
    flat = np.frombuffer(memory, dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, (dtype.itemsize, leading * dtype.itemsize))


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    found = Stand()
    monkeypatch.setattr(_cublas, "_load", lambda: (found.library, ""))
    return found


def problem(dtype: str = "fp32", out_dtype: str | None = None, **changes: Any) -> ConvProblem:
    axes = (Axis(4, 1), Axis(4, 1))
    return ConvProblem(
        Pass.FPROP, 2, 4, 4, axes, dtype=dtype, out_dtype=out_dtype or dtype, device="cuda:any", **changes
    )


@st.composite
def laid(draw: st.DrawFn, batch: int, rows: int, columns: int, result: bool) -> Strided:
    """A batch of matrices in memory: either order, gaps, an offset, batches outermost, between or the same."""
    tall = draw(st.booleans())
    long, short = (columns, rows) if tall else (rows, columns)  # of the stride that is not 1, of the one that is
    gap = draw(st.integers(0, 2))
    place = draw(st.sampled_from(("outer", "between") if result else ("outer", "between", "same")))
    if place == "between":
        leading, step = batch * (short + gap), short + gap
    else:
        leading = short + gap
        step = 0 if place == "same" else long * leading + draw(st.integers(0, 3))
    row, column = (1, leading) if tall else (leading, 1)
    if draw(st.booleans()):
        row, column = as_matrix((rows, columns), (row, column))
    return Strided((batch, rows, columns), (step, row, column), draw(st.integers(0, 5)))


def memory(view: Strided, dtype: torch.dtype) -> torch.Tensor:
    """Room for ``view`` with more behind it, full of NaN."""
    last = sum((size - 1) * stride for size, stride in zip(view.sizes, view.strides, strict=True))
    return torch.full((view.offset + last + 5,), torch.nan, dtype=dtype)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    data=st.data(),
    sizes=st.tuples(*[st.integers(1, 5)] * 4),
    dtypes=st.sampled_from((("fp32", "fp32"), ("fp16", "fp16"), ("fp16", "fp32"))),
    add=st.booleans(),
    images=st.booleans(),
)
def test_any_matrices_that_blas_takes(
    stand: Stand, data: st.DataObject, sizes: tuple[int, ...], dtypes: tuple[str, str], add: bool, images: bool
) -> None:
    batch, rows, columns, depth = sizes
    p = problem(*dtypes, accumulate=add)
    shapes = ((rows, depth), (depth, columns), (rows, columns))
    views = [data.draw(laid(batch, *shape, result=i == 2), "matrix") for i, shape in enumerate(shapes)]
    tensors = [memory(v, p.torch_dtype(role)) for v, role in zip(views, (*p.operands, p.result), strict=True)]
    for view, tensor in zip(views[: 3 if add else 2], tensors, strict=False):
        if view.strides[0] == 0:  # the same matrix for all, written once
            view = Strided((1, *view.sizes[1:]), (1, *view.strides[1:]), view.offset)
        view.of(tensor).copy_(torch.randint(-8, 9, view.sizes) / 8)
    left, right, out = (v.of(t) for v, t in zip(views, tensors, strict=True))
    want = left.double() @ right.double() + (out.double() if add else 0)
    expected = tensors[2].clone()
    views[2].of(expected).copy_(want)
    untouched = [t.clone() for t in tensors[:2]]

    four = [
        Strided((v.sizes[0], 1, *v.sizes[1:]) if images else (1, *v.sizes),
                (v.strides[0], 7, *v.strides[1:]) if images else (7, *v.strides), v.offset)
        for v in views
    ]  # fmt: skip
    run = straight(p, *four, CUDA)
    assert isinstance(run, CublasRun)
    stand.calls.clear()
    b, a, result = tensors
    assert run(a, b, result, None) is result
    assert [call for call, _ in stand.calls if call != "mode"] == ["gemm" if batch == 1 else "batched"]
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)  # sums of eighths are exact
    for before, after in zip(untouched, tensors, strict=False):
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "precision", "calls"),
    [
        ("fp32", "ieee", [("mode", 0), ("gemm", 68)]),
        ("fp32", "tf32", [("gemm", 77)]),
        ("fp16", "ieee", [("gemm", 68)]),
    ],
)
def test_the_call_itself_holds_the_precision(stand: Stand, dtype: str, precision: str, calls: list[Any]) -> None:
    p = problem(dtype, precision=precision)
    view = Strided((1, 1, 4, 4), (16, 16, 4, 1))
    run = straight(p, view, view, view, CUDA)
    assert at_precision(p, run) is run
    tensor, out = (torch.ones(16, dtype=p.torch_dtype("x")) for _ in range(2))
    stand.calls.clear()
    run(tensor, tensor, out, None)
    assert stand.calls == calls
    assert (out == 4).all()


def test_a_status_is_an_error(stand: Stand) -> None:
    view, tensor = Strided((1, 1, 4, 4), (16, 16, 4, 1)), torch.ones(16)
    run = straight(problem(), view, view, view, CUDA)
    for stand.fails, name in ((13, "CUBLAS_STATUS_EXECUTION_FAILED"), (99, "99")):
        with pytest.raises(SolverUnavailable, match=name):
            run(tensor, tensor, torch.ones(16), None)


def test_the_device_is_made_current(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    view, current = Strided((1, 1, 4, 4), (16, 16, 4, 1)), [1]

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *_: object) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)
    seen: list[int] = []
    library = stand.library._replace(handle=lambda: seen.append(current[-1]) or HANDLE)
    monkeypatch.setattr(_cublas, "_load", lambda: (library, ""))
    run = straight(problem(), view, view, view, CUDA)
    run(torch.ones(16), torch.ones(16), torch.ones(16), None)
    assert seen == [0]
    assert current == [1]


def test_what_blas_cannot_say_goes_through_torch(stand: Stand) -> None:
    assert column_major(3, 4, 2, 8) is None, "no stride is 1"
    assert column_major(3, 4, 2, 1) is None, "rows overlap"
    assert column_major(3, 4, 0, 1) is None, "rows are one"
    assert column_major(1, 4, 0, 0) is None, "columns are one"
    assert column_major(1, 4, 99, 7) == (0, 7)
    assert column_major(4, 1, 7, 99) == (1, 7)
    square = Strided((1, 1, 4, 4), (16, 16, 4, 1))
    apart = Strided((1, 1, 4, 4), (32, 32, 8, 2))
    wide = Strided((1, 1, 4, 4), (2**40, 2**40, 2**31, 1))
    grid = Strided((2, 3, 4, 4), (48, 16, 4, 1))
    same = Strided((2, 1, 4, 4), (0, 16, 4, 1))
    twice = Strided((2, 1, 4, 4), (16, 16, 4, 1))
    for views in ((square, apart, square), (wide, square, square), (grid, grid, grid), (twice, twice, same)):
        assert not isinstance(straight(problem(), *views, CUDA), CublasRun)
    assert isinstance(straight(problem(), twice, same, twice, CUDA), CublasRun)
    assert not isinstance(straight(problem(), square, square, square, torch.device("cpu")), CublasRun)


def test_without_the_library_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cublas, "_load", lambda: (None, "not here"))
    assert _cublas.missing() == "not here"
    view, out = Strided((1, 1, 4, 4), (16, 16, 4, 1)), torch.full((4, 4), torch.nan)
    run = straight(problem(), view, view, view, CUDA)
    assert not isinstance(run, CublasRun)
    run(torch.ones(16), torch.ones(16), out, None)
    assert (out == 4).all()


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA")
def test_a_torch_without_cuda_says_why() -> None:
    _cublas._load.cache_clear()
    assert "cuBLAS" in _cublas.missing()


LAYERS = {
    "pointwise": {"axes": (Axis(7, 1), Axis(5, 1))},
    "one image": {"axes": (Axis(7, 1), Axis(5, 1)), "batch": 1},
    "whole": {"axes": (Axis(3, 3, 3), Axis(4, 4, 4))},
    "grouped": {"axes": (Axis(3, 3, 3), Axis(4, 4, 4)), "groups": 2},
    "3d": {"axes": (Axis(2, 2, 2), Axis(3, 3, 3), Axis(3, 3, 3))},
    "1d": {"axes": (Axis(9, 1),)},
}
NAMES = ("gemm", "lowering_type1", "lowering_type2", "lowering_type3")


def layers(device: str, dtype: str, precision: str) -> Iterator[tuple[str, ConvProblem]]:
    """Layers and passes, both layouts, set and added to; some of which need no copy."""
    for (name, changes), pass_, layout, add in itertools.product(
        LAYERS.items(), Pass, ("contiguous", "channels_last"), (False, True)
    ):
        values: dict[str, Any] = {"batch": 3, **changes}
        p = ConvProblem(
            pass_, in_channels=4, out_channels=6, dtype=dtype, precision=precision, device=device,
            layouts=(layout,) * 3, accumulate=add, out_dtype="fp32" if add else dtype, **values,
        )  # fmt: skip
        yield f"{name} {pass_.value} {layout} add={add}", p


def products(p: ConvProblem, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Iterator[tuple[str, Run]]:
    """Every solver's config that is one product by address."""
    for name in NAMES:
        solver = solvers.get(name)
        if solver.why_not(p):
            continue
        for c in solver.configs(p):
            run = solver.bind(p, c, a, b, out)
            if isinstance(run, CublasRun):
                yield f"{name} {c}", run


@pytest.fixture
def everywhere(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> Stand:
    """Has the solvers take tensors on the CPU for tensors on a GPU."""
    for module in (_lowering, _patches, _weight_gradient):
        monkeypatch.setattr(module, "straight", lambda *args: _matmul.straight(*args[:-1], CUDA))
    return stand


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_solvers_products_by_address(everywhere: Stand, dtype: str) -> None:
    met = set()
    for what, p in layers("cuda:any", dtype, "ieee"):
        here = replace(p, device="cpu")
        a, b = make_operands(here)
        want = here.reference(a, b)
        out = make_result(here)
        for name, run in products(p, a, b, out):
            out.fill_(1.0 if p.accumulate else math.nan)
            run(a, b, out, None)
            total = want + 1 if p.accumulate else want
            error = (out.double() - total).norm() / total.norm()
            assert error < BOUNDS[dtype, "ieee"], (what, name)
            met.add((name.split()[0], p.pass_, p.accumulate))
    assert met >= set(itertools.product(NAMES[:2], Pass, (False, True)))


@pytest.mark.parametrize("pass_", list(Pass))
def test_plans_and_their_parts_run_by_address(everywhere: Stand, pass_: Pass) -> None:
    p = ConvProblem(pass_, 5, 3, 8, (Axis(2, 2, 2), Axis(4, 4, 4), Axis(4, 4, 4)), bias=pass_ is Pass.FPROP)
    a, b = make_operands(p)
    gemm, split = solvers.get("gemm"), solvers.get("micro_batch")
    whole = Plan(p.key, "gemm", gemm.version, Config(order="patches"))
    cut = Plan(p.key, split.name, split.version, Config(sizes=(2, 2, 1)), (whole, whole), (2, 1))
    bias = torch.randn(8) if p.bias else None
    want = p.reference(a, b)
    if bias is not None:
        want += bias.view(-1, 1, 1, 1)
    for plan, calls in ((whole, 1), (cut, 3)):
        bound = bind(plan, p, a, b)
        everywhere.calls.clear()
        error = (bound(a, b, bias).double() - want).norm() / want.norm()
        assert error < 1e-5
        assert everywhere.calls == [("mode", 0), ("gemm", 68)] * calls
        assert bound._addressed is not None
