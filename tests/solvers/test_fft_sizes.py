"""Basis sizes: smooth, no smaller than they may be, and exact at the least."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reference import convolve
from tests.strategies import axes

from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.common.bases import bases, least, meets, smooth_sizes
from tilewise.solvers.fourier.fft import FFT


@given(size=st.integers(1, 3000))
def test_smooth_sizes_are_all_of_them(size: int) -> None:
    def smooth(n: int) -> bool:
        for radix in (2, 3, 5, 7):
            while n % radix == 0:
                n //= radix
        return n == 1

    top = 1
    while top < size:
        top *= 2
    assert smooth_sizes(size) == tuple(n for n in range(size, top + 1) if smooth(n))


@settings(max_examples=150)
@given(axis=axes(longest=24), pass_=st.sampled_from(list(Pass)), more=st.integers(0, 3), depthwise=st.booleans())
def test_every_basis_from_the_least_on_is_exact(axis: Axis, pass_: Pass, more: int, depthwise: bool) -> None:
    p = ConvProblem(pass_, 2, 2, 2, (axis,), 2 if depthwise else 1)
    plan = FFT._plan(p, next(iter(FFT().configs(p))))
    plan = type(plan)(p, (least(axis, pass_) + more,), plan.product_name, 2)
    a, b = (torch.randn(p.shape(role)) for role in p.operands)
    out = torch.full(p.shape(p.result), torch.nan)
    plan.bind(a, b, out)(a, b, out, torch.full((plan.arena.size,), 0xFF, dtype=torch.uint8))
    torch.testing.assert_close(out.double(), convolve(p, a, b), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("axis", "size"),
    [
        (Axis(27, 5, 1, 1, 2, 2), 29),  # AlexNet conv2: the padding of both ends is one
        (Axis(13, 3, 1, 1, 1, 1), 14),
        (Axis(32, 9), 32),  # fbfft L3: no padding, the image as it is
        (Axis(8192, 8192, 1, 1, 8191, 0), 16383),
    ],
)
def test_padding_is_shared_by_both_ends(axis: Axis, size: int) -> None:
    assert least(axis, Pass.FPROP) == least(axis, Pass.WGRAD) == size


@settings(max_examples=200)
@given(axis=axes(longest=16))
def test_meets(axis: Axis) -> None:
    read = (j * axis.stride + r * axis.dilation - axis.before for j in range(axis.out) for r in range(axis.kernel))
    assert meets(axis) == any(0 <= i < axis.size for i in read)


def test_the_powers_of_two_are_always_tried() -> None:
    p = ConvProblem(Pass.FPROP, 2, 2, 2, (Axis(65, 3), Axis(33, 3)))
    found = bases(p, 4)
    assert len(found) == 4
    assert (128, 64) in found
    assert found[0] == (70, 35) or all(n <= 72 for n in found[0])
