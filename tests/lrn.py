"""Drawn local response normalizations, for the tests of several folders."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tilewise.problems.lrn.problem import LrnProblem

BETAS = (0.75, 0.5, 1.0, 0.25, 2.0, 0.6, 0.1, 0.0)


@st.composite
def norms(draw: st.DrawFn, **fixed: Any) -> LrnProblem:
    """A small normalization of odd sizes; ``fixed`` are fields that are not drawn."""
    drawn = {
        "batch": st.sampled_from((1, 2, 3)),
        "channels": st.sampled_from((1, 2, 3, 7, 16, 33, 40)),
        "space": st.sampled_from(((1,), (5,), (3, 7), (17, 5), (2, 3, 4), (19, 19))),
        "size": st.sampled_from((1, 2, 3, 4, 5, 9, 100)),
        "alpha": st.sampled_from((1e-4, 0.02, 1.0)),
        "beta": st.sampled_from(BETAS),
        "k": st.sampled_from((1.0, 2.0, 0.5)),
        "task": st.sampled_from(("inference", "training")),
        "layout_name": st.sampled_from(("contiguous", "channels_last")),
        "dtype": st.sampled_from(("fp32", "bf16", "fp16")),
    }
    return LrnProblem(**({name: draw(each, name) for name, each in drawn.items() if name not in fixed} | fixed))
