"""Bias, residual and activation of convolutions on a GPU, by solvers or by the pass behind them, against float64."""

from __future__ import annotations

import pytest

from tilewise import execute
from tilewise.machine.device import device_name
from tilewise.plan import Plan
from tilewise.problems.activations import activated
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_bias, make_operands, make_residual, make_result
from tilewise.solvers import get

pytestmark = pytest.mark.gpu
SAME = Axis(14, 3, 1, 1, 1, 1)
LIMITS = {"fp32": 5e-6, "bf16": 8e-3}


@pytest.mark.parametrize("name", ["aten", "implicit_gemm", "cudnn", "depthwise"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "view"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("bias", "residual", "activation"),
    [
        (True, True, "relu"),
        (True, False, "hardswish"),
        (False, True, "clamp:-0.5:0.75"),
        (True, True, "none"),
        (False, False, "gelu"),
    ],
)
def test_what_follows_a_convolution(
    name: str, layout: str, dtype: str, bias: bool, residual: bool, activation: str
) -> None:
    outputs, groups = (32, 16) if name == "depthwise" else (24, 1)
    p = ConvProblem(
        Pass.FPROP, 3, 16, outputs, (SAME, SAME), groups, dtype=dtype, device=device_name("cuda"),
        bias=bias, residual=residual, activation=activation,
        layouts=(layout, "contiguous" if layout == "view" else layout, layout),
        alignment=(4, 16, 4) if layout == "view" else (16, 16, 16),
    )  # fmt: skip
    solver = get(name)
    if solver.why_not(p):
        pytest.skip(solver.why_not(p)[0])
    plan = Plan(p.key, name, solver.version, next(iter(solver.configs(p))))
    a, b = make_operands(p)
    added, like, out = make_bias(p), make_residual(p), make_result(p)
    want = p.reference(a, b)
    want = want if added is None else want + added.double().view(-1, 1, 1)
    want = activated(want if like is None else want + like, activation)
    with p.flags(deterministic=False):
        bound = execute.bind(plan, p, a, b, out)
        assert bound(a, b, added, out, like) is out
        again = bound(a, b, added, residual=like)
    for got in (out, again):
        assert float((got.double() - want).norm() / want.norm()) < LIMITS[dtype]
