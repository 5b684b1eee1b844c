"""Thin products in Triton's interpreter against float64: every storage, parts of sums, views between NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.interpreter import interpreted
from tests.products import check_launches, with_gaps

from tilewise.plan import Config
from tilewise.problems.activations import ACTIVATIONS
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers import SolverUnavailable, get
from tilewise.solvers.gemm._thin_gpu import Tiles, configs, launches, unsupported

PLACES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
ROUNDING = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 1.6e-2}


def run(tiles: Tiles, place: str, offset: int = 0) -> None:
    """Compute into memory full of NaN by these tiles, and compare; nothing outside the result is written."""
    size = 0 if tiles.sums is None else tiles.sums.bytes
    check_launches(launches, tiles, place, offset, size=size, bound=ROUNDING[tiles.p.dtype] * 4)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("op", ["NN", "NT", "TN", "TT"])
@settings(max_examples=6, deadline=None)
@given(
    sizes=st.sampled_from([(1, 40, 70), (17, 33, 200), (50, 3, 129), (65, 16, 64), (5, 130, 31)]),
    parts=st.sampled_from([1, 2, 3]), gaps=st.tuples(*[st.sampled_from((0, 3, 8))] * 3), bias=st.booleans(),
    accumulate=st.booleans(), dtype=st.sampled_from(["fp32", "fp16"]),  # the interpreter multiplies no bf16
    activation=st.sampled_from(ACTIVATIONS),
)  # fmt: skip
def test_thin_products(
    place: str, op: str, sizes: tuple[int, int, int], parts: int, gaps: tuple[int, int, int], bias: bool,
    accumulate: bool, dtype: str, activation: str,
) -> None:  # fmt: skip
    p = GemmProblem(*sizes, op, dtype=dtype, bias=bias, activation="none" if accumulate else activation,
                    accumulate=accumulate, out_dtype="fp32" if accumulate else "")  # fmt: skip
    p = with_gaps(p, *gaps, align=2)
    run(Tiles(p, 16, 32, 32, parts, 4, 2), place, offset=1)
    run(Tiles(p, 32, 16, 64, parts, 4, 2), place)


def test_parts_are_whole_steps() -> None:
    p = GemmProblem(4, 100, 1000)
    for parts in (1, 2, 3, 8, 16, 32):
        tiles = Tiles(p, 16, 64, 64, parts, 4, 4)
        assert tiles.part % 64 == 0
        assert (tiles.used - 1) * tiles.part < p.k <= tiles.used * tiles.part
        assert tiles.used <= parts


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_configs_have_all_of_the_short_side(dtype: str) -> None:
    for m, n in ((1, 4096), (33, 2560), (64, 512), (1760, 9)):
        p = GemmProblem(m, n, 2560, dtype=dtype, device="cuda:Some GPU")
        found = list(configs(p))
        assert found
        for c in found:
            rows, columns, _ = c["tile"]  # type: ignore[misc]
            assert (rows if m <= n else columns) >= min(m, n)


def test_what_is_not_taken_is_said() -> None:
    p = GemmProblem(65, 100, 8, device="cuda:Some GPU")
    assert any("at most 64 rows or columns on a GPU" in reason for reason in unsupported(p))
    assert any("not a batch" in reason for reason in unsupported(replace(p, m=4, batch=2)))
    assert any("counts to" in reason for reason in unsupported(GemmProblem(4, 2**28, 2**10, device="cuda:Some GPU")))


@pytest.mark.parametrize(
    "change", [{"tile": (16, 64)}, {"tile": (16, 64, 5)}, {"parts": 33}, {"parts": 0}, {"more": 1}]
)
def test_configs_that_are_none_are_refused(change: dict[str, object]) -> None:
    solver, p = get("thin_gemm"), GemmProblem(4, 64, 128, device="cuda:Some GPU")
    a, b, out = (torch.empty(p.shape(role), device="meta") for role in "abc")
    c = Config(**{"tile": (16, 64, 64), "parts": 2, "warps": 4, "stages": 4, **change})  # type: ignore[arg-type]
    with pytest.raises((SolverUnavailable, ValueError), match=r"is no config of|would do"):
        solver.bind(p, c, a, b, out)
