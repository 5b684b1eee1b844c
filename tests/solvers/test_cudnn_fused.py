"""cuDNN's fused convolutions: what they are for, and on a GPU bias, residual and activation against float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tilewise import execute
from tilewise.machine.device import device_name
from tilewise.plan import Plan
from tilewise.problems.activations import activated
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_bias, make_operands, make_residual, make_result
from tilewise.solvers.vendor import _api as api
from tilewise.solvers.vendor.cudnn import Cudnn
from tilewise.solvers.vendor.cudnn_fused import CudnnFused

SAME = Axis(14, 3, 1, 1, 1, 1)
LAST = ("channels_last",) * 3
LAYER = ConvProblem(Pass.FPROP, 4, 16, 24, (SAME, SAME), dtype="bf16", layouts=LAST, device="cuda:some GPU")
LIMITS = {"fp32": 1e-5, "bf16": 4e-3, "fp16": 6e-4}
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and bool(api.missing()), reason=f"cuDNN: {api.missing()}"),
]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "nothing follows the convolution"),
        ({"bias": True, "activation": "hardswish"}, "no hardswish"),
        ({"bias": True, "layouts": ("contiguous",) * 3}, "channels_last"),
        ({"bias": True, "pass_": Pass.DGRAD}, "does fprop, not dgrad"),
        ({"bias": True, "device": "cpu"}, "runs on cuda, not cpu"),
    ],
)
def test_what_it_is_not_for(changes: dict[str, object], reason: str) -> None:
    (said, *_) = CudnnFused().why_not(replace(LAYER, **changes))  # type: ignore[arg-type]
    assert reason in said


def test_what_is_in_the_graph() -> None:
    whole = replace(LAYER, bias=True, residual=True, activation="relu", constant_weight=True)
    assert CudnnFused().graphed(whole) == replace(whole, constant_weight=False)
    assert Cudnn().graphed(whole) == LAYER


def plans(p: ConvProblem, most: int) -> list[Plan]:
    """Plans of the first configs."""
    solver = CudnnFused()
    assert solver.why_not(p) == []
    return [Plan(p.key, solver.name, solver.version, config) for config in itertools.islice(solver.configs(p), most)]


def on_gpu(**changes: object) -> ConvProblem:
    return replace(LAYER, device=device_name("cuda"), **changes)  # type: ignore[arg-type]


class TestOnGpu:
    """All that needs cuDNN."""

    pytestmark = ON_GPU

    @pytest.mark.parametrize("activation", ["none", "relu", "relu6", "leaky_relu:0.1", "gelu", "gelu_tanh", "silu",
                                            "tanh", "sigmoid"])  # fmt: skip
    @pytest.mark.parametrize(("bias", "residual"), [(True, False), (False, True), (True, True)])
    def test_all_of_it_is_added_in_fp32(self, activation: str, bias: bool, residual: bool) -> None:
        p = on_gpu(bias=bias, residual=residual, activation=activation)
        self.check(p, 2)

    @pytest.mark.parametrize(
        "changes",
        [
            {"dtype": "fp16", "out_dtype": "fp16"},
            {"dtype": "fp32", "out_dtype": "fp32"},
            {"axes": (Axis(56, 1), Axis(56, 1))},
            {"axes": (Axis(15, 3, 2, 1, 1, 1), Axis(16, 3, 2, 1, 1, 1))},
            {"batch": 1, "in_channels": 64, "out_channels": 128},
            {"groups": 2, "in_channels": 32, "out_channels": 32},
        ],
    )
    def test_other_layers(self, changes: dict[str, object]) -> None:
        p = on_gpu(bias=True, residual=True, activation="relu", **changes)
        reasons = CudnnFused().why_not(p)
        if reasons and "cuDNN" in reasons[0]:
            pytest.skip(reasons[0])
        self.check(p, 4)

    def check(self, p: ConvProblem, most: int) -> None:
        """Compare the first configs with float64, over a result full of NaN."""
        a, b = make_operands(p)
        bias, residual = make_bias(p), make_residual(p)
        want = p.reference(a, b)
        want = want if bias is None else want + bias.double().view(-1, 1, 1)
        want = activated(want if residual is None else want + residual, p.activation)
        for plan in plans(p, most):
            out = make_result(p)
            assert execute.bind(plan, p, a, b, out)(a, b, bias, out, residual) is out
            error = float((out.double() - want).norm() / want.norm())
            assert error < LIMITS[p.dtype], (plan.config, error)

    @pytest.mark.parametrize("activation", ["relu", "relu6", "leaky_relu:0.1", "gelu", "silu", "tanh", "sigmoid"])
    def test_nan_stays_nan(self, activation: str) -> None:
        p = on_gpu(bias=True, activation=activation)
        a, b = make_operands(p)
        bias = make_bias(p)
        assert bias is not None
        bias[3] = torch.nan
        for plan in plans(p, 3):
            out = make_result(p)
            execute.bind(plan, p, a, b, out)(a, b, bias, out)
            assert bool(out[:, 3].isnan().all()), plan.config
            assert bool(out[:, :3].isfinite().all()), plan.config
