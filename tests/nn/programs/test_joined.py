"""Images joined along channels, scaled, shifted and activated: of any sizes and on any number of threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nn.programs.programs import assert_native

from tilewise.nn.programs import joined, pixels
from tilewise.nn.programs.joined import Joined
from tilewise.nn.programs.program import Program
from tilewise.nn.programs.slots import Slot, Step
from tilewise.problems.activations import activated
from tilewise.problems.base import dense_strides

pytest.importorskip("numba")
CHANNELS = st.lists(st.integers(1, 150), min_size=1, max_size=5).map(tuple)
ACTIVATIONS = ("none", "relu", "silu", "hardswish", "leaky_relu:0.1", "clamp:-0.5:1.0")


def operands(call: Joined, seed: int = 0) -> list[torch.Tensor]:
    """Inputs, factors and summands."""
    drawn = torch.Generator("cpu").manual_seed(seed)
    tensors = [torch.randn(s, generator=drawn, dtype=torch.float32, device="cpu") for s in call.shapes[:-1]]
    return [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]


def poisoned(call: Joined) -> torch.Tensor:
    """A result of nothing but NaN."""
    empty = torch.full(call.shapes[-1], float("nan"), dtype=torch.float32, device="cpu")
    return empty.contiguous(memory_format=torch.channels_last)


def in_float64(call: Joined, given: list[torch.Tensor]) -> torch.Tensor:
    *inputs, scale, shift = (t.double() for t in given)
    x = torch.cat(inputs, 1) * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)
    return activated(x, call.activation)


@settings(max_examples=40, deadline=None)
@given(
    images=st.integers(1, 3), channels=CHANNELS, height=st.integers(1, 12), width=st.integers(1, 12),
    activation=st.sampled_from(ACTIVATIONS), share=st.sampled_from([1, 64, 1 << 30]),
)  # fmt: skip
def test_joined_images(
    images: int, channels: tuple[int, ...], height: int, width: int, activation: str, share: int
) -> None:
    """A small share takes all threads, a large one takes one."""
    before, pixels.SHARE = pixels.SHARE, share
    try:
        call = Joined(images, channels, height, width, activation)
        given, y = operands(call), poisoned(call)
        call(*given, y)
        torch.testing.assert_close(y.double(), in_float64(call, given), rtol=1e-5, atol=1e-6)
    finally:
        pixels.SHARE = before


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_vectors_of_other_machines(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of blocks of vectors, single ones, and channels that fill none."""
    monkeypatch.setattr(joined, "vector_lanes", lambda: lanes)
    joined._words.cache_clear()
    call = Joined(2, (64, 37, 16, 5, 130), 5, 3, "relu")
    given, y = operands(call), poisoned(call)
    try:
        call(*given, y)
    finally:
        joined._words.cache_clear()
    torch.testing.assert_close(y.double(), in_float64(call, given), rtol=1e-5, atol=1e-6)


def test_nan_and_infinity_stay_where_they_are() -> None:
    call = Joined(1, (70, 3), 5, 5, "relu")
    given, y = operands(call), poisoned(call)
    given[0][0, 3, 2, 2], given[1][0, 1, 0, 0] = float("nan"), float("inf")
    given[2][71] = 2.0  # the factor of the channel with the infinity
    call(*given, y)
    assert y[0, 3, 2, 2].isnan()
    assert y[0, 71, 0, 0] == float("inf")
    assert int(y.isfinite().sum()) == 73 * 25 - 2


def test_a_program_launches_it_from_native_code_with_one_input_twice() -> None:
    call = Joined(2, (40, 8, 40), 14, 14, "relu")
    one, two, _, *rest = operands(call)
    given = [one, two, *rest]
    slots = [Slot.like(t, "input") for t in given]
    slots.append(Slot(call.shapes[-1], dense_strides(call.shapes[-1], "channels_last"), torch.float32, "output"))
    program = Program(slots, [Step("norm", (0, 1, 0, 2, 3), 4, run=call)], [0, 1, 2, 3], [4])
    wanted = program(*given)
    torch.testing.assert_close(wanted.double(), in_float64(call, [one, two, one, *rest]), rtol=1e-5, atol=1e-6)
    assert_native(program, given, wanted)
