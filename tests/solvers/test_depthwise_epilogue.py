"""Bias, residual and activation of depthwise convolutions as a kernel writes, and filters that are kept.

In Triton's interpreter on a CPU, compiled on a GPU, against float64.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.interpreter import interpreted
from tests.kernels.test_finish import ALL
from tests.solvers.test_depthwise import BOUND, Interpreted, error
from tests.solvers.test_solvers import check, named
from tests.strategies import allocate, described

from tilewise import execute
from tilewise.execute.kept_filter import KeptFilter
from tilewise.machine.device import device_name
from tilewise.plan import Config, Plan
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.problems.operands import make_bias, make_operands, make_residual, make_result
from tilewise.solvers import get
from tilewise.solvers.depthwise._gpu import launches, strides_of, vectors
from tilewise.solvers.depthwise.depthwise import Depthwise, _tile

PLACES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
SOLVER = Interpreted()
STRIDED, ODD, EVEN = Axis(9, 3, 2, 1, 1, 1), Axis(7, 3, 1, 1, 1, 1), Axis(8, 3, 1, 1, 1, 1)
ALONG_SPACE = Config(tile=(2, 4), lanes=(64, 1), warps=2)
ALONG_CHANNELS = Config(tile=(2, 2), lanes=(16, 4), warps=2)
LANES = {"contiguous": ALONG_SPACE, "channels_last": ALONG_CHANNELS}


def layer(device: str, form: str = "contiguous", dtype: str = "fp32", axes: tuple[Axis, ...] = (STRIDED, EVEN),
          multiplier: int = 1, **more: Any) -> ConvProblem:  # fmt: skip
    """A layer of 6 channels, whose images and results lie in memory of one form."""
    p = ConvProblem(Pass.FPROP, 2, 6, 6 * multiplier, axes, 6, dtype=dtype, device=device_name(device), **more)
    meta = torch.device("meta")
    forms = dict(zip(ROLES, (form, "contiguous", form), strict=True))
    return described(p, {role: allocate(p.shape(role), p.torch_dtype(role), meta, forms[role], 0)[0] for role in ROLES})


def checked(p: ConvProblem, c: Config, form: str) -> None:
    """Compute between NaN, with NaN in the result before, and compare with float64."""
    assert check(SOLVER, p, c, ((form, 0), ("contiguous", 0), (form, 0)), p.accumulate)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize(("number", "activation"), list(enumerate(ALL)), ids=lambda x: str(x))
def test_every_activation(device: str, number: int, activation: str) -> None:
    form, dtype = (*LANES,)[number % 2], ("fp32", "bf16", "fp16")[number % 3]
    p = layer(device, form, dtype, bias=True, residual=True, activation=activation)
    checked(p, LANES[form], form)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("form", LANES)
@pytest.mark.parametrize(("bias", "residual"), list(itertools.product((False, True), (False, True))))
def test_each_alone_and_both(device: str, form: str, bias: bool, residual: bool) -> None:
    for activation in ("none", "relu"):
        checked(layer(device, form, bias=bias, residual=residual, activation=activation), LANES[form], form)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("form", LANES)
def test_odd_sizes_and_several_results_of_a_channel(device: str, dtype: str, form: str) -> None:
    p = layer(device, form, dtype, (ODD, STRIDED), 3, bias=True, residual=True, activation="gelu")
    checked(p, LANES[form], form)
    wide = replace(p, out_dtype="fp32", axes=(ODD,), layouts=("contiguous",) * 3)
    checked(wide, replace_tile(LANES[form], (1, 4)), "contiguous")


def replace_tile(c: Config, tile: tuple[int, int]) -> Config:
    """A config with another tile."""
    return Config(**{**c, "tile": tile})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("lanes", [ALONG_SPACE, ALONG_CHANNELS], ids=["space", "channels"])
@pytest.mark.parametrize("form", ["channels", "space", "steps"])
def test_views(device: str, lanes: Config, form: str) -> None:
    """Slices of images with more channels, of larger ones, and every other column; the residual lies so, too."""
    p = layer(device, form, bias=True, residual=True, activation="silu")
    assert p.layout("y") == "view"
    checked(p, lanes, form)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_several_columns_are_written_at_once(device: str, dtype: str) -> None:
    p = layer(device, "contiguous", dtype, (ODD, EVEN), bias=True, residual=True, activation="hardswish")
    out = torch.empty(p.shape("y"), dtype=torch.float32, device="meta")
    assert vectors(p, _tile(ALONG_SPACE), "y", strides_of(out)) == 4
    checked(p, ALONG_SPACE, "contiguous")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("form", LANES)
@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.DGRAD])
def test_a_bias_beside_what_is_added_to(device: str, form: str, pass_: Pass) -> None:
    """Also of an input gradient, the forward pass of a transposed convolution."""
    p = replace(layer(device, form, multiplier=2, bias=True), pass_=pass_)
    for accumulate in (False, True):
        checked(replace(p, accumulate=accumulate), LANES[form], form)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("form", LANES)
def test_results_are_rounded_once(device: str, form: str) -> None:
    p = layer(device, form, "bf16", (ODD, EVEN), bias=True, residual=True)
    p = replace(p, axes=(Axis(7, 1), Axis(8, 1)))
    a, b, bias, residual, out = (
        torch.full_like(t, value) for t, value in zip(tensors_of(p), (129, 3, 2, 1, 0), strict=True)
    )
    run_with(p, LANES[form], a, b, out, bias, residual)
    assert bool((out == 390).all())  # rounded to even numbers, 387 would be 388, and 389 too


def tensors_of(p: ConvProblem) -> tuple[torch.Tensor, ...]:
    """Operands, bias, residual and result of a problem that has all of them."""
    bias, residual = make_bias(p), make_residual(p)
    assert bias is not None
    assert residual is not None
    return (*make_operands(p), bias, residual, make_result(p))


def run_with(p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor,
             *added: torch.Tensor) -> None:  # fmt: skip
    """Run the solver with NaN in its workspace."""
    size = SOLVER.workspace(p, c)
    space = torch.full((size,), 0xFF, dtype=torch.uint8, device=a.device) if size else None
    SOLVER.bind(p, c, a, b, out)(a, b, out, space, *added)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize(("number", "activation"), list(enumerate(ALL)), ids=lambda x: str(x))
def test_nan_stays(device: str, number: int, activation: str) -> None:
    """In an image, a filter, a bias or a residual it shows in what it belongs to, and nowhere else."""
    form = (*LANES,)[number % 2]
    p = layer(device, form, axes=(ODD, EVEN), bias=True, residual=True, activation=activation)
    a, b, bias, residual, out = tensors_of(p)
    a[0, 1] = b[2] = bias[3] = residual[1, 4, 2, 5] = float("nan")
    run_with(p, LANES[form], a, b, out, bias, residual)
    want = torch.zeros(p.shape("y"), dtype=torch.bool, device=out.device)
    want[0, 1] = want[:, 2] = want[:, 3] = want[1, 4, 2, 5] = True
    assert torch.equal(out.isnan(), want)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.DGRAD])
def test_a_constant_filter_is_packed_once(device: str, pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the executor, which packs it again when the weight's version has changed."""
    if device == "cpu":
        monkeypatch.setattr(Depthwise, "on_cpu", Interpreted.on_cpu)
    packed = []
    prepared = KeptFilter._prepared
    monkeypatch.setattr(KeptFilter, "_prepared", lambda *given: packed.append(1) or prepared(*given))
    p = replace(layer(device, "channels_last", multiplier=2, constant_weight=True), pass_=pass_)
    solver, c = get("depthwise"), ALONG_CHANNELS
    assert solver.workspace(p, c) == 0
    a, b = make_operands(p)
    bound = execute.bind(Plan(p.key, solver.name, solver.version, c), p, a, b)
    before = bound(a, b)
    for _ in range(2):
        assert error(p, bound(a, b), p.reference(a, b)) < BOUND["fp32"]
    assert len(packed) == 1
    with torch.no_grad():
        b[1:].mul_(-3)
    assert error(p, bound(a, b), p.reference(a, b)) < BOUND["fp32"]
    assert len(packed) == 2
    assert not torch.equal(bound(a, b), before)


def test_a_call_with_a_constant_filter_is_one_launch() -> None:
    for form, c in LANES.items():
        for constant in (False, True):
            p = layer("cpu", form, bias=True, residual=True, activation="gelu", constant_weight=constant)
            found = launches(p, _tile(c), 1, *make_operands(p), make_result(p))
            along = form == "channels_last"
            packs = ["pack_filter"] if along and not constant else []
            assert [launch.kernel.__name__ for launch in found] == [*packs, "gather"]
            assert SOLVER.cost(p, c).kernels == len(found)
            assert SOLVER.constant(p, c) == (4 * 6 * 9 if along and constant else 0)
            assert SOLVER.workspace(p, c) == (4 * 6 * 9 if packs else 0)


@pytest.mark.parametrize("activation", named(Depthwise.activations))
def test_who_finishes(activation: str) -> None:
    """On a GPU one kernel does all; on a CPU what follows the sums is a pass behind them."""
    solver = get("depthwise")
    for device in ("cuda:any", "cpu"):
        p = replace(layer("cpu", bias=True, residual=True, activation=activation), device=device)
        c = ALONG_CHANNELS if device != "cpu" else Config(tile=(2, 2), lanes=4, threads=1)
        alone = replace(p, bias=False, residual=False)
        assert solver.does_activate(alone, c) == (device != "cpu")
        assert execute.finishes(Plan(p.key, solver.name, solver.version, c), p) == (device != "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("form", LANES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_layer_of_a_convnext_on_a_gpu(dtype: str, form: str) -> None:
    """The tiles that are offered, whose kernels are compiled with wide accesses."""
    axis = Axis(14, 7, 1, 1, 3, 3)
    p = ConvProblem(Pass.FPROP, 3, 384, 384, (axis, axis), 384, dtype=dtype, device=device_name("cuda"), bias=True,
                    residual=True, activation="gelu", layouts=(form,) * 3)  # fmt: skip
    solver = get("depthwise")
    a, b, bias, residual, _ = tensors_of(p)
    want = torch.nn.functional.gelu(p.reference(a, b) + bias.double().view(-1, 1, 1) + residual.double())
    for constant, c in itertools.product((False, True), itertools.islice(solver.configs(replace(p, batch=64)), 2)):
        here = replace(p, constant_weight=constant)
        bound = execute.bind(Plan(here.key, solver.name, solver.version, c), here, a, b)
        got, again = (bound(a, b, bias, residual=residual) for _ in range(2))
        assert error(p, got, want) < BOUND[dtype], c
        assert torch.equal(got, again), c
