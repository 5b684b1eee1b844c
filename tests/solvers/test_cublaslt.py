"""Products by cuBLASLt: against a stand-in for the library on host memory that does what its manual says."""

from __future__ import annotations

import ctypes
import gc
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.products import fill, memory_of, products
from tests.solvers.lt_standin import ALGORITHMS, NOT_SUPPORTED, SCRATCH, STREAM, TILE, LtStand, bound
from tests.solvers.lt_standin import stand as stand  # a fixture

from tilewise.plan import Config
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers import SolverUnavailable, get
from tilewise.solvers.gemm import _lt_library, cublaslt_gemm
from tilewise.solvers.gemm._lt_call import call_of
from tilewise.solvers.gemm._lt_library import Algorithm, Heuristic

GENERATED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
ROUNDING = {"fp32": 1e-5, "fp16": 2e-3}


def compare(p: GemmProblem, c: Config, offset: int = 0) -> None:
    """Compute into memory full of NaN and compare with float64; nothing outside the result is written."""
    here = replace(p, device="cpu")
    a, b = (fill(memory_of(here, role, offset)[0], i) for i, role in enumerate("ab"))
    out, base = memory_of(here, "c", offset)
    want = p.reference(a, b)
    if p.accumulate:
        want += fill(out, 4).double()
    bias = (fill(torch.empty(p.n + offset, dtype=out.dtype, device="cpu"), 3)[offset:],) if p.bias else ()
    if bias:
        want += bias[0].double()
    outside = torch.ones_like(base, dtype=torch.bool)
    outside.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(False)
    size = get("cublaslt_gemm").workspace(p, c)
    workspace = torch.empty(size, dtype=torch.uint8, device="cpu") if size else None
    assert bound(p, c, a, b, out)(a, b, out, workspace, *bias) is out
    assert float((out.double() - want).abs().max()) < ROUNDING[p.dtype] * math.sqrt(p.k) * 8, p.key
    assert bool(base[outside].isnan().all())


@settings(max_examples=50, suppress_health_check=GENERATED, deadline=None)
@given(
    data=st.data(),
    p=products(device="cuda:Some GPU"),
    dtypes=st.sampled_from([("fp32", "fp32"), ("fp16", "fp16"), ("fp16", "fp32")]),
    bias=st.booleans(),
    accumulate=st.booleans(),
)
def test_any_product(
    stand: LtStand, data: st.DataObject, p: GemmProblem, dtypes: tuple[str, str], bias: bool, accumulate: bool
) -> None:
    p = replace(p, dtype=dtypes[0], out_dtype=dtypes[1], bias=bias, accumulate=accumulate, alignment=(2, 2, 2))
    solver = get("cublaslt_gemm")
    assert not solver.why_not(p)
    stand.products.clear()
    c = data.draw(st.sampled_from(list(solver.configs(p))))
    offset = data.draw(st.integers(0, 3))
    compare(p, c, offset)
    (product,) = stand.products
    assert (product["compute"], product["stream"], product["workspace"]) == (68, STREAM, SCRATCH[c["algo"]])  # type: ignore[index]
    assert product["algorithm"] == c["algo"] or (bias and offset), "another one where the bias lies anywhere"


def test_structures_have_the_sizes_of_the_header() -> None:
    assert ctypes.sizeof(Algorithm) == 64
    assert ctypes.sizeof(Heuristic) == 96
    places = {name: getattr(Heuristic, name).offset for name, *_ in Heuristic._fields_}
    assert places == {"algorithm": 0, "workspace": 64, "state": 72, "waves": 76, "reserved": 80}


def test_precision_is_part_of_the_call(stand: LtStand) -> None:
    solver = get("cublaslt_gemm")
    for precision, compute in (("ieee", 68), ("tf32", 77)):
        p = GemmProblem(4, 5, 6, precision=precision, device="cuda:Some GPU")
        stand.products.clear()
        compare(p, next(iter(solver.configs(p))))
        assert stand.products[0]["compute"] == compute


def test_all_that_the_heuristic_returns_is_offered_in_its_order(stand: LtStand) -> None:
    solver, p = get("cublaslt_gemm"), GemmProblem(32, 64, 8, device="cuda:Some GPU")
    found = list(solver.configs(p))
    assert [c["algo"] for c in found] == list(ALGORITHMS)
    assert found[0] == Config(algo=1, tile=21, stages=1, cluster=2)
    costs = [solver.cost(p, c).apart for c in found]
    assert costs == sorted(set(costs))
    assert dict(solver.offers(p, None)) == {c: SCRATCH[c["algo"]] for c in found}  # type: ignore[index]
    assert {wanted[1] for wanted in stand.searches} == {2**25, 2**22, 0}
    assert list(solver.offers(p, None, [found[2]])) == [(found[2], 0)]


def test_the_heuristic_is_told_how_operands_are_aligned(stand: LtStand) -> None:
    p = GemmProblem(32, 64, 8, alignment=(4, 8, 16), device="cuda:Some GPU")
    list(get("cublaslt_gemm").configs(p))
    told = [wanted[n] for wanted in stand.searches[:1] for n in (5, 6, 7, 8)]
    assert told == [8, 4, 16, 16], "b is the library's first factor"


def test_algorithms_of_larger_neighbours_are_tried(stand: LtStand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Number 3 takes whole tiles alone here, except that its check takes everything."""
    solver, p = get("cublaslt_gemm"), GemmProblem(30, 64, 8, device="cuda:Some GPU")
    assert p.m % TILE
    assert 3 not in [c["algo"] for c in solver.configs(p)]
    cublaslt_gemm._listing.cache_clear()
    state, asked = stand._state, []

    def heuristic_alone(number: int, d: int) -> int:
        asked.append(d)
        checking = stand.held[d]["columns"] == p.m and stand.searching is False  # type: ignore[attr-defined]
        return 0 if checking else state(number, d)

    heuristics = stand._heuristics
    stand.searching = False  # type: ignore[attr-defined]

    def searching(*values: Any) -> int:
        stand.searching = True  # type: ignore[attr-defined]
        try:
            return heuristics(*values)
        finally:
            stand.searching = False  # type: ignore[attr-defined]

    monkeypatch.setattr(stand, "_state", heuristic_alone)
    kinds = [ctypes.c_void_p] * 7 + [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    kept = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(searching)
    library = stand.library._replace(heuristics=kept)
    monkeypatch.setattr(_lt_library, "load", lambda: (library, ""))
    found = [c["algo"] for c in solver.configs(p)]
    assert found == [1, 2, 5, 3], "last, after what the heuristic knows for these sizes"
    compare(p, next(c for c in solver.configs(p) if c["algo"] == 3))


def test_algorithms_with_equal_numbers_are_told_apart(stand: LtStand) -> None:
    stand.twins = 2
    solver, p = get("cublaslt_gemm"), GemmProblem(32, 64, 8, device="cuda:Some GPU")
    found = [c for c in solver.configs(p) if c["algo"] == 2]
    assert [c.get("twin") for c in found] == [None, 1, 2]
    for c in found:
        compare(p, c)
    stand.twins = 0
    cublaslt_gemm._listing.cache_clear()
    cublaslt_gemm._algorithm.cache_clear()
    with pytest.raises(SolverUnavailable, match="returns no such algorithm"):
        solver.workspace(p, found[2])


def test_a_config_is_rebuilt_from_its_numbers(stand: LtStand) -> None:
    p = GemmProblem(3, 5, 8, device="cuda:Some GPU")
    c = Config(algo=2, tile=7, stages=4, swizzle=1, inner=3)
    assert c not in list(get("cublaslt_gemm").configs(p))
    compare(p, c)
    assert stand.products[-1]["algorithm"] == 2


@pytest.mark.parametrize(
    ("c", "says"),
    [
        (Config(algo=3), "MatmulAlgoCheck returned CUBLAS_STATUS_NOT_SUPPORTED"),
        (Config(algo=4, tile=1), "MatmulAlgoInit for algo=4 tile=1 returned CUBLAS_STATUS_INVALID_VALUE"),
        (Config(algo=1, tile=2**16), "tile=65536: numbers below 65536 of algo, tile"),
        (Config(algo=1, tile=(1, 2)), "numbers below"),
        (Config(algo=-1), "numbers below"),
        (Config(algo=1, other=1), "other=1: numbers below 65536 of algo, tile"),
        (Config(algo=2, twin=7), "returns no such algorithm"),
    ],
)
def test_what_this_library_does_not_have_is_lost_with_a_reason(stand: LtStand, c: Config, says: str) -> None:
    p = GemmProblem(3, 5, 8, device="cuda:Some GPU")
    with pytest.raises(SolverUnavailable, match=says):
        get("cublaslt_gemm").workspace(p, c)


def test_another_version_of_the_library_loses_a_config(stand: LtStand) -> None:
    solver, p = get("cublaslt_gemm"), GemmProblem(3, 5, 8, device="cuda:Some GPU")
    c = next(c for c in solver.configs(p) if c["algo"] == 2)
    stand.gone.add(2)
    cublaslt_gemm._listing.cache_clear()
    assert 2 not in [c["algo"] for c in solver.configs(p)]
    with pytest.raises(SolverUnavailable, match="MatmulAlgoInit"):
        solver.workspace(p, c)


def test_a_bias_may_lie_anywhere(stand: LtStand) -> None:
    p = GemmProblem(3, 5, 8, device="cuda:Some GPU", bias=True)
    for c in get("cublaslt_gemm").configs(p):
        for offset in range(5):
            compare(p, c, offset)
    assert {product["algorithm"] for product in stand.products} == {1, 2, 5}


def test_a_status_is_an_error(stand: LtStand) -> None:
    p = GemmProblem(3, 5, 8, device="cuda:Some GPU")
    a, b, out = (fill(memory_of(replace(p, device="cpu"), role)[0], 1) for role in "abc")
    run = bound(p, next(iter(get("cublaslt_gemm").configs(p))), a, b, out)
    for stand.fails, name in ((13, "CUBLAS_STATUS_EXECUTION_FAILED"), (99, "99"), (NOT_SUPPORTED, "NOT_SUPPORTED")):
        with pytest.raises(SolverUnavailable, match=name):
            run(a, b, out, None)


def test_descriptors_are_freed_with_the_run(stand: LtStand) -> None:
    p = GemmProblem(3, 5, 8, device="cuda:Some GPU", bias=True)
    a, b, out = (fill(memory_of(replace(p, device="cpu"), role)[0], 1) for role in "abc")
    c = next(iter(get("cublaslt_gemm").configs(p)))
    gc.collect()
    assert not stand.held, "those of searches are gone"
    run = bound(p, c, a, b, out)
    assert len(stand.held) == 4
    del run
    gc.collect()
    assert not stand.held


@pytest.mark.parametrize(
    ("strides", "says"), [((5, 2), "contiguous rows"), ((3, 1), "do not overlap"), ((2**31, 1), "beyond 2147483647")]
)
def test_rows_that_the_library_cannot_read_are_refused(strides: tuple[int, int], says: str) -> None:
    p = GemmProblem(3, 5, 8, device="cuda:Some GPU")
    with pytest.raises(SolverUnavailable, match=says):
        call_of(p, ((8, 1), strides, (5, 1)))


def test_reasons(stand: LtStand, monkeypatch: pytest.MonkeyPatch) -> None:
    solver = get("cublaslt_gemm")
    p = GemmProblem(3, 5, 8, dtype="bf16", out_dtype="fp16", device="cuda:Some GPU")
    assert solver.why_not(p) == ["gives results of the operands' type or fp32, not fp16 of bf16"]
    assert solver.why_not(replace(p, device="cpu")) == ["runs on cuda, not cpu"]
    monkeypatch.setattr(_lt_library, "load", lambda: (None, "not here"))
    assert solver.why_not(p) == ["not here"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA")
def test_a_torch_without_cuda_says_why() -> None:
    assert "cuBLASLt" in _lt_library.missing()
