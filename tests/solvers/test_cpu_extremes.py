"""Values at the ends of fp32's range, on a CPU: what every solver makes of them, and when the planner refuses one."""

from __future__ import annotations

import pytest
import torch
from tests.solvers.cpu_runs import run_poisoned
from tests.toys import leaf

from tilewise import solvers
from tilewise.planner import Options, Planner
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers import Solver

pytest.importorskip("numba")
LEAST = 2.0**-149
"""The smallest number above zero."""
TILE_REGISTERS = {"split_gradients", "split_products"}
"""Solvers whose products count numbers below the smallest normal one as zeros: the processor has no other mode."""
DENSE = ConvProblem(Pass.FPROP, 2, 16, 16, tuple(Axis(12, 3, 1, 1, 1, 1) for _ in range(2)))
DEPTHWISE = ConvProblem(Pass.FPROP, 2, 16, 16, tuple(Axis(12, 5, 1, 1, 2, 2) for _ in range(2)), 16)


def cases() -> list[tuple[Solver, ConvProblem]]:
    """Every solver with every pass of the two layers that it can do."""
    found = []
    for layer in (DENSE, DEPTHWISE):
        for pass_ in Pass:
            p = ConvProblem(pass_, layer.batch, layer.in_channels, layer.out_channels, layer.axes, layer.groups)
            leaves = (s for s in solvers.all_solvers() if not isinstance(s, solvers.Split))
            found += [(s, p) for s in leaves if not s.own_output and not s.why_not(p)]
    return found


CASES = cases()
each = pytest.mark.parametrize(
    ("solver", "p"), CASES, ids=[f"{s.name}-{p.pass_.value}-{p.groups}-groups" for s, p in CASES]
)


def result(solver: Solver, p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return run_poisoned(solver, p, next(iter(solver.configs(p))), a, b, make_result(p))


def test_the_solvers_written_for_cpus_are_among_them() -> None:
    assert {"winograd", "fused_lowering", "depthwise", "depthwise_fft", "fft"} <= {s.name for s, _ in CASES}


@each
@pytest.mark.parametrize("powers", [(-100, 40), (-60, -40), (60, 40), (100, -60)])
def test_huge_and_tiny_values_cost_no_digit(solver: Solver, p: ConvProblem, powers: tuple[int, int]) -> None:
    """Powers of two change no bit of a mantissa, whatever the transforms."""
    a, b = make_operands(p, 1)
    want = result(solver, p, a, b)
    got = result(solver, p, a * 2.0 ** powers[0], b * 2.0 ** powers[1])
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got * 2.0 ** -sum(powers), want, rtol=0, atol=3e-7 * float(want.abs().max()))


@each
def test_denormal_values_err_by_a_few_of_the_smallest(solver: Solver, p: ConvProblem) -> None:
    """Absolutely: what is below the smallest normal number has few digits to lose."""
    if solver.name in TILE_REGISTERS:
        pytest.skip("tile registers count these numbers as zeros")
    a, b = make_operands(p, 1)
    a = a * 2.0**-136
    want = p.reference(a, b)
    gap = float((result(solver, p, a, b).double() - want).abs().max())
    terms = p.batch * 144 if p.pass_ is Pass.WGRAD else p.taps * p.in_channels // p.groups
    assert float(want.abs().max()) > 10_000 * LEAST
    assert gap <= max(40 * terms * LEAST, 1e-5 * float(want.abs().max()))


@each
def test_infinity_reaches_the_result(solver: Solver, p: ConvProblem) -> None:
    """A diverging step must be seen, though transforms spread it."""
    a, b = make_operands(p, 1)
    a[-1, -1, -1, -1] = float("inf")
    assert not torch.isfinite(result(solver, p, a, b)).all()


def test_the_planner_refuses_tiles_whose_error_grows_too_large() -> None:
    """Winograd's error grows with its tiles: on normal and on wide-range data a limit is kept, with the reason."""
    p = ConvProblem(Pass.FPROP, 2, 64, 64, tuple(Axis(28, 3, 1, 1, 1, 1) for _ in range(2)))
    # Not by what a search tries and which is the fastest there: that depends on what else runs on this machine.
    by_tile = {config["tile"]: config for config in solvers.get("winograd").configs(p)}
    options = Options(error_limit=2e-6)
    reasons = {tile: Planner().confirm(p, leaf("winograd", p, config), options)[1] for tile, config in by_tile.items()}
    assert reasons[6].startswith("error "), reasons
    assert reasons[6].endswith("over the limit 2.0e-06")
    assert not reasons[2]
