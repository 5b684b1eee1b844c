"""Kernels over pixels: means and gates of channels, of any sizes and on any number of threads, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nn.programs.programs import assert_native

from tilewise.nn.programs import pixels
from tilewise.nn.programs.pixels import Pixels
from tilewise.nn.programs.program import Program
from tilewise.nn.programs.slots import Slot, Step
from tilewise.problems.base import dense_strides

pytest.importorskip("numba")
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 200), st.integers(1, 20), st.integers(1, 20))


def made(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(
        memory_format=torch.channels_last
    )


def poisoned(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.full_like(made(shape), float("nan"))


@settings(max_examples=40, deadline=None)
@given(shape=SHAPES, share=st.sampled_from([1, 64, 1 << 30]))
def test_means_and_products(shape: tuple[int, int, int, int], share: int) -> None:
    """A small share takes all threads, a large one takes one."""
    before, pixels.SHARE = pixels.SHARE, share
    try:
        call = Pixels("means", shape)
        x, gate, y = made(shape), made(call.gate, 1), poisoned(call.gate)
        call(x, y)
        torch.testing.assert_close(y.double(), x.double().mean((2, 3), keepdim=True), rtol=1e-5, atol=1e-6)
        for image in (0, 1):
            z = poisoned(shape)
            Pixels("scaled", shape, image)(*((gate, x) if image else (x, gate)), z)
            assert torch.equal(z, x * gate)
    finally:
        pixels.SHARE = before


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("channels", [5, 32, 79, 146])
def test_vectors_of_other_machines(lanes: int, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of vectors, single ones, and the channels that fill none."""
    monkeypatch.setattr(pixels, "vector_lanes", lambda: lanes)
    pixels._words.cache_clear()
    shape = (2, channels, 5, 3)
    x, gate = made(shape), made((2, channels, 1, 1), 1)
    means, scaled = poisoned((2, channels, 1, 1)), poisoned(shape)
    try:
        Pixels("means", shape)(x, means)
        Pixels("scaled", shape)(x, gate, scaled)
    finally:
        pixels._words.cache_clear()
    torch.testing.assert_close(means.double(), x.double().mean((2, 3), keepdim=True), rtol=1e-5, atol=1e-6)
    assert torch.equal(scaled, x * gate)


def test_nan_and_infinity_stay_in_their_channel() -> None:
    x = made((1, 70, 5, 5))
    x[0, 3, 2, 2], x[0, 66, 0, 0] = float("nan"), float("inf")
    means, scaled = poisoned((1, 70, 1, 1)), poisoned((1, 70, 5, 5))
    Pixels("means", (1, 70, 5, 5))(x, means)
    Pixels("scaled", (1, 70, 5, 5))(x, torch.ones_like(means), scaled)
    assert means[0, 3].isnan()
    assert means[0, 66].isinf()
    assert int(means.isfinite().sum()) == 68
    torch.testing.assert_close(scaled, x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", pixels.KERNELS)
def test_a_program_launches_it_from_native_code(name: str) -> None:
    shape = (2, 72, 14, 14)
    call = Pixels(name, shape)  # the image comes first
    slots = [Slot(s, dense_strides(s, "channels_last"), torch.float32, "input") for s in call.shapes[:-1]]
    slots.append(Slot(call.shapes[-1], dense_strides(call.shapes[-1], "channels_last"), torch.float32, "output"))
    inputs = list(range(len(slots) - 1))
    program = Program(slots, [Step("gate", tuple(inputs), len(inputs), run=call)], inputs, [len(inputs)])
    given = [made(s, i) for i, s in enumerate(call.shapes[:-1])]
    wanted = program(*given)
    assert_native(program, given, wanted)
