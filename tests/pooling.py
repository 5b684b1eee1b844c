"""Drawn poolings, for the tests of several folders."""

from __future__ import annotations

from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from tilewise.problems.pooling.problem import PoolingProblem

SIZES = (1, 2, 5, 8, 13, 21)


@st.composite
def poolings(draw: st.DrawFn, **fixed: Any) -> PoolingProblem:
    """A small pooling with any options; ``fixed`` are fields that are not drawn."""
    dims = draw(st.integers(1, 3), "axes")
    op = fixed.get("op") or draw(st.sampled_from(("max", "avg")), "op")

    def each(least: int, most: int) -> st.SearchStrategy[tuple[int, ...]]:
        return st.tuples(*[st.integers(least, most)] * dims)

    kernel = draw(each(1, 4), "kernel")
    drawn: dict[str, Any] = {
        "batch": st.integers(1, 3),
        "channels": st.sampled_from((1, 3, 8, 19)),
        "space": st.tuples(*[st.sampled_from(SIZES)] * dims),
        "stride": each(1, 4),
        "padding": st.tuples(*(st.integers(0, k // 2) for k in kernel)),
        "dilation": each(1, 2) if op == "max" else st.just((1,) * dims),
        "ceil_mode": st.booleans(),
        "count_include_pad": st.booleans(),
        "divisor": st.sampled_from((0, 0, 7)) if op == "avg" and dims > 1 else st.just(0),
        "task": st.sampled_from(("inference", "training")),
        "layout_name": st.sampled_from(("contiguous", "channels_last")),
        "dtype": st.sampled_from(("fp32", "bf16", "fp16")),
    }
    fields = {name: draw(strategy, name) for name, strategy in drawn.items() if name not in fixed}
    try:
        return PoolingProblem(**({"op": op, "kernel": kernel} | fields | fixed))
    except ValueError:
        assume(False)
        raise
