"""16-bit convolutions through fp32 solvers: closer than 16-bit sums, kept filters, and the memory of the copies."""

from __future__ import annotations

import importlib.util
import itertools
import math
from dataclasses import replace

import pytest
import torch

from tilewise.plan import Config
from tilewise.problems.activations import activated
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_bias, make_operands, make_residual, make_result
from tilewise.solvers import get
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.products._split import may_use_tile_registers

if importlib.util.find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)

SOLVER = get("widened")
LAYER = ConvProblem(Pass.FPROP, 3, 20, 17, (Axis(13, 3, 1, 1, 1, 1), Axis(15, 3, 1, 1, 1, 1)), dtype="bf16")


def compute(p: ConvProblem, c: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the exact one; filters are prepared where they are constant."""
    a, b = make_operands(p)
    bias, residual = make_bias(p, 5), make_residual(p, 5)
    added = [tensor for tensor in (bias, residual) if tensor is not None]
    out = make_result(p).fill_(math.nan)
    space = torch.full((SOLVER.workspace(p, c),), 0xFF, dtype=torch.uint8)
    run, second = SOLVER.bind(p, c, a, b, out), b
    if SOLVER.constant(p, c):
        second = torch.full((SOLVER.constant(p, c),), 0xFF, dtype=torch.uint8)
        SOLVER.prepare(p, c, b)(b, second, space)
        space.fill_(0xFF)
    run(a, second, out, space, *added)
    want = p.reference(a, b)
    want = want if bias is None else want + bias.double().view(-1, *[1] * p.dims)
    want = want if residual is None else want + residual.double()
    return out, activated(want, p.activation)


@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_the_result_is_rounded_once(pass_: Pass, dtype: str, layout: str) -> None:
    """Its error is that of the nearest 16-bit numbers, by every solver behind it."""
    p = replace(LAYER, pass_=pass_, dtype=dtype, out_dtype=dtype, layouts=(layout,) * 3)
    first: dict[str, Config] = {}
    for c in SOLVER.configs(p):
        first.setdefault(str(c["solver"]), c)
    last = {"indirect", "winograd_last"} if pass_ is Pass.FPROP and layout == "channels_last" else set()
    by_tile_registers = {"split_gradients" if pass_ is Pass.WGRAD else "split_products"} & set(first)
    assert bool(by_tile_registers) == may_use_tile_registers()
    assert set(first) == {"fused_lowering", "winograd"} | last | by_tile_registers
    for c in first.values():
        out, want = compute(p, c)
        nearest = want.to(out.dtype).double() - want
        assert (out.double() - want).norm() <= 1.02 * nearest.norm()


@pytest.mark.parametrize("constant", [False, True], ids=["filter", "constant"])
@pytest.mark.parametrize("out_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "view"])
def test_what_follows_is_computed_before_the_result_is_rounded(layout: str, out_dtype: str, constant: bool) -> None:
    """The result lies anyhow, and the residual as it does."""
    p = replace(LAYER, layouts=(layout,) * 3, out_dtype=out_dtype, constant_weight=constant, bias=True, residual=True,
                activation="hardswish")  # fmt: skip
    for c in {str(c["solver"]): c for c in SOLVER.configs(p)}.values():
        assert SOLVER.does_add_bias(p, c)
        assert SOLVER.does_add_residual(p, c)
        assert SOLVER.does_activate(p, c)
        out, want = compute(p, c)
        nearest = want.to(out.dtype).double() - want
        assert (out.double() - want).norm() <= 1.02 * nearest.norm() + 1e-5 * want.norm()


def test_what_follows_is_the_other_solvers() -> None:
    p = replace(LAYER, bias=True, residual=True, activation="relu")
    for c in (Config(), Config(solver="aten"), Config(solver="nobody")):
        assert not SOLVER.does_add_bias(p, c)
        assert not SOLVER.does_add_residual(p, c)
        assert not SOLVER.does_activate(p, c)


@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.DGRAD])
def test_constant_filters_are_kept(pass_: Pass) -> None:
    p = replace(LAYER, pass_=pass_, constant_weight=True)
    c = next(c for c in SOLVER.configs(p) if c["solver"] == "winograd")
    assert SOLVER.constant(p, c) > 0
    out, want = compute(p, c)
    assert (out.double() - want).norm() <= 2.0**-8 * want.norm()


def test_a_limit_is_one_for_copies_too() -> None:
    copies = 4 * sum(math.prod(LAYER.shape(role)) for role in "xwy")
    assert not list(SOLVER.offers(LAYER, copies - 1)) or all(
        w > copies - 1 for _, w in SOLVER.offers(LAYER, copies - 1)
    )
    offered = list(SOLVER.offers(LAYER, None))
    assert offered
    assert all(w == SOLVER.workspace(LAYER, c) > copies for c, w in offered)
    some = [c for c, _ in itertools.islice(offered, 2)]
    assert {c for c, _ in SOLVER.offers(LAYER, None, some)} == set(some)


def test_what_it_is_not_for_is_said() -> None:
    assert "takes bf16/fp16, not fp32" in SOLVER.why_not(replace(LAYER, dtype="fp32", out_dtype="fp32"))[0]
    a, b = make_operands(LAYER)
    for c in (Config(), Config(solver="aten"), Config(solver="nobody"), Config(solver="winograd")):
        with pytest.raises(SolverUnavailable):
            SOLVER.bind(LAYER, c, a, b, make_result(LAYER))
