"""Matrix products as hypothesis draws them, and memory for their operands with gaps, offsets and NaN around them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from tilewise.problems.activations import activated
from tilewise.problems.base import ALIGNMENT
from tilewise.problems.gemm.layouts import OPS
from tilewise.problems.gemm.problem import ROLES, GemmProblem

SIZES = st.one_of(st.integers(1, 9), st.integers(1, 70), st.sampled_from((15, 16, 17, 31, 32, 33, 63, 64, 65, 128)))


@st.composite
def products(
    draw: st.DrawFn,
    dtype: str = "fp32",
    device: str = "cpu",
    precision: str = "ieee",
    op: str | None = None,
    batched: bool | None = None,
    thin: bool = False,
    deep: bool = False,
) -> GemmProblem:
    """Small products of any sizes, dense or with gaps between rows. With ``thin`` rows or columns are few.

    With ``deep`` sums may be long.
    """
    m, n, k = draw(SIZES), draw(SIZES), draw(SIZES)
    if thin:
        few, many = draw(st.integers(1, 65)), draw(st.one_of(st.integers(1, 200), st.sampled_from((256, 257, 511))))
        m, n = (few, many) if draw(st.booleans()) else (many, few)
        k = draw(st.one_of(st.integers(1, 40), st.integers(1, 600)))
    if deep:
        k = draw(st.one_of(st.integers(1, 700), st.sampled_from((256, 512, 1030))))
    batch = draw(st.integers(1, 4)) if (draw(st.booleans()) if batched is None else batched) else 0
    p = GemmProblem(m, n, k, op or draw(st.sampled_from(OPS)), batch, dtype, device=device, precision=precision)
    return with_gaps(p, *(draw(st.sampled_from((0, 0, 1, 3, 8))) for _ in ROLES), align=ALIGNMENT)


def with_gaps(p: GemmProblem, *gaps: int, align: int = ALIGNMENT) -> GemmProblem:
    """``p`` with so many elements between the rows of a, b and c; 0 for dense ones."""
    leading = tuple(p.shape(role)[-1] + gap if gap else 0 for role, gap in zip(ROLES, gaps, strict=True))
    return replace(p, leading=leading, alignment=(align,) * 3)


def memory_of(p: GemmProblem, role: str, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor for ``role`` as ``p`` says, ``offset`` elements into a base full of NaN, which is returned too."""
    shape, strides = p.shape(role), p.strides(role)
    span = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    device = torch.device(p.device_type)
    base = torch.full((offset + span + 5,), math.nan, dtype=p.torch_dtype(role), device=device)
    return base.as_strided(shape, strides, offset), base


def fill(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """``tensor``, filled with standard normal values that are the same for a seed on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64, device="cpu"))


def check_launches(
    launches: Callable[..., Any], tiles: Any, place: str, offset: int = 0, *, size: int, bound: float
) -> None:
    """Compute into memory full of NaN by Triton's ``launches`` of ``tiles``, and compare.

    ``size`` is that of the workspace in bytes, ``bound`` is for a difference over the root of the number of terms.
    Nothing outside the result is written.
    """
    from tilewise.kernels.triton.launch import Program

    p = replace(tiles.p, device=place)
    a, b = (fill(memory_of(p, role, offset)[0], i) for i, role in enumerate("ab"))
    out, base = memory_of(p, "c", offset)
    bias = fill(torch.empty(p.n, dtype=out.dtype, device=place), 3)
    want = p.reference(a, b)
    if p.accumulate:
        want += fill(out, 4).double()
    if p.bias:
        want += bias.double()
    want = activated(want, p.activation)
    outside = torch.ones_like(base, dtype=torch.bool)
    outside.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(False)
    workspace = torch.full((max(size, 1),), 0xFF, dtype=torch.uint8, device=place)
    alignment = [*(p.alignment_of(role) for role in p.roles), 256, 2]
    Program(launches(tiles, a, b, out), alignment, torch.device(place))((a, b, out, workspace, bias))
    gap = (out.double() - want).abs() / math.sqrt(p.k)
    assert float(gap.max()) < bound, (p.key, tiles, float(gap.max()))
    assert bool(base[outside].isnan().all())
