"""Drawn separable convolutions, for the tests of several folders."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tilewise.problems.conv.axis import Axis
from tilewise.problems.separable.problem import SeparableProblem

FUNCTIONS = ("none", "relu", "relu6", "hardswish", "silu", "sigmoid", "gelu", "leaky_relu:0.1", "clamp:-0.5:0.25")


@st.composite
def axes(draw: st.DrawFn) -> Axis:
    """A short axis, with padding or cropping of each side."""
    kernel, stride, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    before, after = draw(st.integers(-2, 4)), draw(st.integers(-2, 4))
    least = max(1, (kernel - 1) * dilation + 1 - before - after, 1 - min(0, before) - min(0, after))
    return Axis(draw(st.integers(least, least + 12)), kernel, stride, dilation, before, after)


@st.composite
def separables(draw: st.DrawFn, **fixed: Any) -> SeparableProblem:
    """A small separable convolution of odd sizes; ``fixed`` are fields that are not drawn."""
    expands, projects = draw(st.sampled_from(((True, True), (True, False), (False, True))), "stages")
    channels = draw(st.sampled_from((1, 3, 16, 17, 40, 65)), "channels")
    into, outof = (draw(st.sampled_from((1, 2, 7, 16, 33)), name) for name in ("in_channels", "out_channels"))
    functions = [draw(st.sampled_from(FUNCTIONS), "function") for _ in range(1 + expands + projects)]
    fields: dict[str, Any] = {
        "batch": draw(st.integers(1, 3), "batch"),
        "in_channels": into if expands else channels,
        "channels": channels,
        "out_channels": outof if projects else channels,
        "axes": (draw(axes(), "height"), draw(axes(), "width")),
        "expands": expands,
        "projects": projects,
        "inner": tuple(functions[:-1]),
        "activation": functions[-1],
        "residual": draw(st.booleans(), "residual"),
    }
    return SeparableProblem(**(fields | fixed))
