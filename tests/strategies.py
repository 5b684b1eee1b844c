"""Problems and operands as hypothesis draws them, for every test that needs some."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from hypothesis import assume
from hypothesis import strategies as st

from tilewise.problems.base import ALIGNMENT, dense_strides, layout_of
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass

FORMS = ("contiguous", "channels_last", "channels", "space", "steps")
"""Memory of a tensor: dense both ways, a slice of a tensor with more channels, of a larger one, every other column."""
KINDS = ("any", "pointwise", "patches", "whole", "same", "large")

axis_sizes = st.integers(1, 13)


@st.composite
def axes(draw: st.DrawFn, kind: str = "any", longest: int = 13) -> Axis:
    """An axis with at least one output: signed padding that differs by side, stride, dilation.

    ``pointwise`` has one tap, ``patches`` a kernel equal to its stride, ``whole`` one over all that is not cropped,
    ``same`` three taps and as many outputs as inputs, ``large`` a kernel that reaches over half of them or more.
    """
    size = draw(st.integers(1, longest))
    if kind == "large":
        stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        kernel = draw(st.integers((size // 2) // dilation + 1, (size - 1) // dilation + 1))
        before, after = draw(st.integers(0, size // 2)), draw(st.integers(0, size // 2))
        return Axis(size, kernel, stride, dilation, before, after)
    if kind == "same":
        return Axis(size, 3, 1, 1, 1, 1)
    if kind == "whole":
        before, after = (draw(st.sampled_from((0, 0, -1))) if size > 2 else 0 for _ in range(2))
        return Axis(size, size + before + after, draw(st.integers(1, 3)), 1, before, after)
    if kind in ("pointwise", "patches"):
        kernel = 1 if kind == "pointwise" else draw(st.integers(1, min(size, 4)))
        stride = kernel if kernel > 1 else draw(st.sampled_from((1, 1, 2)))
        crop = draw(st.sampled_from((0, 0, -1))) if size > kernel else 0
        return Axis(size, kernel, stride, 1, crop, 0)
    kernel, stride, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    reach = (kernel - 1) * dilation + 1
    before = draw(st.integers(-min(2, size - 1), 3))
    after = draw(st.integers(-min(2, size - 1 + min(before, 0)), 3))
    missing = max(0, reach - size - before - after)
    return Axis(size + missing, kernel, stride, dilation, before, after)


@st.composite
def problems(
    draw: st.DrawFn,
    pass_: Pass | None = None,
    dims: int | None = None,
    dtype: str = "fp32",
    device: str = "cpu",
    precision: str = "ieee",
    longest: int | None = None,
    grouped: bool = False,
) -> ConvProblem:
    """Small problems of any pass and dimension, dense and aligned; :func:`with_memory` draws their memory.

    The simplest has one group. With ``grouped`` all have several.
    """
    dims = dims or draw(st.sampled_from((1, 2, 3)))
    longest = longest or {1: 40, 2: 13, 3: 7}[dims]
    kind = draw(st.sampled_from(KINDS if dims < 3 else KINDS[:-1]))
    depthwise = kind == "large" or draw(st.integers(0, 3)) == 3
    several = (2, 3, 5) if depthwise else (2, 3) if grouped else (1, 1, 2, 3)
    groups = draw(st.sampled_from(several))
    into = 1 if depthwise else draw(st.integers(1, 5))
    return ConvProblem(
        pass_ or draw(st.sampled_from(list(Pass))),
        draw(st.integers(1, 5)),
        groups * into,
        groups * draw(st.integers(1, 5 if not depthwise else 2)),
        tuple(draw(axes(kind, longest)) for _ in range(dims)),
        groups,
        dtype=dtype,
        device=device,
        precision=precision,
    )


@st.composite
def memory(draw: st.DrawFn) -> tuple[str, int]:
    """How a tensor lies in memory: its form and how many elements before its first."""
    return draw(st.sampled_from(FORMS)), draw(st.sampled_from((0, 0, 1, 3, 8)))


def allocate(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, form: str, offset: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of ``shape`` in memory of that form, and the flat base that it is a view of, full of NaN."""
    outer = list(shape)
    if form == "channels":
        outer[1] += 3
    elif form == "space":
        outer = [*outer[:2], *(n + 2 for n in outer[2:])]
    elif form == "steps":
        outer[-1] *= 2
    strides = list(dense_strides(outer, "channels_last" if form == "channels_last" else "contiguous"))
    inside = sum(strides[2:]) if form == "space" else strides[1] if form == "channels" else 0
    if form == "steps":
        strides[-1] *= 2
    base = torch.full((math.prod(outer) + offset,), math.nan, dtype=dtype, device=device)
    return base.as_strided(shape, strides, offset + inside), base


def described(p: ConvProblem, tensors: dict[str, torch.Tensor]) -> ConvProblem:
    """``p`` with the layouts and alignments of these tensors."""
    layouts = [layout_of(tensors[role].shape, tensors[role].stride()) for role in ROLES]
    alignment = [math.gcd(ALIGNMENT, tensors[role].storage_offset() * tensors[role].element_size()) for role in ROLES]
    (lx, lw, ly), (ax, aw, ay) = layouts, alignment
    return replace(p, layouts=(lx, lw, ly), alignment=(ax, aw, ay))


def fill(tensor: torch.Tensor, seed: int) -> None:
    """Standard normal values, the same for a seed on every device."""
    values = torch.randn(
        tensor.shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64, device="cpu"
    )
    tensor.copy_(values)


@st.composite
def with_memory(
    draw: st.DrawFn,
    drawn: st.SearchStrategy[ConvProblem],
    wanted: Callable[[ConvProblem], bool] = lambda p: True,
    alike: bool = False,
) -> tuple[ConvProblem, tuple[tuple[str, int], ...]]:
    """A wanted problem with its layouts set for the drawn memory of x, w and y, which may be the same for all."""
    p = draw(drawn)
    forms = (draw(memory()),) * 3 if alike else (draw(memory()), draw(memory()), draw(memory()))
    tensors = {
        role: allocate(p.shape(role), p.torch_dtype(role), torch.device("meta"), *form)[0]
        for role, form in zip(ROLES, forms, strict=True)
    }
    found = described(p, tensors)
    assume(wanted(found))
    return found, forms
