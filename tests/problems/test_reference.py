"""The reference against the framework's own convolution where that can do the problem, and against the definition."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from tests.reference import convolve
from tests.strategies import allocate, fill, problems, with_memory

from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.problems.conv.reference import convolve_by_transform

Memory = tuple[tuple[str, int], ...]


def operands(p: ConvProblem, forms: Memory) -> list[torch.Tensor]:
    found = []
    for seed, role in enumerate(p.operands):
        tensor, _ = allocate(p.shape(role), torch.float64, torch.device("cpu"), *forms[ROLES.index(role)])
        fill(tensor, seed)
        found.append(tensor)
    return found


@settings(max_examples=150)
@given(found=with_memory(problems()))
def test_it_is_what_torch_computes(found: tuple[ConvProblem, Memory]) -> None:
    p, forms = found
    a, b = operands(p, forms)
    want = p.reference(a, b)
    got = convolve(p, a, b)
    assert got.shape == p.shape(p.result)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-10)


@settings(max_examples=150)
@given(found=with_memory(problems()))
def test_transforms_give_the_same(found: tuple[ConvProblem, Memory]) -> None:
    p, forms = found
    a, b = operands(p, forms)
    want = convolve(p, a, b)
    got = convolve_by_transform(p, a, b)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13 * max(1.0, float(want.abs().max())))


@settings(max_examples=30)
@given(p=problems(dims=1, longest=7))
def test_it_is_the_definition(p: ConvProblem) -> None:
    tensors = {role: torch.randn(p.shape(role), dtype=torch.float64) for role in ROLES}
    want = torch.zeros(p.shape(p.result), dtype=torch.float64)
    axis, ic, oc = p.axes[0], p.in_channels // p.groups, p.out_channels // p.groups
    every = itertools.product(
        range(p.batch), range(p.groups), range(oc), range(ic), range(axis.out), range(axis.kernel)
    )
    for n, g, o, c, j, r in every:
        i = j * axis.stride - axis.before + r * axis.dilation
        if not 0 <= i < axis.size:
            continue
        place = {"x": (n, g * ic + c, i), "w": (g * oc + o, c, r), "y": (n, g * oc + o, j)}
        first, second = p.operands
        want[place[p.result]] += tensors[first][place[first]] * tensors[second][place[second]]
    torch.testing.assert_close(convolve(p, *(tensors[r] for r in p.operands)), want, rtol=1e-12, atol=1e-12)


def test_the_passes_are_adjoint() -> None:
    axes = (Axis(9, 3, 2, 2, -1, 2), Axis(8, 2, 1, 1, 1, 0))
    p = ConvProblem(Pass.FPROP, 2, 4, 6, axes, 2)
    x, w, y = (torch.randn(p.shape(role), dtype=torch.float64) for role in ROLES)
    inner = float((convolve(p, x, w) * y).sum())
    dgrad, wgrad = (ConvProblem(each, 2, 4, 6, axes, 2) for each in (Pass.DGRAD, Pass.WGRAD))
    assert float((convolve(dgrad, y, w) * x).sum()) == pytest.approx(inner)
    assert float((convolve(wgrad, x, y) * w).sum()) == pytest.approx(inner)


def test_a_wrong_shape_is_named() -> None:
    p = ConvProblem(Pass.FPROP, 2, 4, 6, (Axis(5, 3),))
    with pytest.raises(ValueError, match=r"w has shape \(6, 4, 2\)"):
        convolve(p, torch.zeros(2, 4, 5), torch.zeros(6, 4, 2))
