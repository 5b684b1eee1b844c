"""Bias, residual and activation of compiled products on a GPU, against float64, over memory full of NaN."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tilewise.machine.device import device_name
from tilewise.problems.activations import activated
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_bias, make_operands, make_residual, make_result
from tilewise.solvers import get

pytestmark = pytest.mark.gpu
SAME, ODD, HALF, POINT = Axis(29, 3, 1, 1, 1, 1), Axis(27, 3, 1, 1, 1, 0), Axis(27, 3, 2, 1, 1, 1), Axis(28, 1)
STEM, PATCH = Axis(61, 7, 2, 1, 3, 3), Axis(112, 16, 16)
HALVES = ("bf16", "fp16")
CASES: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("implicit_gemm", ("fp32", *HALVES), {"in_channels": 64, "out_channels": 104, "axes": (SAME, HALF)}),
    ("row_gemm", HALVES, {"in_channels": 3, "out_channels": 72, "axes": (STEM, Axis(57, 7, 2, 1, 3, 2))}),
    ("direct_gemm", ("fp32",), {"in_channels": 64, "out_channels": 100, "axes": (POINT, POINT)}),
    ("direct_gemm", ("fp32",), {"in_channels": 3, "out_channels": 40, "axes": (STEM, STEM)}),
    ("patch_gemm", ("fp32", *HALVES), {"in_channels": 3, "out_channels": 100, "axes": (PATCH, PATCH)}),
    ("patch_gemm", ("bf16",), {"in_channels": 40, "out_channels": 90, "axes": (POINT, Axis(9, 1))}),
]
FOLLOWED = (
    (True, True, "relu"), (True, True, "gelu"), (False, True, "hardswish"), (True, False, "clamp:-0.5:0.75"),
    (True, True, "silu"), (False, False, "leaky_relu:0.2"), (True, True, "none"), (True, True, "tanh"),
    (False, True, "gelu_tanh"), (True, False, "relu6"), (True, True, "hardsigmoid"), (True, True, "sigmoid"),
)  # fmt: skip
LIMITS = {"fp32": 5e-6, "tf32": 4e-3, "bf16": 4e-3, "fp16": 8e-4}
"""Of TF32 more than a product errs: where tanh has flattened most numbers, the errors of the others count alone."""


def calls() -> Iterator[Any]:
    """Every solver with its types in both layouts; what follows the sums goes round."""
    number = 0
    for name, dtypes, sizes in CASES:
        for dtype, layout in itertools.product(dtypes, ("contiguous", "channels_last")):
            followed = FOLLOWED[number % len(FOLLOWED)]
            yield pytest.param(
                name, dtype, layout, sizes, followed, id=f"{number} {name} {dtype} {layout} {followed[2]}"
            )
            number += 1


@pytest.mark.parametrize(("name", "dtype", "layout", "sizes", "followed"), list(calls()))
def test_what_follows_the_sums(
    name: str, dtype: str, layout: str, sizes: dict[str, Any], followed: tuple[bool, bool, str]
) -> None:
    """The first that is offered, with memory around the result and the workspace as any call may find it."""
    bias, residual, activation = followed
    x = "channels_last" if name == "row_gemm" else layout
    p = ConvProblem(
        Pass.FPROP, 3, **sizes, dtype=dtype, out_dtype=dtype, bias=bias, residual=residual, activation=activation,
        layouts=(x, layout, layout), alignment=(16, 16, 16), device=device_name("cuda"),
        precision="tf32" if name == "patch_gemm" and dtype == "fp32" else "ieee",
    )  # fmt: skip
    solver = get(name)
    if reasons := solver.why_not(p):
        pytest.skip(reasons[0])
    c = next(iter(solver.configs(p)))
    assert solver.does_add_residual(p, c)
    assert solver.does_activate(p, c)
    (a, b), added, like = make_operands(p), make_bias(p), make_residual(p)
    want = p.reference(a, b)
    if added is not None:
        want = want + added.double().view(-1, 1, 1)
    want = activated(want if like is None else want + like.double(), activation)
    more = [tensor for tensor in (added, like) if tensor is not None]
    out = make_result(p).fill_(math.nan)
    space = torch.full((solver.workspace(p, c),), 0xFF, dtype=torch.uint8, device="cuda")
    assert solver.bind_checked(p, c, a, b, out)(a, b, out, space, *more) is out
    missing = int(out.isnan().sum())
    assert not missing, f"{c}: {missing} of {out.numel()} results are NaN"
    error = float((out.double() - want).norm() / want.norm())
    assert error <= LIMITS[p.precision if p.precision == "tf32" else dtype], f"{c}: error {error:.1e}"


@pytest.mark.parametrize("name", ["implicit_gemm", "direct_gemm"])
def test_groups_and_blocks_of_images_have_their_own(name: str) -> None:
    """Parts of bias and residual of each group, in a slice of a larger image."""
    axes = (POINT, POINT) if name == "direct_gemm" else (SAME, ODD)
    p = ConvProblem(
        Pass.FPROP, 4, 32, 48, axes, 2, bias=True, residual=True, activation="relu", device=device_name("cuda"),
        layouts=("contiguous", "contiguous", "view"), alignment=(16, 16, 4),
    )  # fmt: skip
    solver = get(name)
    if reasons := solver.why_not(p):
        pytest.skip(reasons[0])
    (a, b), bias = make_operands(p), make_bias(p)
    assert bias is not None
    sizes = p.shape("y")
    whole, like = (torch.full((*sizes[:3], sizes[3] + 3), math.nan, device="cuda") for _ in range(2))
    out, residual = whole[..., 1:-2], like[..., 1:-2].copy_(torch.randn(sizes, device="cuda"))
    want = torch.relu(p.reference(a, b) + bias.double().view(-1, 1, 1) + residual.double())
    for c, workspace in list(solver.offers(p, None))[-2:]:
        whole.fill_(math.nan)
        space = torch.full((workspace,), 0xFF, dtype=torch.uint8, device="cuda")
        solver.bind_checked(p, c, a, b, out)(a, b, out, space, bias, residual)
        assert float((out.double() - want).norm() / want.norm()) <= LIMITS["fp32"], c
        assert bool(whole[..., :1].isnan().all())
        assert bool(whole[..., -2:].isnan().all())
