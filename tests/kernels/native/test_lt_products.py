"""Products by cuBLASLt that are queued from C: as those by ctypes, against stand-ins for the library and the driver."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.native.conftest import STREAM
from tests.kernels.native.standin import Standin
from tests.products import fill, memory_of, products
from tests.solvers.lt_standin import LtStand, bound
from tests.solvers.lt_standin import stand as stand  # a fixture

from tilewise.kernels.native import building
from tilewise.kernels.native.sequence import Address, LtProduct, joined, launch_list
from tilewise.plan import Config
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers import SolverUnavailable, get
from tilewise.solvers.gemm._lt_run import LtRun

GENERATED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
SCRATCH = Config(algo=2, tile=22, stages=2, cluster=2)
"""An algorithm of the stand-in that needs a workspace."""


@pytest.fixture(autouse=True)
def _no_gpu_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())


def fail(*given: object) -> None:
    raise AssertionError(f"called from Python with {given}")


def tensors(p: GemmProblem) -> tuple[torch.Tensor, ...]:
    """Operands, a result, a workspace and a bias."""
    here = replace(p, device="cpu")
    a, b, out = (fill(memory_of(here, role)[0], i) for i, role in enumerate("abc"))
    workspace = torch.empty(2**12, dtype=torch.uint8, device="cpu")
    return a, b, out, workspace, fill(torch.empty(p.n, dtype=out.dtype, device="cpu"), 3)


def run_of(p: GemmProblem, c: Config) -> tuple[LtRun, tuple[torch.Tensor, ...]]:
    found = tensors(p)
    return bound(p, c, *found[:3]), found


@settings(max_examples=50, suppress_health_check=GENERATED, deadline=None)
@given(
    p=products(device="cuda:Some GPU"),
    dtype=st.sampled_from(("fp32", "fp16")),
    bias=st.booleans(),
    accumulate=st.booleans(),
    c=st.sampled_from((Config(algo=1), SCRATCH)),
    offset=st.integers(0, 4),
)
def test_the_same_call_and_the_same_bits(
    stand: LtStand,
    on_standin: Standin,
    p: GemmProblem,
    dtype: str,
    bias: bool,
    accumulate: bool,
    c: Config,
    offset: int,
) -> None:
    p = replace(p, dtype=dtype, out_dtype="fp32" if accumulate else dtype, bias=bias, accumulate=accumulate)
    run, (a, b, out, workspace, added) = run_of(p, c)
    native = launch_list(run.sequence, fail)
    assert native is not None
    added = torch.cat([added.new_zeros(offset), added])[offset:]  # at any address
    before, results = out.clone(), []
    stand.products.clear()
    places = [t.data_ptr() for t in (a, b, out, workspace, *((added,) if bias else ()))]
    for call in (run.run_pointers, functools.partial(native, STREAM)):
        out.copy_(before)
        call(*places)
        results.append(out.clone())
    assert torch.equal(*results)
    assert not torch.equal(results[0], before)
    assert stand.products[0] == stand.products[1]


def test_a_bias_is_each_calls_own(stand: LtStand, on_standin: Standin) -> None:
    p = GemmProblem(3, 50, 4, device="cuda:Some GPU", bias=True)
    run, (a, b, _, _, bias) = run_of(p, Config(algo=1))
    native, plain = launch_list(run.sequence, fail), a @ b
    assert native is not None
    found: list[bool] = []

    def work(scale: int) -> None:
        own = bias * scale
        for _ in range(30):
            out = torch.empty(p.m, p.n, dtype=torch.float32, device="cpu")
            native(STREAM, a.data_ptr(), b.data_ptr(), out.data_ptr(), 0, own.data_ptr())
            found.append(torch.allclose(out, plain + own, rtol=1e-5, atol=1e-5))

    threads = [threading.Thread(target=work, args=(scale,)) for scale in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 90
    assert all(found)


def test_a_status_is_the_same_error(stand: LtStand, on_standin: Standin) -> None:
    p = GemmProblem(3, 5, 4, device="cuda:Some GPU")
    run, held = run_of(p, Config(algo=1))
    native = launch_list(run.sequence, fail)
    assert native is not None
    places = [t.data_ptr() for t in held[:3]]
    for stand.fails, name in ((13, "CUBLAS_STATUS_EXECUTION_FAILED"), (99, "cublasLtMatmul returned 99")):
        with pytest.raises(SolverUnavailable, match=name):
            native(STREAM, *places)
    stand.fails = 0
    native(STREAM, *places)
    torch.testing.assert_close(held[2], held[0] @ held[1])


def test_sequences_move_join_and_keep_their_descriptors(stand: LtStand, on_standin: Standin) -> None:
    p = GemmProblem(3, 5, 4, device="cuda:Some GPU", bias=True)
    run, _ = run_of(p, SCRATCH)
    (moved,) = run.sequence.moved((8, 16, 24)).launches
    assert moved.parameters == (Address(1, 16), Address(0, 8), Address(2, 24), Address(3, 0), Address(4, 0))
    assert run.sequence.sources == 5
    whole = joined([run.sequence, run.sequence])
    assert whole is not None
    native = launch_list(whole, fail)
    del run, whole, moved
    gc.collect()
    assert len(stand.held) == 8, "those of both products; the run's own are freed"
    del native
    gc.collect()
    assert not stand.held


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"function": 0}, "64 bytes of each algorithm"),
        ({"algorithms": (b"short", bytes(64))}, "64 bytes of each algorithm"),
        ({"parameters": (Address(0, 0),) * 3}, "64 bytes of each algorithm"),
        ({"parameters": (Address(0, 0), Address(1, 0), Address(9, 0), None, None)}, "source 9: 0 to 2 would do"),
        ({"parameters": (Address(0, 0), None, Address(2, 0), None, None)}, "would do"),
        ({"parameters": (Address(0, 0), Address(1, 0), Address(2, 0), None, b"12345678")}, "would do"),
        ({"matrices": (1, 2)}, "described by sequence.py"),
        ({"scales": 1.0}, "described by sequence.py"),
    ],
)
def test_what_is_no_product_is_refused(
    stand: LtStand, on_standin: Standin, change: dict[str, Any], message: str
) -> None:
    run, _ = run_of(GemmProblem(3, 5, 4, device="cuda:Some GPU"), Config(algo=1))
    (product,) = run.sequence.launches
    assert isinstance(product, LtProduct)
    found = building.native()
    assert found is not None
    with pytest.raises((TypeError, ValueError), match=message):
        found.module.LaunchList(found.driver, 3, (product._replace(**change),), (), fail)


def test_the_config_with_a_workspace_has_one(stand: LtStand) -> None:
    assert get("cublaslt_gemm").workspace(GemmProblem(3, 5, 4, device="cuda:Some GPU"), SCRATCH) == 4096
