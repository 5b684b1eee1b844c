"""Results that are written over the residuals that they add: where these are not read again, and by whom it may be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tilewise.execute import bind
from tilewise.kernels.native.programs import loading, why_never
from tilewise.nn.programs.arena import Life, packed
from tilewise.nn.programs.program import Program
from tilewise.nn.programs.slots import Slot, Step
from tilewise.plan import Plan
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers import get


def blocks(name: str, *, read_again: bool) -> Program:
    """y = conv(x), then twice y = conv(conv(y)) + y: residual blocks of 1x1 layers.

    With ``read_again`` the last step adds the first block's residual once more.
    """
    axes, last = (Axis(9, 1), Axis(7, 1)), ("channels_last",) * 3
    generator = torch.Generator("cpu").manual_seed(1)
    plain = ConvProblem(Pass.FPROP, 1, 24, 24, axes, constant_weight=True, checked_weight=False, layouts=last)
    adding = plain.changed(residual=True, activation="relu")
    solver = get(name)
    x = torch.empty(plain.shape("x"), dtype=torch.float32, device="cpu").to(memory_format=torch.channels_last)
    weight = 0.3 * torch.randn(plain.shape("w"), generator=generator, dtype=torch.float32, device="cpu")
    weight = weight.to(memory_format=torch.channels_last)
    first, second = (
        bind(Plan(p.key, name, solver.version, next(iter(solver.configs(p)))), p, x, weight) for p in (plain, adding)
    )
    slots = [Slot.like(x, "input"), Slot.like(weight, "constant"), *[Slot.like(x)] * 5, Slot.like(x, "output")]
    steps = [
        Step("stem", (0, 1), 2, plan=first),
        Step("conv1", (2, 1), 3, plan=first),
        Step("conv2", (3, 1, 2), 4, plan=second),
        Step("conv3", (4, 1), 5, plan=first),
        Step("conv4", (5, 1, 4), 6, plan=second),
        Step("end", (6, 1, 2 if read_again else 6), 7, plan=second),
    ]
    return Program(slots, steps, [0], [7])


def by_torch(program: Program, x: torch.Tensor, *, read_again: bool) -> torch.Tensor:
    weight = program.slots[1].tensor
    assert weight is not None
    y = stem = functional.conv2d(x.double(), weight.double())
    for _ in range(2):
        y = functional.relu(functional.conv2d(functional.conv2d(y, weight.double()), weight.double()) + y)
    return functional.relu(functional.conv2d(y, weight.double()) + (stem if read_again else y))


@pytest.mark.parametrize("read_again", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_blocks_share_the_memory_of_their_residuals(read_again: bool, native: bool) -> None:
    pytest.importorskip("numba")
    program = blocks("indirect", read_again=read_again)
    if native:
        if reason := why_never() or loading().finished().reason:
            pytest.skip(reason)
        assert program.use_native() == ""
    assert program.over == {4: 2, 6: 4, **({7: 2} if read_again else {})}, "a step's own input is never written over"
    assert program.offsets[6] == program.offsets[4]
    assert (program.offsets[4] == program.offsets[2]) is not read_again
    generator = torch.Generator("cpu").manual_seed(2)
    x = torch.randn((1, 24, 9, 7), generator=generator, dtype=torch.float32, device="cpu")
    x = x.to(memory_format=torch.channels_last)
    want = by_torch(program, x, read_again=read_again)
    for _ in range(3):
        assert float((program(x).double() - want).norm() / want.norm()) < 1e-6


def test_residuals_are_shown_as_they_were_read() -> None:
    pytest.importorskip("numba")
    program = blocks("indirect", read_again=False)
    x = torch.ones((1, 24, 9, 7), dtype=torch.float32, device="cpu").to(memory_format=torch.channels_last)
    seen: dict[int, tuple[torch.Tensor, ...]] = {}

    def keep(number: int, inputs: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        seen[number] = tuple(tensor.clone() for tensor in (*inputs, result))

    program.show_steps([x], keep)
    assert torch.equal(seen[2][2], seen[0][-1])
    assert torch.equal(seen[4][2], seen[2][-1])
    assert not torch.equal(seen[2][2], seen[2][-1])


def test_solvers_that_read_the_residual_later_get_memory_of_their_own() -> None:
    program = blocks("gemm", read_again=False)
    assert program.over == {}
    x = torch.ones((1, 24, 9, 7), dtype=torch.float32, device="cpu").to(memory_format=torch.channels_last)
    want = by_torch(program, x, read_again=False)
    assert float((program(x).double() - want).norm() / want.norm()) < 1e-6


@pytest.mark.parametrize("seen", ["view", "alias"])
def test_a_residual_that_the_layer_also_reads_through_another_slot_is_not_written_over(seen: str) -> None:
    """y = relu(conv(a part of x) + x): while tiles are written, others still read x."""
    pytest.importorskip("numba")
    axes, last = (Axis(60, 3, 1, 1, 1, 1), Axis(50, 3, 1, 1, 1, 1)), ("channels_last",) * 3
    stem = ConvProblem(Pass.FPROP, 1, 8, 8, axes, constant_weight=True, checked_weight=False, layouts=last)
    adding = stem.changed(residual=True, activation="relu")
    generator = torch.Generator("cpu").manual_seed(4)
    weight = torch.randn(stem.shape("w"), generator=generator, dtype=torch.float32, device="cpu")
    weight = weight.to(memory_format=torch.channels_last)
    x = torch.randn(stem.shape("x"), generator=generator, dtype=torch.float32, device="cpu")
    x = x.to(memory_format=torch.channels_last)
    solver = get("indirect")
    first, second = (
        bind(Plan(p.key, "indirect", solver.version, next(iter(solver.configs(p)))), p, x, weight)
        for p in (stem, adding)
    )
    like = (x.shape, x.stride(), torch.float32)
    alias = Slot(*like) if seen == "alias" else Slot(*like, view_of=2)
    slots = [Slot.like(x, "input"), Slot.like(weight, "constant"), Slot(*like), alias, Slot(*like)]
    slots.append(Slot.like(x, "output"))
    steps = [
        Step("stem", (0, 1), 2, plan=first),
        Step("block", (3, 1, 2), 4, plan=second),
        Step("end", (4, 1), 5, plan=first),
    ]
    if seen == "alias":
        steps.insert(1, Step("same", (2,), 3, run=lambda tensor: tensor.view(tensor.shape), returns_new=True))
    program = Program(slots, steps, [0], [5])
    assert program.over == {}
    y = functional.conv2d(x.double(), weight.double(), padding=1)
    want = functional.relu(functional.conv2d(y, weight.double(), padding=1) + y)
    want = functional.conv2d(want, weight.double(), padding=1)
    program.use_native()
    assert float((program(x).double() - want).norm() / want.norm()) < 1e-6


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12), st.integers(0, 5)), min_size=1, max_size=12), st.data()
)
def test_only_what_follows_shares_memory(drawn: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """Tensors in use at the same time lie apart, but for a pair that may be written over and meets in one step."""
    lives = {i: Life(64 * size, first, first + length) for i, (size, first, length) in enumerate(drawn)}
    later = data.draw(st.lists(st.sampled_from(sorted(lives)), unique=True))
    free, over = set(lives), dict[int, int]()
    for index in later:
        before = data.draw(st.sampled_from(sorted(lives)))
        if before != index and before in free:
            free.discard(before)
            over[index] = before
    offsets, total = packed(lives, over=over)
    assert offsets.keys() == lives.keys()
    for i, one in lives.items():
        assert offsets[i] + one.size <= total
        for j, other in lives.items():
            apart = offsets[i] + one.size <= offsets[j] or offsets[j] + other.size <= offsets[i]
            if i < j and one.meets(other) and not apart:
                pairs = ((one, other, over.get(j) == i), (other, one, over.get(i) == j))  # drawn pairs may be both
                assert any(written_over and before.last == after.first for before, after, written_over in pairs)
