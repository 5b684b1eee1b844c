"""Strided convolutions over phases, by another solver in Triton's interpreter; GPU tests run what is offered."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.interpreter import interpreted
from tests.sampling import some
from tests.solvers.test_solvers import Memory, biases, check, plus_bias
from tests.strategies import problems, with_memory

from tilewise import solvers
from tilewise.machine.device import device_name
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.rewrites import polyphase
from tilewise.solvers.rewrites.polyphase import Polyphase, phased

SOLVER = Polyphase()
PLAIN: Memory = (("contiguous", 0),) * 3


def inner(p: ConvProblem) -> Config:
    """Small tiles of a solver that is interpreted."""
    found = Config(solver="implicit_gemm", tile=(16, 16, 16), warps=4, stages=2)
    product = "native" if p.dtype != "fp32" else "fp16" if p.precision == "tf32" else "fp16x3"
    return Config(**found, product=product, **({"splits": 2} if p.pass_ is Pass.WGRAD else {}))


@pytest.fixture
def _anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solvers of GPUs count as able where kernels are interpreted."""
    monkeypatch.setattr(polyphase, "_able", lambda p: (solvers.get("implicit_gemm"),))


@pytest.mark.sampled(3)
@interpreted
@pytest.mark.usefixtures("_anywhere")
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize(("dtype", "precision"), [("fp32", "ieee"), ("fp32", "tf32"), ("fp16", "ieee")])
@settings(
    max_examples=some(4),
    suppress_health_check=[
        HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.function_scoped_fixture,
    ],
)  # fmt: skip
@given(data=st.data())
def test_any_layer_and_memory(pass_: Pass, dtype: str, precision: str, data: st.DataObject) -> None:
    drawn = problems(pass_, dtype=dtype, precision=precision, longest=9)
    found: tuple[ConvProblem, Memory] = data.draw(with_memory(drawn, lambda p: not SOLVER.unsupported(p)), "problem")
    p, forms = found
    assume(p.batch * p.in_channels * math.prod(axis.size for axis in p.axes) < 2000)
    p = replace(p, bias=SOLVER.does_add_bias(p, inner(p)) and data.draw(st.booleans(), "bias"))
    check(SOLVER, p, inner(p), forms, False)


@pytest.mark.slow
@pytest.mark.sampled(2)
@interpreted
@pytest.mark.usefixtures("_anywhere")
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("before", [-2, 0, 2, 5])
def test_padding_and_what_no_window_reaches(pass_: Pass, before: int) -> None:
    """Strides that differ by axis, an axis without one, and an end that is left over."""
    axes = (Axis(11, 5, 4, 1, before, 1), Axis(8, 3, 1, 1, 1, 0), Axis(7, 3, 2, 1, 0, 1))
    for chosen in (axes[:2], axes[::2], axes, axes[:1]):
        p = ConvProblem(pass_, 2, 4, 6, chosen, 2)
        check(SOLVER, p, inner(p), PLAIN, False)


@pytest.mark.parametrize("pass_", list(Pass))
def test_a_bias_is_added_where_the_other_solver_writes_the_result(pass_: Pass) -> None:
    p = stem(pass_)
    added = {name: SOLVER.does_add_bias(p, Config(solver=name)) for name in ("implicit_gemm", "fft", "aten", "none")}
    assert added == {"implicit_gemm": pass_ is Pass.FPROP, "fft": False, "aten": False, "none": False}
    assert not SOLVER.does_add_bias(p, Config())


def test_phases_of_a_first_layer() -> None:
    axis = Axis(224, 11, 4, 1, 2, 2)
    p = phased(ConvProblem(Pass.FPROP, 256, 3, 64, (axis, axis)))
    assert (p.in_channels, p.axes) == (48, (Axis(57, 3), Axis(57, 3)))
    assert [a.out for a in p.axes] == [axis.out, axis.out]
    mixed = phased(ConvProblem(Pass.FPROP, 1, 6, 4, (Axis(9, 3, 1, 1, 1, 1), Axis(9, 3, 3)), 2))
    assert (mixed.in_channels, mixed.groups, mixed.axes) == (18, 2, (Axis(9, 3, 1, 1, 1, 1), Axis(3, 1)))


def stem(pass_: Pass, batch: int = 256, **changes: Any) -> ConvProblem:
    axis = Axis(224, 11, 4, 1, 2, 2)
    return replace(ConvProblem(pass_, batch, 3, 64, (axis, axis), device="cuda:any"), **changes)


@pytest.mark.parametrize("pass_", list(Pass))
def test_offers_keep_the_ceiling(pass_: Pass) -> None:
    p = stem(pass_)
    if SOLVER.why_not(p):
        pytest.skip(SOLVER.why_not(p)[0])
    for ceiling in (None, 2**30, 3 * 2**26):
        offers = list(SOLVER.offers(p, ceiling))
        assert len({c for c, _ in offers}) == len(offers) >= 4
        assert len({c["solver"] for c, _ in offers}) >= 2
        for c, workspace in offers:
            assert workspace == SOLVER.workspace(p, c) > 150 * 2**20
            assert Config.from_key(c.key) == c
            assert SOLVER.cost(p, c).efficiency > 0
        assert ceiling is None or any(workspace <= ceiling for _, workspace in offers)
    ((c, workspace),) = SOLVER.offers(p, 2**26)
    assert workspace == SOLVER.workspace(p, c) > 2**26
    known = [c for c, _ in SOLVER.offers(p, 3 * 2**26)]
    assert {c for c, _ in SOLVER.offers(replace(p, batch=64), None, known)} <= set(known)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"axes": (Axis(9, 3), Axis(9, 3))}, "there are none"),
        ({"axes": (Axis(9, 3, 2), Axis(9, 2, 3))}, "no fewer than the stride"),
        ({"axes": (Axis(9, 3, 2, 2), Axis(9, 3))}, "dilation 2"),
        ({"in_channels": 17}, "at most 16 channels in a group, not 17"),
        ({"batch": 1, "axes": (Axis(2**15, 5, 2), Axis(2**15, 3))}, "elements in the phases"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_said(change: dict[str, Any], reason: str) -> None:
    assert any(reason in each for each in SOLVER.unsupported(stem(Pass.FPROP, **change)))


def test_what_the_other_solver_takes_and_promises_is_its_own() -> None:
    p = stem(Pass.FPROP)
    if SOLVER.why_not(p):
        pytest.skip(SOLVER.why_not(p)[0])
    hidden = {}
    for c, _ in SOLVER.offers(p, None):
        other, theirs = solvers.get(str(c["solver"])), Config(**{k: v for k, v in c.items() if k != "solver"})
        hidden[c] = SOLVER.hidden_workspace(p, c)
        assert hidden[c] == other.hidden_workspace(phased(p), theirs)
        assert SOLVER.is_deterministic(p, c) == other.is_deterministic(phased(p), theirs)
    assert min(hidden.values()) == 0 < max(hidden.values())
    assert SOLVER.like(Config(solver="winograd_fused", places=56, parts=2)) == Config(solver="winograd_fused")


@pytest.mark.parametrize("values", [{}, {"solver": "none"}, {"solver": "aten"}, {"solver": "polyphase"}])
def test_a_config_of_something_else_is_refused(values: dict[str, Any]) -> None:
    empty = torch.empty(0)
    with pytest.raises(SolverUnavailable, match="is no config of"):
        SOLVER.bind(stem(Pass.FPROP, 2), Config(**values), empty, empty, empty)


@interpreted
def test_memory_too_far_apart_is_refused() -> None:
    p = stem(Pass.FPROP, 2, device="cpu")
    a = torch.empty(1, device="meta").as_strided(p.shape("x"), (2**35, 2**33, 2**25, 2))
    b, out = (torch.empty(p.shape(role), device="meta") for role in "wy")
    with pytest.raises(SolverUnavailable, match="too large to count in 32 bits"):
        SOLVER.bind(p, inner(p), a, b, out)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "layout", "limit"),
    [("fp32", "contiguous", 5e-6), ("fp32", "channels_last", 5e-6), ("bf16", "contiguous", 5e-3)],
)
@pytest.mark.parametrize("axis", [Axis(224, 11, 4, 1, 2, 2), Axis(112, 7, 2, 1, 3, 3), Axis(65, 3, 2, 1, 1, 1)])
@pytest.mark.parametrize("pass_", list(Pass))
def test_every_solver_on_first_layers(pass_: Pass, axis: Axis, dtype: str, layout: str, limit: float) -> None:
    layouts = (layout,) * 3
    plain = ConvProblem(pass_, 9, 3, 64, (axis, axis), dtype=dtype, out_dtype=dtype, layouts=layouts)  # type: ignore[arg-type]
    plain = replace(plain, device=device_name("cuda"))
    a, b = make_operands(plain)
    bound = 0
    first = {c["solver"]: (c, workspace) for c, workspace in reversed(list(SOLVER.offers(plain, None)))}
    for c, workspace in first.values():
        p = replace(plain, bias=SOLVER.does_add_bias(plain, c))
        want = plus_bias(p, p.reference(a, b))
        out = make_result(p).fill_(math.nan)
        space = torch.full((workspace,), 0xFF, dtype=torch.uint8, device="cuda")
        try:
            run = SOLVER.bind(p, c, a, b, out)
        except SolverUnavailable:
            continue
        run(a, b, out, space, *biases(p))
        bound += 1
        error = ((out.double() - want).norm() / want.norm()).item()
        assert error < limit, c
    assert bound >= 2
