"""Copies in wide elements move the same bytes, whatever the strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.solvers.common.buffers import Strided, dense
from tilewise.solvers.lowering._copies import Copy


@settings(max_examples=120)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from((1, 2, 3, 4, 6, 8, 16))),
    gaps=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    offset=st.sampled_from((0, 1, 2, 4, 8)),
    base=st.sampled_from((0, 1, 2, 8)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
)
def test_copies(sizes: tuple[int, int, int], gaps: tuple[int, int], offset: int, base: int, dtype: torch.dtype) -> None:
    row = sizes[2] + gaps[0]
    source = Strided(sizes, (sizes[1] * row + gaps[1], row, 1), offset)
    target = Strided(sizes, dense(sizes))
    whole = torch.randn(base + offset + sizes[0] * (sizes[1] * row + gaps[1]) + 16).to(dtype)
    tensor = whole[base:]
    buffer = torch.full((sizes[0] * sizes[1] * sizes[2] + 3,), torch.nan, dtype=dtype)
    copy = Copy.of(source, target, (dtype, dtype), 16)
    copy.run(tensor, buffer)
    assert torch.equal(target.of(buffer), source.of(tensor))
    assert bool(buffer[-3:].isnan().all())
    back = torch.full_like(whole, torch.nan)[base:]
    Copy.of(target, source, (dtype, dtype), 16).run(buffer, back)
    assert torch.equal(source.of(back), source.of(tensor))
    assert int((~back.isnan()).sum()) == sizes[0] * sizes[1] * sizes[2]
    copy.add(tensor, buffer)
    assert torch.equal(target.of(buffer), source.of(tensor) * 2)


@pytest.mark.parametrize(
    ("alignment", "last", "wide"),
    [(16, 16, torch.complex128), (8, 16, torch.int64), (4, 16, torch.int32), (2, 16, None), (16, 6, torch.int32),
     (16, 12, torch.int64), (16, 5, None)],
)  # fmt: skip
def test_elements_are_as_wide_as_alignment_and_runs_allow(alignment: int, last: int, wide: torch.dtype | None) -> None:
    view = Strided((3, last), (2 * last, 1))
    assert Copy.of(view, view, (torch.bfloat16, torch.bfloat16), alignment).wide == wide


def test_types_that_differ_are_converted() -> None:
    view = Strided((2, 8), (8, 1))
    copy = Copy.of(view, view, (torch.bfloat16, torch.float32), 16)
    source, target = torch.randn(16).bfloat16(), torch.empty(16)
    copy.run(source, target)
    assert copy.wide is None
    assert torch.equal(target, source.float())


def test_rows_behind_one_another_are_one() -> None:
    window = Strided((2, 3, 4, 3), (100, 24, 3, 1))
    copy = Copy.of(window, Strided(window.sizes, dense(window.sizes)), (torch.bfloat16, torch.bfloat16), 16)
    assert copy.source.sizes == (2, 3, 12)
    assert copy.wide is torch.int64


def test_nothing_is_copied_from_nothing() -> None:
    view = Strided((2, 0, 8), (8, 8, 1))
    target = torch.full((16,), torch.nan)
    Copy.of(view, view, (torch.float32, torch.float32), 16).run(torch.zeros(16), target)
    assert bool(target.isnan().all())
