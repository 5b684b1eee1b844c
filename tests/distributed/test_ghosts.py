"""Ranges that ranks hold and read, against sets of indices; local convolutions against slices of the whole one."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.strategies import axes

from tilewise.distributed.mesh.cost import local_problem
from tilewise.distributed.parts.ghosts import Resized, Sliding, ghosts, obstacle, received, shares
from tilewise.distributed.parts.layout import Grid, Layout, even_cuts
from tilewise.distributed.passes.share import share_of
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_cover_the_whole_evenly(size: int, parts: int) -> None:
    found = shares(size, parts)
    assert [i for a, b in found for i in range(a, b)] == list(range(size))
    lengths = [b - a for a, b in found]
    assert max(lengths) - min(lengths) <= 1


def window(axis: Axis, outs: range) -> set[int]:
    """The stretch of inputs that windows of ``outs`` lie over, by what a window is."""
    taps = {j * axis.stride - axis.before + r * axis.dilation for j in outs for r in range(axis.kernel)}
    if not taps:
        return set()
    return set(range(max(min(taps), 0), min(max(taps) + 1, axis.size)))


@given(st.lists(axes(longest=40), min_size=1, max_size=2), st.integers(1, 5), st.integers(1, 5))
def test_what_is_received_is_what_is_read_and_not_held(found: list[Axis], first: int, second: int) -> None:
    parts = (first, second)[: len(found)]
    most = 0
    for ranks in itertools.product(*map(range, parts)):
        reads, holds = [], []
        for axis, n, rank in zip(found, parts, ranks, strict=True):
            reads.append(window(axis, range(*shares(axis.out, n)[rank])))
            holds.append(set(range(*shares(axis.size, n)[rank])))
        needed = set(itertools.product(*reads))
        most = max(most, len(needed - set(itertools.product(*holds))))
    assert received([ghosts(Sliding(a), n) for a, n in zip(found, parts, strict=True)]) == most


@given(axes(longest=40), st.integers(2, 5))
def test_the_interior_reads_nothing_of_others(axis: Axis, parts: int) -> None:
    for rank, ghost in enumerate(ghosts(Sliding(axis), parts)):
        own = set(range(*shares(axis.size, parts)[rank]))
        outs = range(*shares(axis.out, parts)[rank])
        inside = [j for j in outs if window(axis, range(j, j + 1)) <= own]
        if len(outs) and window(axis, outs):
            assert ghost.interior == (inside[-1] + 1 - inside[0] if inside else 0)
            assert ghost.read == len(window(axis, outs))
            assert ghost.kept == len(window(axis, outs) & own)


@given(axes(longest=30), st.integers(2, 4), st.booleans())
def test_a_local_convolution_gives_a_slice_of_the_whole_one(axis: Axis, parts: int, transposed: bool) -> None:
    reader = Sliding(axis, transposed)
    pass_ = Pass.DGRAD if transposed else Pass.FPROP
    whole = ConvProblem(pass_, 1, 2, 3, (axis,))
    a, w = (torch.randn(whole.shape(role), dtype=torch.float64) for role in whole.operands)
    wanted = whole.reference(a, w)
    for c, d in shares(reader.out, parts):
        local = reader.local(c, d) if d > c else None
        if local is None:
            continue
        problem = replace(whole, axes=(local,))
        if transposed:
            low, high = reader.reads(c, d) or (0, 0)
            part = a[:, :, low:high]
        else:
            ends = (axis.before, max((d - 1) * axis.stride + axis.reach - axis.size - axis.before, 0))
            grown = torch.nn.functional.pad(a, (max(ends[0], 0), ends[1]))
            first = c * axis.stride - min(axis.before, 0)
            part = grown[:, :, first : first + local.size]
        torch.testing.assert_close(problem.reference(part, w), wanted[:, :, c:d])


@given(st.sampled_from(list(Pass)), axes(longest=40), axes(longest=40), st.integers(1, 4), st.integers(1, 4))
def test_local_problems_are_parts_of_the_problem(pass_: Pass, h: Axis, w: Axis, rows: int, columns: int) -> None:
    assume(min(h.out, h.size) >= rows and min(w.out, w.size) >= columns)
    problem = ConvProblem(pass_, 2, 3, 4, (h, w))
    local = local_problem(problem, [Sliding(h), Sliding(w)], [rows, columns])
    if local is None:  # then all ranks read padding alone
        return
    for name, axis, n, found in (("h", h, rows, local.axes[0]), ("w", w, columns, local.axes[1])):
        sizes = [stop - start for start, stop in shares(axis.out, n)]
        parts = problem.split(name, sizes, scatter=pass_ is Pass.DGRAD)
        cut = [p.problem.axes[problem.space.index(name)] for p in parts if p.problem is not None]
        if n > 1:
            assert found.out == max(a.out for a in cut)
            assert found.size == max(a.size + a.before + a.after for a in cut)
        else:
            assert found == axis


@pytest.mark.parametrize(("mode", "taps"), [("nearest", 1), ("linear", 2)])
@given(st.integers(2, 12), st.integers(2, 30), st.integers(1, 4))
def test_interpolation_reads_what_gets_a_gradient(mode: str, taps: int, size: int, out: int, parts: int) -> None:
    x = torch.randn(1, 1, size, dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.interpolate(x, size=out, mode=mode)
    reader = Resized(size, out, taps)
    for c, d in shares(out, parts):
        if d > c:
            (grad,) = torch.autograd.grad(y[..., c:d].sum(), x, retain_graph=True)
            low, high = reader.reads(c, d) or (0, 0)
            touched = grad.flatten().nonzero().flatten().tolist()
            assert set(touched) <= set(range(low, high))
            assert high - low <= len(range(min(touched), max(touched) + 1)) + taps


def test_what_cannot_be_split_is_said() -> None:
    assert obstacle(Sliding(Axis(7, 3, 1, 1, 1, 1)), 8, "h") == "h has 7 positions for 8 ranks"
    wide = obstacle(Sliding(Axis(8, 7, 1, 1, 3, 3)), 4, "h")
    assert wide == "along h a halo of 3 is wider than the neighbour's shard of 2"
    assert obstacle(Sliding(Axis(8, 5, 1, 1, 2, 2)), 4, "h") == ""


@pytest.mark.parametrize(
    ("axis", "transposed"),
    [
        (Axis(64, 3, 1, 1, 1, 1), False),
        (Axis(64, 3, 2, 1, 1, 1), False),
        (Axis(64, 7, 2, 1, 3, 3), False),
        (Axis(64, 3, 1, 3, 3, 3), False),
        (Axis(64, 2, 2), False),
        (Axis(64, 2, 2), True),
        (Axis(64, 4, 2, 1, 1, 1), True),
    ],
)
@pytest.mark.parametrize("parts", [(2, 1), (4, 1), (2, 2)])
def test_what_the_ranks_do_receive_is_what_the_model_says(axis: Axis, transposed: bool, parts: tuple[int, int]) -> None:
    size = axis.out if transposed else axis.size
    most = 0
    for coords in itertools.product(*map(range, parts)):
        layout = Layout(Grid((-2, -1), parts, coords), (even_cuts(size, parts[0]), even_cuts(size, parts[1])))
        moves = share_of(layout, (axis, axis), transposed).transfer
        most = max(most, sum(math.prod(stop - start for start, stop in box) for _, box in moves.receives))
    reader = Sliding(axis, transposed)
    assert received([ghosts(reader, n) for n in parts]) == most
