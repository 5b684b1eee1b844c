"""Fused lowering on a CPU: the compiled kernels over generated layers, types, blocks, chunks, strides and threads."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.solvers.cpu_runs import run_poisoned
from tests.solvers.test_solvers import Memory, check
from tests.strategies import problems, with_memory

from tilewise.kernels.cpu.lowering.lowered import SHAPES, side
from tilewise.plan import Config
from tilewise.planner import Options, Planner
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers import SolverUnavailable
from tilewise.solvers.common.cpu_run import WIDEST
from tilewise.solvers.lowering.fused_lowering import FusedLowering

pytest.importorskip("numba")
SOLVER = FusedLowering()
LANES = WIDEST.get(torch.backends.cpu.get_cpu_capability(), 4)
BOUND = 1e-6
PASSES = sorted(SOLVER.passes, key=str)
TILES = ((3, 8), (4, 3)) if LANES == 16 else SHAPES[LANES][:2]
"""Few, since each is compiled."""


def run(p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """In a workspace full of NaN."""
    return run_poisoned(SOLVER, p, c, a, b, out)


def error(p: ConvProblem, got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    want = p.reference(a, b)
    return float((got.double() - want).norm() / want.norm())


def by_type(p: ConvProblem) -> dict[int, Config]:
    """The first config of each."""
    found: dict[int, Config] = {}
    for c in SOLVER.configs(p):
        kind = c["type"]
        assert isinstance(kind, int)
        found.setdefault(kind, c)
    return found


def changed(c: Config, **changes: object) -> Config:
    return Config(**{**c, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("pass_", PASSES)
def test_any_layer_in_any_blocks(pass_: Pass) -> None:
    """Groups, strides, dilation and cropping, in one to three dimensions, with filters that are kept or not."""

    @settings(max_examples=15, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
    @given(with_memory(problems(pass_), lambda p: not SOLVER.why_not(p)), st.data())
    def any_layer(found: tuple[ConvProblem, Memory], data: st.DataObject) -> None:
        filtered = pass_ is not Pass.WGRAD
        constant, bias = (filtered and data.draw(st.booleans(), name) for name in ("constant", "bias"))
        p = replace(found[0], constant_weight=constant, bias=bias)
        if pass_ is Pass.FPROP:
            activation = data.draw(st.sampled_from(("none", "relu", "hardswish")), "activation")
            p = replace(p, residual=data.draw(st.booleans(), "residual"), activation=activation)
        for c in by_type(p).values():
            changes: dict[str, object] = {
                "block": data.draw(st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 9)), "block"),
                "channels": data.draw(st.integers(1, 4), "channels"),
                "tile": data.draw(st.sampled_from(TILES), "tile"),
            }
            if pass_ is Pass.WGRAD:
                changes["shares"] = data.draw(st.integers(1, 3), "shares")
            check(SOLVER, p, changed(c, **changes), found[1], accumulate=False)

    any_layer()


def first_layers(pass_: Pass) -> list[ConvProblem]:
    """Few channels and long strides, as first layers have them, and what is odd in other ways."""
    return [
        ConvProblem(pass_, 2, 3, 40, (Axis(67, 11, 4, 1, 2, 2),) * 2),
        ConvProblem(pass_, 3, 3, 17, (Axis(45, 7, 2, 1, 3, 3), Axis(52, 7, 2, 1, 3, 2))),
        ConvProblem(pass_, 2, 20, 35, (Axis(19, 3, 1, 3, 3, 3), Axis(33, 3, 1, 2, 2, 2))),
        ConvProblem(pass_, 1, 130, 9, (Axis(14, 3, 1, 1, 1, 1),) * 2),
        ConvProblem(pass_, 2, 3, 9, (Axis(2000, 9, 5, 1, 4, 4),)),
    ]


@pytest.mark.parametrize("pass_", PASSES)
def test_errors_are_those_of_sums_in_fp32(pass_: Pass) -> None:
    for p in first_layers(pass_):
        for wide in (False, True):
            a, b = make_operands(p, 3, wide=wide)
            for c in by_type(p).values():
                assert error(p, run(p, c, a, b, make_result(p)), a, b) <= BOUND, c


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize("pass_", PASSES)
def test_vectors_of_other_machines(pass_: Pass, lanes: int) -> None:
    p = first_layers(pass_)[1]
    a, b = make_operands(p)
    for c in by_type(p).values():
        c = changed(c, lanes=lanes, tile=SHAPES[lanes][1])
        assert error(p, run(p, c, a, b, make_result(p)), a, b) <= BOUND


@pytest.mark.parametrize("pass_", PASSES)
def test_memory_of_any_order(pass_: Pass) -> None:
    """Rows, columns or channels innermost, and none of them."""
    p = ConvProblem(pass_, 2, 18, 19, (Axis(20, 3, 2, 1, 1, 2), Axis(21, 3, 1, 1, -1, 1)))
    a, b = make_operands(p)
    for c in by_type(p).values():
        c = changed(c, tile=TILES[0], channels=7)
        for order in itertools.permutations(range(4)):
            moved = [t.permute(order).contiguous().permute(np.argsort(order).tolist()) for t in (a, b, make_result(p))]
            assert error(p, run(p, c, *moved), a, b) <= BOUND, order
        apart = [torch.zeros(*t.shape[:3], 2 * t.shape[3])[..., ::2].copy_(t) for t in (a, b, make_result(p))]
        assert error(p, run(p, c, *apart), a, b) <= BOUND


@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.DGRAD])
def test_kept_filters_give_the_same_bits(pass_: Pass) -> None:
    for p in first_layers(pass_)[1:3]:
        kept = replace(p, constant_weight=True)
        a, b = make_operands(p)
        for c in by_type(p).values():
            assert SOLVER.constant(p, c) == 0
            assert SOLVER.workspace(p, c) - SOLVER.workspace(kept, c) == SOLVER.constant(kept, c) > 0
            want = run(p, c, a, b, make_result(p)).clone()
            assert torch.equal(run(kept, c, a, b, make_result(p)), want)


@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.DGRAD])
def test_images_stay_apart(pass_: Pass) -> None:
    """NaN and infinities in one image leave the others' bits as they were, also where images share a block."""
    p = ConvProblem(pass_, 3, 18, 18, (Axis(9, 3, 1, 1, 1, 1),) * 2)
    a, b = make_operands(p)
    for c in by_type(p).values():
        c = changed(c, block=(3, 9, 9))
        want = run(p, c, a, b, make_result(p)).clone()
        wrong = a.clone()
        wrong[1, 4].view(-1)[7] = math.nan
        wrong[1, 17].view(-1)[0] = math.inf
        got = run(p, c, wrong, b, make_result(p))
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[2], want[2])
        assert got[1].isnan().any()


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_bits(pass_: Pass, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    p = first_layers(pass_)[1]
    a, b = make_operands(p)
    c = by_type(p)[3]
    want = run(p, c, a, b, make_result(p)).clone()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for team in ("openmp", "own"):
        assert torch.equal(run(p, changed(c, threads=threads, team=team), a, b, make_result(p)), want)


@pytest.mark.parametrize("pass_", PASSES)
def test_memory_is_bounded_by_the_block(pass_: Pass) -> None:
    """A larger image or batch takes no more, and far less than its lowered matrix."""
    small, large = (ConvProblem(pass_, n, 3, 16, (Axis(s, 7, 2, 1, 3, 3),) * 2) for n, s in ((1, 224), (64, 896)))
    lowered = 4 * large.batch * 3 * 49 * 448 * 448
    for kind, c in by_type(small).items():
        c = changed(c, shares=1) if pass_ is Pass.WGRAD else c
        assert SOLVER.workspace(large, c) == SOLVER.workspace(small, c)
        assert SOLVER.workspace(large, by_type(large)[kind]) < lowered / 100


def test_smaller_blocks_keep_a_limit_and_one_below_them_all_is_a_reason() -> None:
    p = ConvProblem(Pass.FPROP, 2, 8, 8, (Axis(20, 3, 1, 1, 1, 1),) * 2)
    whole = dict(SOLVER.offers(p, None))
    assert list(whole) == list(SOLVER.configs(p))
    a, b = make_operands(p)
    limit = min(whole.values()) - 1
    fitting = [(c, n) for c, n in SOLVER.offers(p, limit) if n <= limit]
    assert fitting
    for c, n in fitting:
        assert n == SOLVER.workspace(p, c)
        assert error(p, run(p, c, a, b, make_result(p)), a, b) <= BOUND
    found = Planner().explain(p, Options(workspace=64, rigor="estimate"))
    reasons = [m.reason for m in found if m.solver == SOLVER.name]
    assert reasons
    assert all("of workspace, the limit is 64 B" in reason for reason in reasons)


@pytest.mark.parametrize(
    "change",
    [{"block": (1, 0, 3)}, {"block": 4}, {"tile": (5, 5)}, {"type": 4}, {"lanes": 7}, {"channels": 0}, {"threads": 0}],
)
def test_a_config_that_is_none(change: dict[str, object]) -> None:
    p = ConvProblem(Pass.FPROP, 1, 8, 8, (Axis(8, 3),) * 2)
    a, b = make_operands(p)
    with pytest.raises(SolverUnavailable, match="is no config of"):
        SOLVER.bind(p, changed(by_type(p)[3], **change), a, b, make_result(p))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("lowered", [False, True])
def test_phases_and_taps_are_those_of_the_definition(backward: bool, lowered: bool) -> None:
    for kernel, stride, dilation, before in itertools.product((1, 2, 5), (1, 2, 3), (1, 2), (-1, 0, 3)):
        axis = Axis(17, kernel, stride, dilation, before, 2)
        found = side(axis, backward, lowered)
        pairs = {
            (phase.start + j * found.apart, found.starts[tap.variant] + (j + tap.shift) * found.step, tap.number)
            for phase in found.phases
            for j in range(phase.count)
            for tap in phase.taps
        }
        places = [(o, o * stride - before + t * dilation, t) for o in range(-40, 40) for t in range(kernel)]
        if backward:
            assert pairs == {(i, o, t) for o, i, t in places if 0 <= i < axis.size}
        else:
            assert pairs == {(o, i, t) for o, i, t in places if 0 <= o < axis.out}
