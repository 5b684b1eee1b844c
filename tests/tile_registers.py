"""Layers and memory for the tests of both solvers by tile registers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import strategies as st

from tilewise.problems.conv.axis import Axis
from tilewise.solvers.products._split import may_use_tile_registers

LIMITS = {2: 7e-6, 3: 3e-7}
"""Errors by the number of parts, relative to the sums of absolute products."""
GUARD = 1 << 12
"""Bytes around scratch that must stay as they are."""
with_tile_registers = pytest.mark.skipif(not may_use_tile_registers(), reason="this processor has no tile registers")
channels = st.one_of(st.integers(1, 70), st.sampled_from((32, 64, 96)))
layouts = st.tuples(*[st.sampled_from(("contiguous", "channels_last"))] * 3)


@st.composite
def axes(draw: st.DrawFn) -> tuple[Axis, ...]:
    """One or two axes of any stride, dilation and padding, which may crop."""
    found = []
    for _ in range(draw(st.integers(1, 2))):
        kernel, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 2))
        before, after = draw(st.integers(-1, 2)), draw(st.integers(-1, 2))
        least = (kernel - 1) * dilation + 1 - before - after
        size = draw(st.integers(max(least, 2 - min(0, before) - min(0, after), 1), 24))
        found.append(Axis(size, kernel, draw(st.integers(1, 3)), dilation, before, after))
    return tuple(found)


@contextmanager
def scratch(size: int) -> Iterator[torch.Tensor]:
    """Memory full of NaN, as is what lies around it, which must stay so."""
    space = torch.full((size + 3 * GUARD,), 0xFF, dtype=torch.uint8, device="cpu")
    first = GUARD - space.data_ptr() % GUARD
    yield space[first : first + size]
    assert bool((space[:first] == 0xFF).all())
    assert bool((space[first + size :] == 0xFF).all())
