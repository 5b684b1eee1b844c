"""Every solver of local response normalization against float64: odd sizes, any number of threads, both layouts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.lrn import norms

from tilewise import execute
from tilewise.kernels.cpu.threads import has_openmp
from tilewise.plan import Config, Error, Plan
from tilewise.problems.base import as_tuple
from tilewise.problems.lrn.checks import errors_of
from tilewise.problems.lrn.problem import LrnProblem
from tilewise.problems.operands import make_operands, make_results
from tilewise.solvers import Solver, SolverUnavailable, Split, get, solving
from tilewise.solvers.common.cpu_run import vector_lanes

LEAVES: list[Any] = [solver for solver in solving(LrnProblem) if not isinstance(solver, Split)]
BOUND = {"fp32": 3e-6, "fp16": 5e-3, "bf16": 0.05}
PLAIN = LrnProblem(3, 33, (7, 9), 5, task="training")
TEAMS = ("own", "openmp") if has_openmp() else ("own",)


def check(solver: Solver, p: LrnProblem, c: Config) -> None:
    """Compare with float64. Where a gradient is the difference of numbers that are nearly equal, torch's is as far."""
    error = error_of(solver, p, c)
    if error.l2 > BOUND[p.dtype] and solver.name != "aten_lrn":
        assert error.l2 <= 2 * error_of(get("aten_lrn"), p, Config()).l2, f"{p.key} {c}: {error}"
    else:
        assert error.l2 <= BOUND[p.dtype], f"{p.key} {c}: {error}"


def error_of(solver: Solver, p: LrnProblem, c: Config) -> Error:
    """The error, with results and workspace that begin as NaN and operands that must stay as they are."""
    count, results = len(p.operands), make_results(p)
    run = solver.bind_checked(p, c, *make_operands(p), *(None if solver.own_output else t for t in results))
    size = solver.workspace(p, c)

    def compute(*tensors: Any) -> Any:
        operands, into = tensors[:count], tensors[count + 1 :]
        before = [t.clone() for t in operands]
        workspace = torch.full((size // 4,), float("nan"), dtype=torch.float32).view(torch.uint8) if size else None
        got = as_tuple(run(*operands, *into, workspace))
        for t, old in zip(operands, before, strict=True):
            assert torch.equal(t, old), "wrote an operand"
        for t in got:
            assert tuple(t.shape) == p.shape("x")
            assert t.dtype is p.torch_dtype("x")
        return got

    return errors_of(p, compute)


@settings(max_examples=10, suppress_health_check=list(HealthCheck), deadline=None)
@given(p=norms())
def test_torchs_way_computes_every_problem(p: LrnProblem) -> None:
    if not get("aten_lrn").why_not(p):
        check(get("aten_lrn"), p, Config())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_torchs_way_refuses_what_torch_refuses(dtype: str) -> None:
    """torch pools planes in these types on no CPU. If it does one day, the reason can go."""
    p = replace(PLAIN, task="inference", dtype=dtype)
    (x,) = make_operands(p)
    with pytest.raises(NotImplementedError, match="not implemented"):
        torch.nn.functional.local_response_norm(x, p.size, p.alpha, p.beta, p.k)
    assert get("aten_lrn").why_not(p) == [f"torch pools channels of images on a CPU in fp32 alone, not {dtype}"]


@settings(max_examples=20, suppress_health_check=list(HealthCheck), deadline=None)
@given(
    p=norms(dtype="fp32", beta=0.75), threads=st.sampled_from((1, 2, 5)), lanes=st.just(vector_lanes()),
    team=st.sampled_from(TEAMS),
)  # fmt: skip
def test_a_window_computes_torchs_default_power(p: LrnProblem, threads: int, lanes: int, team: str) -> None:
    solver = get("channel_window")
    assert not solver.why_not(p)
    with_threads(5, solver, p, Config(lanes=lanes, threads=threads, team=team))


@pytest.mark.slow
@settings(max_examples=80, suppress_health_check=list(HealthCheck), deadline=None)
@given(p=norms(dtype="fp32"), threads=st.sampled_from((1, 2, 5)), lanes=st.sampled_from((4, 8, 16)))
def test_a_window_computes_every_power(p: LrnProblem, threads: int, lanes: int) -> None:
    with_threads(5, get("channel_window"), p, Config(lanes=lanes, threads=threads, team="own"))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_window_computes_a_power_that_no_roots_make(layout: str) -> None:
    with_threads(
        2, get("channel_window"), replace(PLAIN, beta=0.6, layout_name=layout), Config(lanes=vector_lanes(), threads=2)
    )


def with_threads(count: int, solver: Solver, p: LrnProblem, c: Config) -> None:
    """:func:`check` while torch has ``count`` threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        check(solver, p, c)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("beta", "layout"), list(itertools.product((0.75, 0.6), ("contiguous", "channels_last"))))
def test_nan_and_infinity_reach_the_channels_whose_windows_they_are_in_and_no_others(beta: float, layout: str) -> None:
    p = replace(PLAIN, task="inference", beta=beta, layout_name=layout)
    solver = get("channel_window")
    for value in (float("nan"), float("inf"), 1e30):
        (x,), (y,) = make_operands(p, 1), make_results(p)
        x[1, 17, 3, 4] = value
        c = next(iter(solver.configs(p)))
        solver.bind_checked(p, c, x, y)(x, y, None)
        want = torch.nn.functional.local_response_norm(x, p.size, p.alpha, p.beta, p.k)
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"k": 0.0}, "takes k from"),
        ({"k": -1.0}, "takes k from"),
        ({"alpha": -1.0}, "takes alpha from 0"),
        ({"beta": 5.0}, "takes beta from 0 to 4.0, not 5.0"),
        ({"beta": -0.5}, "takes beta from 0"),
        ({"dtype": "bf16"}, "takes fp32, not bf16"),
        ({"device": "cuda:Some GPU"}, "runs on cpu, not cuda"),
    ],
)
def test_a_window_says_what_it_does_not_take(changes: dict[str, Any], says: str) -> None:
    reasons = get("channel_window").why_not(replace(PLAIN, **changes))
    assert any(says in reason for reason in reasons)


@pytest.mark.parametrize("c", [Config(), Config(lanes=3, threads=1), Config(lanes=8, threads=0)])
def test_a_config_of_others_is_refused(c: Config) -> None:
    with pytest.raises(SolverUnavailable, match="is no config of"):
        get("channel_window").passes(PLAIN, c, torch.device("cpu"))  # type: ignore[attr-defined]


def test_tensors_that_are_not_dense_are_refused() -> None:
    tensors = [t.mT.contiguous().mT for t in (*make_operands(PLAIN), *make_results(PLAIN))]
    solver = get("channel_window")
    with pytest.raises(SolverUnavailable, match="takes dense tensors in the layout contiguous"):
        solver.bind_checked(PLAIN, next(iter(solver.configs(PLAIN))), *tensors)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("leaf", [leaf for leaf in LEAVES if "cpu" in leaf.devices], ids=lambda leaf: leaf.name)
def test_a_plan_in_parts_of_the_batch_computes_the_whole(leaf: Any, layout: str) -> None:
    p = replace(PLAIN, layout_name=layout)
    split = get("image_blocks")
    sizes = (2, 1)
    children = []
    for size in sizes:
        child = split.child(p, size)  # type: ignore[attr-defined]
        children.append(Plan(child.key, leaf.name, leaf.version, next(iter(leaf.configs(child)))))
    plan = Plan(p.key, split.name, split.version, Config(sizes=sizes), children=tuple(children), counts=(1, 1))
    bound = execute.bind(plan, p, *make_operands(p))
    assert errors_of(p, lambda x, dy, bias, y, dx: bound.call(x, dy)).l2 <= BOUND["fp32"]


@pytest.mark.parametrize("solver", LEAVES, ids=lambda s: s.name)
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(p=norms())
def test_declarations_agree(solver: Solver, p: LrnProblem) -> None:
    p = p if "cpu" in solver.devices else replace(p, device="cuda:Some GPU")
    if solver.why_not(p):
        return
    for c in solver.configs(p):
        assert Config.from_key(c.key) == c
        assert solver.workspace(p, c) >= 0
        assert solver.hidden_workspace(p, c) >= 0
        cost = solver.cost(p, c)
        assert cost.flops >= p.flops
        assert 0 < cost.efficiency <= 1
