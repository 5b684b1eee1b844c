"""Mini-batches of sequences: every sequence once, none over the memory, the same for the same seed."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import some
from torch.utils.data import DataLoader, TensorDataset

import tilewise
from tilewise.rnn import batch_for, batches

LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=60)


@settings(max_examples=some(200))
@given(LENGTHS, st.integers(1, 50), st.integers(1, 20), st.integers(0, 2000), st.integers(1, 12), st.booleans())
def test_every_sequence_once_and_none_over_memory(lengths, step, longest, more, batch, is_random) -> None:
    memory = max(*lengths, longest) * step + more
    generator = torch.Generator(device="cpu").manual_seed(3) if is_random else None
    found = batches(lengths, memory, step=step, batch=batch, generator=generator)
    for _ in range(2):
        groups = list(found)
        assert len(groups) == len(found)
        assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))
        assert all(0 < len(group) <= batch for group in groups)
        assert all(len(group) * max(lengths[i] for i in group) * step <= memory for group in groups)
        # Grouped by length: the ranges of two mini-batches do not overlap.
        ranges = sorted((min(lengths[i] for i in g), max(lengths[i] for i in g)) for g in groups)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))


@settings(max_examples=some(200))
@given(LENGTHS, st.integers(1, 100), st.integers(1, 9), st.integers(0, 5000))
def test_batch_is_the_largest_that_fits_the_percentile(lengths, percentile, step, more) -> None:
    # Independent of the library's way: the shortest length that so many of all do not exceed.
    length = min(n for n in lengths if sum(m <= n for m in lengths) * 100 >= percentile * len(lengths))
    memory = length * step + max(more, step)
    found = batch_for(lengths, memory, percentile, step=step)
    assert 1 <= found <= len(lengths)
    assert found * length * step <= memory
    assert found == len(lengths) or (found + 1) * max(length, 1) * step > memory


def test_mini_batches_of_long_sequences_are_smaller() -> None:
    lengths = [10] * 95 + [100] * 5
    usual = batch_for(lengths, 320, step=1)
    assert usual == 32
    assert [len(group) for group in batches(lengths, 320, step=1)] == [30, 32, 32, 3, 3]


def test_the_same_seed_draws_the_same_and_each_pass_anew() -> None:
    def drawn(seed: int) -> list[list[list[int]]]:
        generator = torch.Generator(device="cpu").manual_seed(seed)
        found = batches([7] * 20 + [9] * 20, 100, step=1, generator=generator)
        return [list(found), list(found)]

    assert drawn(1) == drawn(1) != drawn(2)
    first, second = drawn(1)
    assert first != second
    plain = list(batches([7] * 20 + [9] * 20, 100, step=1))
    assert plain == list(batches([7] * 20 + [9] * 20, 100, step=1))
    assert plain[0] == list(range(len(plain[0])))


def test_global_random_numbers_stay_as_they_were() -> None:
    before = torch.get_rng_state()
    list(batches([3, 1, 2], 9, step=1, generator=torch.Generator(device="cpu")))
    batch_for([3, 1, 2], "1GiB", step=torch.nn.GRU(3, 4, dtype=torch.float32, device="cpu").eval())
    torch.set_rng_state(before)  # the module drew
    batch_for([3], "1GiB", step=tilewise.RecurrentProblem("lstm", 1, 1, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_takes_them(workers: int) -> None:
    lengths = torch.tensor([4, 9, 2, 7, 7, 1], dtype=torch.int64)
    data = TensorDataset(torch.arange(6, dtype=torch.int64), lengths)
    loader = DataLoader(data, batch_sampler=batches(lengths, 14, step=1, batch=4), num_workers=workers)
    assert len(loader) == 3
    seen = [(index.tolist(), int(length.max())) for index, length in loader]
    assert sorted(itertools.chain(*(index for index, _ in seen))) == list(range(6))
    assert all(len(index) * longest <= 14 for index, longest in seen)
    assert statistics.mean(len(index) for index, _ in seen) == 2


@pytest.mark.parametrize("make", [list, tuple, np.array, lambda values: torch.tensor(values, dtype=torch.int32)])
def test_lengths_come_in_any_sequence(make) -> None:
    assert batch_for(make([1, 2, 3]), 4, 50, step=1) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"lengths": []}, "lengths=[]: a list or 1-D tensor"),
        ({"lengths": "12"}, "lengths='12'"),
        ({"lengths": [3, -1]}, "lengths[1]=-1"),
        ({"lengths": [3, 2.5]}, "lengths[1]=2.5"),
        ({"lengths": [True]}, "lengths[0]=True"),
        ({"lengths": torch.ones(2, 2, dtype=torch.int64)}, "lengths[0]=[1, 1]"),
        ({"memory": "much"}, "memory='much'"),
        ({"memory": -1}, "memory=-1"),
        ({"percentile": 0}, "percentile=0: a number above 0"),
        ({"percentile": math.nan}, "percentile=nan"),
        ({"percentile": "95"}, "percentile='95'"),
        ({"step": "fast"}, "step='fast'"),
        ({"step": 0}, "step=0: takes no memory"),
        ({"step": torch.nn.Linear(2, 2, dtype=torch.float32, device="cpu")}, "an nn.RNN, nn.GRU or nn.LSTM"),
    ],
)
def test_what_makes_no_sense_is_named(words, says) -> None:
    arguments = {"lengths": [1, 2], "memory": 100, "percentile": 95, "step": 1, **words}
    for function in (batch_for, batches):
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is looked at below
            function(**arguments)
        assert says in str(raised.value)


def test_a_sequence_over_memory_is_named() -> None:
    with pytest.raises(ValueError, match=r"lengths\[1\]=90: this sequence alone takes 180 B.*at most 50 steps"):
        batches([10, 90, 50], "100B", step=2)
    with pytest.raises(ValueError, match=r"one sequence of 90 steps, the percentile 95 of lengths, takes 180 B"):
        batch_for([10, 90, 50], 100, step=2)
    assert batch_for([10, 90, 50], 100, 50, step=2) == 1
    with pytest.raises(ValueError, match=r"batch=0"):
        batches([1], 100, step=1, batch=0)
    with pytest.raises(ValueError, match=r"generator=4"):
        batches([1], 100, step=1, generator=4)  # type: ignore[arg-type]
