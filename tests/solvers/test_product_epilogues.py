"""Bias, residual and activation in registers of the products on a GPU, in Triton's interpreter, against float64.

Small tiles that do not divide the sizes; results and memory around them are full of NaN before.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.interpreter import interpreted
from tests.kernels.test_finish import ALL
from tests.sampling import some
from tests.solvers.test_patch_gemm import patches
from tests.solvers.test_row_gemm import first_layers
from tests.solvers.test_solvers import Memory, check
from tests.strategies import allocate, described, problems, with_memory

from tilewise import execute
from tilewise.plan import Config, Plan
from tilewise.problems.activations import activated
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.problems.operands import make_bias, make_operands, make_residual, make_result
from tilewise.solvers import Solver, get

pytestmark = interpreted
SAME, ODD, STEPS, POINT = Axis(5, 3, 1, 1, 1, 1), Axis(7, 3, 1, 1, 1, 0), Axis(9, 3, 2, 1, 1, 1), Axis(7, 1)
SMALL = Config(tile=(16, 32, 16), warps=4, stages=2)
PRODUCT = {"fp32": "fp16x3", "fp16": "native"}
CASES = {
    "implicit_gemm": (
        ConvProblem(Pass.FPROP, 2, 10, 21, (SAME, ODD)),
        Config(**SMALL, product="fp16x3", images=1),
        ("fp32", "fp16"),
    ),
    "row_gemm": (
        ConvProblem(Pass.FPROP, 2, 3, 13, (STEPS, Axis(12, 3, 2, 1, 1, 1)), dtype="fp16"),
        Config(**SMALL, side=2, lines=2),
        ("fp16",),
    ),
    "direct_gemm": (ConvProblem(Pass.FPROP, 2, 3, 21, (STEPS, ODD)), SMALL, ("fp32",)),
    "patch_gemm": (
        ConvProblem(Pass.FPROP, 2, 3, 21, (Axis(8, 4, 4), Axis(12, 4, 4)), precision="tf32"),
        SMALL,
        ("fp32", "fp16"),
    ),
}
"""For each solver a layer whose sizes no tile divides, a config of small tiles, and the types that are tried.

The interpreter multiplies the bit patterns of bf16, which is left to a GPU.
"""
SLOW = [HealthCheck.filter_too_much, HealthCheck.too_slow]


def layer(name: str, form: str = "contiguous", dtype: str = "", **more: Any) -> tuple[ConvProblem, Config]:
    """A solver's layer, whose images and results lie in memory of one form, and its config."""
    p, c, dtypes = CASES[name]
    dtype = dtype or dtypes[0]
    p = replace(p, **{"dtype": dtype, "out_dtype": dtype, **more})
    if "product" in c:
        c = Config(**{**c, "product": PRODUCT[dtype]})
    meta = torch.device("meta")
    forms = dict(zip(ROLES, memory(name, form), strict=True))
    return described(p, {r: allocate(p.shape(r), p.torch_dtype(r), meta, *forms[r])[0] for r in ROLES}), c


def memory(name: str, form: str) -> Memory:
    """Image and result of ``form``; images of few channels are read with these innermost."""
    return ("channels_last" if name == "row_gemm" else form, 0), ("contiguous", 0), (form, 0)


def checked(name: str, form: str, p: ConvProblem, c: Config) -> None:
    """Nothing is left to a pass behind it, and all is as in float64."""
    solver = get(name)
    assert not solver.unsupported(p)
    assert solver.does_add_residual(p, c)
    assert solver.does_activate(p, c)
    assert check(solver, p, c, memory(name, form), False)


@pytest.mark.sampled(13)
@pytest.mark.parametrize(("number", "activation"), list(enumerate(ALL)), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_activation(name: str, number: int, activation: str) -> None:
    dtypes, form = CASES[name][2], ("contiguous", "channels_last")[number % 2]
    checked(name, form, *layer(name, form, dtypes[number // 2 % len(dtypes)], bias=True, residual=True,
                               activation=activation))  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("bias", "residual"), list(itertools.product((False, True), (False, True))))
@pytest.mark.parametrize("name", CASES)
def test_each_alone_and_both(name: str, bias: bool, residual: bool) -> None:
    for activation, form in (("none", "contiguous"), ("relu", "channels_last")):
        checked(name, form, *layer(name, form, bias=bias, residual=residual, activation=activation))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["channels", "space", "steps"])
@pytest.mark.parametrize("name", CASES)
def test_views(name: str, form: str) -> None:
    """Slices of images with more channels, of larger ones, and every other column; the residual lies so, too."""
    p, c = layer(name, form, bias=True, residual=True, activation="leaky_relu:0.2")
    assert p.layout("y") == "view"
    checked(name, form, p, c)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["implicit_gemm", "direct_gemm"])
def test_groups_have_their_own(name: str) -> None:
    """Each is launched by itself: its part of the bias and of the residual."""
    p, c = layer(name, "channels_last", bias=True, residual=True, activation="relu",
                 in_channels=6, out_channels=34, groups=2)  # fmt: skip
    checked(name, "channels_last", p, c)


@pytest.mark.parametrize("name", ["implicit_gemm", "row_gemm", "patch_gemm"])
def test_wider_results(name: str) -> None:
    """Of 16-bit operands in fp32, with a residual in fp32."""
    p, c = layer(name, "contiguous", "fp16", bias=True, residual=True, activation="silu")
    checked(name, "contiguous", replace(p, out_dtype="fp32"), c)


def drawn(name: str) -> st.SearchStrategy[ConvProblem]:
    """Layers that the solver may take."""
    dtypes = st.sampled_from(CASES[name][2])
    if name == "row_gemm":
        return first_layers(Pass.FPROP)
    if name == "patch_gemm":
        return dtypes.flatmap(lambda dtype: patches(Pass.FPROP, dtype))
    return st.tuples(dtypes, st.sampled_from((1, 1, 2, 3))).flatmap(
        lambda of: problems(Pass.FPROP, of[1], longest=7, dtype=of[0])
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=some(30), suppress_health_check=SLOW)
@given(data=st.data())
def test_any_layer_and_memory(name: str, data: st.DataObject) -> None:
    solver = get(name)
    followed: dict[str, Any] = {
        "bias": data.draw(st.booleans(), "bias"),
        "residual": data.draw(st.booleans(), "residual"),
        "activation": data.draw(st.sampled_from(ALL), "activation"),
        "accumulate": False,
    }
    found: tuple[ConvProblem, Memory] = data.draw(
        with_memory(drawn(name).map(lambda p: replace(p, **followed)), lambda p: not solver.unsupported(p)), "problem"
    )
    p, forms = found
    c = CASES[name][1]
    if "product" in c:
        c = Config(**{**c, "product": PRODUCT[p.dtype]})
    if name == "row_gemm":
        axis = p.axes[-1]
        sides = (1,) if axis.dilation > 1 and axis.kernel > 1 else (1, 2, 4)
        c = Config(**{**c, "side": data.draw(st.sampled_from([side for side in sides if side <= axis.out]), "side")})
    check(solver, p, c, forms, False)


def computed(solver: Solver, p: ConvProblem, c: Config, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The result in memory that was full of NaN; ``tensors`` are operands, result and what is added."""
    a, b, out, *added = tensors
    space = torch.full((solver.workspace(p, c),), 0xFF, dtype=torch.uint8)
    return solver.bind(p, c, a, b, out)(a, b, out.fill_(math.nan), space, *added)


def tensors_of(p: ConvProblem) -> list[torch.Tensor]:
    """Operands, result and what is added."""
    added = [tensor for tensor in (make_bias(p, 5), make_residual(p, 5)) if tensor is not None]
    return [*make_operands(p, 3), make_result(p), *added]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_what_is_not_finite_stays_where_it_is(name: str) -> None:
    """NaN through every kind of activation, infinities as torch has them."""
    places = (0, 3, 1, 2), (1, 12, 0, 1), (1, 4, 1, 1)  # of numbers of the residual
    for activation, form in (("relu", "contiguous"), ("hardswish", "channels_last"), ("clamp:-0.25:inf", "contiguous")):
        p, c = layer(name, form, bias=True, residual=True, activation=activation)
        a, b, out, bias, residual = tensors_of(p)
        bias[7] = math.nan
        for place, value in zip(places, (math.nan, math.inf, -math.inf), strict=True):
            residual[place] = value
        got = computed(get(name), p, c, [a, b, out, bias, residual])
        want = activated(torch.tensor([math.nan, math.inf, -math.inf], dtype=got.dtype, device="cpu"), activation)
        assert torch.equal(torch.stack([got[place] for place in places]).isnan(), want.isnan())
        same = ~want.isnan()
        assert torch.equal(torch.stack([got[place] for place in places])[same], want[same])
        got[:, 7], got[places[0]] = 0.0, 0.0
        assert not bool(got.isnan().any()) or activation == "hardswish"


@pytest.mark.parametrize("name", CASES)
def test_a_plan_needs_no_pass_behind_it(name: str) -> None:
    p, c = layer(name, "channels_last", bias=True, residual=True, activation="relu")
    p = replace(p, device="cpu")
    solver = get(name)
    assert solver.activations
    assert execute.finishes(Plan(p.key, name, solver.version, c), p)


@pytest.mark.parametrize("form", ["contiguous", "channels_last"])
def test_rows_of_a_gradient_share_a_channel_s_bias(form: str) -> None:
    """In a transposed convolution's forward pass rows of the product are taps of channels, in the filter's order."""
    p, c = layer("patch_gemm", form, pass_=Pass.DGRAD, bias=True)
    assert check(get("patch_gemm"), p, c, ((form, 0), (form, 0), (form, 0)), False)
