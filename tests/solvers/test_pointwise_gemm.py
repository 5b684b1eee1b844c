"""Pointwise products with their epilogue: in Triton's interpreter in small tiles, and every offer on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.interpreter import interpreted

from tilewise.machine.device import device_name
from tilewise.plan import Config
from tilewise.problems.activations import CONV_ACTIVATIONS, activated
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_bias, make_operands, make_residual, make_result
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.products.pointwise_gemm import PointwiseGemm

SOLVER = PointwiseGemm()
LAST = ("channels_last",) * 3
LAYER = ConvProblem(Pass.FPROP, 2, 20, 24, (Axis(5, 1), Axis(7, 1)), dtype="fp16", layouts=LAST, alignment=(16, 16, 16))
SMALL = Config(tile=(32, 16, 16), warps=4, stages=2)
PARAMETERS = {"leaky_relu": ":0.1", "clamp": ":-0.25:0.5"}
EVERY = [name + PARAMETERS.get(name, "") for name in CONV_ACTIVATIONS]
PLACES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
LIMITS = {"fp16": 6e-4, "bf16": 4e-3}


def check(p: ConvProblem, c: Config) -> None:
    """Compare a config with float64, over a result full of NaN."""
    a, b = make_operands(p)
    bias, residual = make_bias(p), make_residual(p)
    want = p.reference(a, b)
    if bias is not None:
        want = want + bias.double().view(-1, *[1] * p.dims)
    want = activated(want if residual is None else want + residual, p.activation)
    out = make_result(p).fill_(torch.nan)
    added = [tensor for tensor in (bias, residual) if tensor is not None]
    assert SOLVER.does_activate(p, c)
    assert SOLVER.bind(p, c, a, b, out)(a, b, out, None, *added) is out
    error = float((out.double() - want).norm() / want.norm())
    assert error < LIMITS[p.dtype], (p.key, c, error)


def at(place: str, **changes: object) -> ConvProblem:
    device = "cpu" if place == "cpu" else device_name("cuda")
    return replace(LAYER, device=device, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("activation", EVERY)
def test_every_activation(place: str, activation: str) -> None:
    check(at(place, bias=True, residual=True, activation=activation), SMALL)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": True},
        {"residual": True},
        {"axes": (Axis(5, 1, 2), Axis(7, 1, 3))},
        {"axes": (Axis(5, 1, 2),)},
        {"axes": (Axis(2, 1), Axis(5, 1, 2), Axis(4, 1))},
        {"in_channels": 1, "out_channels": 1, "activation": "leaky_relu:0.1"},
        {"in_channels": 64, "out_channels": 17},
        {"batch": 1, "in_channels": 33, "axes": (Axis(1, 1), Axis(1, 1))},
    ],
)
def test_other_layers(place: str, changes: dict[str, object]) -> None:
    p = at(place, **{"bias": True, "activation": "relu", "alignment": (2, 2, 2), **changes})
    for c in (SMALL, Config(tile=(16, 32, 32), warps=4, stages=3)):
        check(p, c)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("activation", EVERY)
def test_nan_stays_where_it_is(place: str, activation: str) -> None:
    p = at(place, bias=True, activation=activation)
    a, b = make_operands(p)
    a[1, 3, 2, 4] = torch.nan
    out = make_result(p)
    SOLVER.bind(p, SMALL, a, b, out)(a, b, out, None, make_bias(p))
    assert bool(out[1, :, 2, 4].isnan().all())
    assert int(out.isnan().sum()) == p.out_channels


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"axes": (Axis(5, 3, 1, 1, 1, 1), Axis(7, 1))}, "one tap"),
        ({"axes": (Axis(5, 1, 1, 1, 1, 0), Axis(7, 1))}, "without padding"),
        ({"groups": 2}, "one group, not 2"),
        ({"layouts": ("contiguous",) * 3}, "channels_last"),
        ({"out_dtype": "fp32"}, "gives fp16, not fp32"),
        ({"batch": 2**27}, "counts to"),
        ({"pass_": Pass.DGRAD}, "does fprop, not dgrad"),
        ({"dtype": "fp32", "out_dtype": "fp32"}, "fp32"),
        ({"device": "cpu"}, "runs on cuda, not cpu"),
    ],
)
def test_what_it_is_not_for(changes: dict[str, object], reason: str) -> None:
    p = replace(LAYER, **{"device": "cuda:some GPU", **changes})  # type: ignore[arg-type]
    assert any(reason in said for said in SOLVER.why_not(p)), SOLVER.why_not(p)


@pytest.mark.parametrize(
    "c",
    [
        Config(tile=(32, 16, 24), warps=4, stages=2),
        Config(tile=(32, 16), warps=4, stages=2),
        Config(tile=(32, 16, 16), warps=3, stages=2),
        Config(tile=(32, 16, 16), warps=4, stages=99),
        Config(tile=(32, 16, 16), warps=4),
        Config(tile=(32, 16, 16), warps=4, stages=2, splits=2),
    ],
    ids=str,
)
def test_a_bad_config_is_unavailable(c: Config) -> None:
    a, b, out = (torch.empty(LAYER.shape(role), dtype=torch.float16, device="meta") for role in ("x", "w", "y"))
    with pytest.raises(SolverUnavailable, match="no config"):
        SOLVER.bind(LAYER, c, a, b, out)


LAYERS = {
    "ConvNeXt": {"batch": 4, "in_channels": 96, "out_channels": 384, "axes": (Axis(56, 1),) * 2, "activation": "gelu"},
    "its end": {"batch": 4, "in_channels": 384, "out_channels": 96, "axes": (Axis(56, 1),) * 2, "residual": True},
    "ResNet-50": {"batch": 1, "in_channels": 256, "out_channels": 512, "axes": (Axis(56, 1, 2),) * 2},
    "late": {"batch": 1, "in_channels": 2048, "out_channels": 512, "axes": (Axis(7, 1),) * 2, "activation": "relu"},
}


@pytest.mark.parametrize("name", LAYERS)
def test_offers(name: str) -> None:
    p = replace(LAYER, dtype="bf16", out_dtype="bf16", device="cuda:any", **LAYERS[name])  # type: ignore[arg-type]
    found = list(SOLVER.configs(p))
    assert len(found) > 8
    for c in found:
        assert Config.from_key(c.key) == c
        assert 0 < SOLVER.cost(p, c).efficiency <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_offer_on_a_gpu(name: str, dtype: str) -> None:
    p = at("cuda", dtype=dtype, out_dtype=dtype, bias=True, **LAYERS[name])
    for c in SOLVER.configs(p):
        check(p, c)
