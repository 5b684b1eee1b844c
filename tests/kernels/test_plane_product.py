"""Products of plane-by-plane spectra in Triton's interpreter against complex128, in groups, between NaN."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.interpreter import interpreted

from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.common.buffers import Arena
from tilewise.solvers.fourier._plane_products import FEW, few, launches

with contextlib.suppress(ImportError):  # without Triton
    from tilewise.kernels.triton.launch import Program

PLACES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
WORKSPACE = 3


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pass_", list(Pass))
@settings(max_examples=5, deadline=None)
@given(
    channels=st.sampled_from([(1, 5), (3, 9), (5, 2), (9, 3), (6, 1), (2, 2)]), groups=st.integers(1, 2),
    rows=st.integers(1, 9), frequencies=st.sampled_from([40, 144, 600]), accumulate=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_products_over_planes(
    place: str, pass_: Pass, channels: tuple[int, int], groups: int, rows: int, frequencies: int, accumulate: bool,
    seed: int,
) -> None:  # fmt: skip
    into, outof = channels
    p = ConvProblem(pass_, rows, groups * into, groups * outof, (Axis(8, 3),) * 2, groups=groups)
    assert few(p, rows) == (min(into, outof, rows) <= FEW)
    shapes = {"x": (rows, groups, into), "w": (groups, outof, into), "y": (rows, groups, outof)}
    arena = Arena()
    slots = {role: arena.add((math.prod(shape) * frequencies,), torch.complex64) for role, shape in shapes.items()}
    generator = torch.Generator().manual_seed(seed)
    spectra = {
        role: torch.randn(*shape, frequencies, generator=generator, dtype=torch.complex128).to(torch.complex64)
        for role, shape in shapes.items()
    }
    workspace = torch.full((arena.size,), 0xFF, dtype=torch.uint8)
    for role, slot in slots.items():
        if role != p.result or accumulate:
            slot.of(workspace).copy_(spectra[role].flatten())
    workspace = workspace.to(place)
    found = launches(p, rows, frequencies, slots, accumulate, dict.fromkeys("xwy", WORKSPACE))
    Program(found, [256] * 4, torch.device(place))([None, None, None, workspace])
    x, w, y = (spectra[role].to(torch.complex128) for role in "xwy")
    want = {
        Pass.FPROP: lambda: torch.einsum("rgif,goif->rgof", x, w.conj()),
        Pass.DGRAD: lambda: torch.einsum("rgof,goif->rgif", y, w),
        Pass.WGRAD: lambda: torch.einsum("rgof,rgif->goif", y.conj(), x),
    }[pass_]()
    if accumulate:
        want = want + spectra[p.result]
    got = slots[p.result].of(workspace).cpu().view(want.shape)
    assert (got - want).norm() <= 1e-6 * want.norm()
    for role in p.operands:
        assert torch.equal(slots[role].of(workspace).cpu(), spectra[role].flatten())
