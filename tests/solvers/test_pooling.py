"""Every solver of pooling against float64, our kernel's vectors, threads and bits, and what it does not take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.pooling import poolings
from tests.sampling import some
from tests.solvers.cpu_runs import at_once

from tilewise import execute
from tilewise.kernels.cpu.sizes import LANES
from tilewise.plan import Config, Plan
from tilewise.planner import Options, Planner
from tilewise.problems.base import as_tuple, dense_strides
from tilewise.problems.pooling.checks import errors_of, operands_of_kind
from tilewise.problems.pooling.problem import PoolingProblem
from tilewise.solvers import SolverUnavailable, get, solving

OURS: Any = get("window_pooling")
needs_numba = pytest.mark.skipif(
    bool(OURS.why_not(PoolingProblem("max", 1, 1, (4,), (2,), (2,)))), reason="the solver needs Numba"
)
CPU = torch.device("cpu")
BOUND = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 2e-2}


def computed(solver: Any, p: PoolingProblem, c: Config, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All results, after a look at their layout, and at whether operands were written."""
    before = [t.clone() for t in operands]
    run = solver.bind_checked(p, c, *operands, *(None for _ in p.results))
    results = as_tuple(run(*operands, *(None for _ in p.results), None))
    torch.testing.assert_close(list(operands), before, rtol=0, atol=0, equal_nan=True)
    for role, t in zip(p.results, results, strict=True):
        assert tuple(t.shape) == p.shape(role)
        assert t.dtype is p.torch_dtype(role)
        if solver is OURS:
            assert t.stride() == dense_strides(p.shape(role), p.layout(role))
    return results


def worst(solver: Any, p: PoolingProblem, c: Config) -> float:
    """The L2 error."""
    return errors_of(p, lambda *tensors: computed(solver, p, c, *tensors[: len(p.operands)])).l2


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_torchs_way_is_right(dtype: str) -> None:
    @settings(max_examples=15, suppress_health_check=list(HealthCheck), deadline=None)
    @given(p=poolings(dtype=dtype))
    def drawn(p: PoolingProblem) -> None:
        # Torch's kernel for volumes in channels_last gives the gradient of a window of nothing but -inf to another
        # element.
        known = (p.op, p.task, p.layout_name, len(p.space)) == ("max", "training", "channels_last", 3)
        if not known and not get("aten_pooling").why_not(p):
            assert worst(get("aten_pooling"), p, Config()) < BOUND[dtype], p.key

    drawn()


@needs_numba
@settings(max_examples=some(60), suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data(), p=poolings(dtype="fp32"))
def test_the_kernel_is_right(data: st.DataObject, p: PoolingProblem) -> None:
    c = Config(lanes=LANES[-1], threads=data.draw(st.sampled_from((1, 2, 5)), "threads"))
    assert worst(OURS, p, c) < BOUND["fp32"], p.key


@needs_numba
@pytest.mark.slow
@pytest.mark.parametrize("lanes", LANES)
def test_the_kernel_is_right_with_vectors_of_any_width(lanes: int) -> None:
    @settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)
    @given(data=st.data(), p=poolings(dtype="fp32"))
    def drawn(data: st.DataObject, p: PoolingProblem) -> None:
        c = Config(lanes=lanes, threads=data.draw(st.sampled_from((1, 2, 5)), "threads"))
        assert worst(OURS, p, c) < BOUND["fp32"], p.key

    drawn()


@needs_numba
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_change_a_bit(layout: str, threads: int) -> None:
    """Nor does the way differ from torch's in a bit: maxima are copied, and gradients are added in its order."""
    p = PoolingProblem("max", 2, 5, (37, 41), (3, 3), (2, 2), (1, 1), task="training", layout_name=layout)
    operands = operands_of_kind(p, "equal", 1)
    want = computed(get("aten_pooling"), p, Config(), *operands)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for c in (Config(lanes=4, threads=threads, team=team) for team in ("openmp", "own")):
            torch.testing.assert_close(computed(OURS, p, c, *operands), want, rtol=0, atol=0)
    finally:
        torch.set_num_threads(before)


@needs_numba
def test_several_callers_may_run_it_at_once() -> None:
    p = PoolingProblem("max", 2, 3, (17, 19), (3, 3), (2, 2), task="training")
    operands = operands_of_kind(p, "normal", 1)
    run = OURS.bind(p, Config(lanes=4, threads=2), *operands, None, None)
    want = run(*operands, None, None, None)
    for got in at_once(lambda: run(*operands, None, None, None), 3):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@needs_numba
def test_the_largest_window_that_a_byte_counts() -> None:
    """The last of 256 elements is number 255: it is neither taken for a negative number nor for none."""
    p = PoolingProblem("max", 1, 2, (33, 35), (16, 16), (3, 3), task="training")
    assert worst(OURS, p, Config(lanes=4, threads=1)) < 1e-6
    assert OURS.why_not(replace(p, kernel=(16, 17))) == [
        "keeps a byte for each result: for windows of up to 256 elements, not 272"
    ]
    assert OURS.why_not(replace(p, kernel=(16, 17), task="inference")) == []


@needs_numba
@pytest.mark.parametrize("c", [Config(), Config(lanes=5, threads=1), Config(lanes=4, threads=0)])
def test_what_is_no_config_is_refused(c: Config) -> None:
    with pytest.raises(SolverUnavailable, match="is no config of pool max"):
        OURS.pooler(PoolingProblem("max", 1, 1, (4,), (2,), (2,)), c, CPU)


@pytest.mark.parametrize("op", ["max", "avg"])
def test_a_plan_in_parts_of_the_batch_computes_the_whole(op: str) -> None:
    p = PoolingProblem(op, 3, 5, (13, 9), (3, 3), (2, 2), (1, 1), task="training", layout_name="channels_last")
    split, leaf = get("pooling_blocks"), get("aten_pooling")
    assert split.why_not(replace(p, batch=1)) == ["a batch of 1 cannot be divided"]
    parts = [replace(p, batch=size) for size in (2, 1)]
    children = tuple(Plan(part.key, leaf.name, leaf.version, Config()) for part in parts)
    plan = Plan(p.key, split.name, split.version, Config(sizes=(2, 1)), children=children, counts=(1, 1))
    bound = execute.bind(plan, p, *operands_of_kind(p, "normal", 1))
    assert errors_of(p, lambda x, dy, *rest: bound.call(x, dy)).l2 <= BOUND["fp32"]


def test_a_limit_below_what_torch_keeps_divides_the_batch() -> None:
    p = PoolingProblem("max", 8, 4, (32, 32), (2, 2), (2, 2), task="training")
    whole = get("aten_pooling").hidden_workspace(p, Config())
    others = tuple(s.name for s in solving(PoolingProblem) if s.name not in ("aten_pooling", "pooling_blocks"))
    plan = Planner().plan(p, Options(workspace=whole // 2 + p.nbytes("y") // 2, exclude=others))
    assert plan.solver == "pooling_blocks"


def test_what_is_kept_is_a_byte_a_result() -> None:
    p = PoolingProblem("max", 2, 3, (8, 8), (2, 2), (2, 2), task="training")
    assert OURS.hidden_workspace(p, Config()) == 2 * 3 * 4 * 4
    assert get("aten_pooling").hidden_workspace(p, Config()) == 8 * 2 * 3 * 4 * 4
    assert OURS.hidden_workspace(replace(p, op="avg"), Config()) == 0
