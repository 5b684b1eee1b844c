"""Random numbers by their place: against published values, and as cells see them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import some
from torch import Tensor

from tilewise.rnn import scan
from tilewise.rnn.noise import philox, uniform

compiles = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_words_are_those_of_its_authors(counter: tuple[int, int, int, int], key: tuple[int, int], words: str) -> None:
    """The known answers of Random123, the authors' library, for philox4x32 with 10 rounds."""
    a, b, c, d = (torch.tensor(word, dtype=torch.int64, device="cpu") for word in counter)
    assert " ".join(f"{int(word):08x}" for word in philox((a, b, c, d), key[0] | key[1] << 32)) == words


def shown(x: Tensor, h: Tensor, state: Tensor, noise: Tensor) -> Tensor:
    """The last of six numbers of each unit."""
    return noise.chunk(6, -1)[5]


@compiles
@settings(max_examples=some(20), deadline=None)
@given(
    time=st.integers(1, 3), batch=st.integers(1, 5), hidden=st.sampled_from((1, 20)), seed=st.integers(0, 2**63 - 1),
    reverse=st.booleans(),
)  # fmt: skip
def test_kernels_and_torch_have_the_same_numbers(time: int, batch: int, hidden: int, seed: int, reverse: bool) -> None:
    x, h0, u = torch.zeros(time, batch, hidden), torch.zeros(batch, hidden), torch.zeros(hidden, hidden)
    options: dict[str, Any] = {"noise": 6, "seed": seed, "reverse": reverse}
    y, _ = scan(shown, x, h0, u, **options, compiled=True)
    assert torch.equal(y, scan(shown, x, h0, u, **options, compiled=False)[0])
    assert torch.equal(y.flatten(0, 1), uniform(seed, 0, y.flatten(0, 1), 6)[:, 5 * hidden :])


def test_rows_beyond_32_bits_have_numbers_of_their_own() -> None:
    like = torch.zeros(2, 30)
    far, near = uniform(1, 2**32, like, 1), uniform(1, 0, like, 1)
    assert not (far == near).all()
    assert torch.equal(uniform(1, 2**32 + 1, like, 1)[0], far[1])


def test_numbers_are_uniform() -> None:
    numbers = uniform(5, 0, torch.zeros(1000, 50, dtype=torch.float64), 4)
    assert 0.0 <= float(numbers.min()) < 1e-4
    assert 1 - 1e-4 < float(numbers.max()) < 1.0
    counts = torch.histc(numbers, 20, 0.0, 1.0)
    assert (counts / counts.mean() - 1).abs().max() < 0.05  # 10,000 a bin: five standard deviations
    for part in numbers.view(1000, 4, 50).unbind(1):
        assert abs(float(torch.corrcoef(torch.stack((part.flatten(), part.roll(1, 0).flatten())))[0, 1])) < 0.03
        assert abs(float(torch.corrcoef(torch.stack((part.flatten(), part.roll(1, 1).flatten())))[0, 1])) < 0.03


def test_without_a_seed_torchs_generator_gives_one() -> None:
    x, h0, u = torch.zeros(2, 3, 4), torch.zeros(3, 4), torch.zeros(4, 4)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(scan(shown, x, h0, u, noise=6)[0])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    state = torch.get_rng_state()
    scan(lambda x, h, s: s, x, h0, u)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"noise": -1}, "noise=-1: 0 to 16"),
        ({"noise": 17}, "noise=17: 0 to 16"),
        ({"noise": 1, "seed": -1}, "seed=-1: 0 to"),
        ({"noise": 1, "seed": 2**63}, "seed=9223372036854775808: 0 to"),
    ],
)
def test_what_is_out_of_range_is_named(options: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        scan(lambda x, h, s, n: n, torch.zeros(2, 3, 4), torch.zeros(3, 4), torch.zeros(4, 4), **options)
