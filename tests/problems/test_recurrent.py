"""Recurrent layers as problems: keys, tensors, notation, the value in float64, and a check that finds what is wrong."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.recurrent import called, layers, module_of
from torch.nn.utils.rnn import pack_padded_sequence

from tilewise.problems.base import Problem, Tensors
from tilewise.problems.kinds import from_key
from tilewise.problems.operands import make_operands
from tilewise.problems.recurrent import reference as reference_module
from tilewise.problems.recurrent.checks import dense_operands, errors_of, whole_operands
from tilewise.problems.recurrent.notation import format_recurrent, looks_like_recurrent, parse_recurrent
from tilewise.problems.recurrent.packing import Packing, packing_of, typical_packing
from tilewise.problems.recurrent.problem import RecurrentProblem

ALTERED: dict[str, Any] = {
    "cell": "gru", "time": 9, "batch": 9, "inputs": 9, "hidden": 9, "layers": 2, "directions": 2, "biases": False,
    "packed": 9, "projection": 2, "task": "training", "dtype": "bf16", "precision": "tf32", "device": "cuda:Some GPU",
}  # fmt: skip
PLAIN = RecurrentProblem("lstm", 4, 3, 5, 6)


def test_a_key_holds_every_field_and_is_read_back() -> None:
    others = [PLAIN, *(replace(PLAIN, **{field.name: ALTERED[field.name]}) for field in fields(PLAIN))]
    assert len({other.key for other in others}) == len(fields(PLAIN)) + 1
    assert all(from_key(other.key) == other for other in others)


@given(first=layers(), second=layers())
def test_equal_keys_mean_equal_problems(first: RecurrentProblem, second: RecurrentProblem) -> None:
    assert (first.key == second.key) == (first == second)
    assert isinstance(first, Problem)
    assert RecurrentProblem.from_key(first.key) == first


@pytest.mark.parametrize(
    "key",
    [
        "rnn lstm inference fp32 ieee t4n3i5h0l1d1 biases cpu",
        "rnn lstm inference fp32 ieee t4n3i5h06l1d1 biases cpu",
        "rnn lstm inference fp32 ieee t4n3i5h6l1d3 biases cpu",
        "rnn lstm inference fp64 ieee t4n3i5h6l1d1 biases cpu",
        "rnn lstm inference bf16 tf32 t4n3i5h6l1d1 biases cpu",
        "rnn lstm inference fp32 ieee t4n3i5h6l1d1 biases packed5 cpu",
        "rnn lstm inference fp32 ieee t4n3i5h6l1d1 biases packed0 cpu",
        "rnn lstm inference fp32 ieee t4n3i5h6l1d1 biases projection0 cpu",
        "rnn lstm inference fp32 ieee t4n3i5h6l1d1 biases projection6 cpu",
        "rnn gru inference fp32 ieee t4n3i5h6l1d1 biases projection3 cpu",
        "rnn lstm forward fp32 ieee t4n3i5h6l1d1 biases cpu",
        "rnn rnn inference fp32 ieee t4n3i5h6l1d1 biases cpu",
        "rnn lstm inference fp32 ieee t4n3i5h6l99999d1 biases cpu",
        "rnn lstm inference fp32 ieee t4n3i5h9999999999l1d1 biases cpu",
        "rnn lstm inference fp32 ieee t4n3i5h6l1d1 biases cpu\n",
        "rnn lstm inference fp32 ieee t4n3i5h6l1d1 biases meta",
        "rnn",
    ],
)
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_key(key)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"time": 0}, "time=0: must be at least 1"),
        ({"hidden": -1}, "hidden=-1: must be at least 1"),
        ({"projection": 6}, "projection=6: 0, or 1 to 5 of 6 would do"),
        ({"projection": -1}, "projection=-1: 0, or 1 to 5 of 6 would do"),
        ({"projection": 3, "cell": "gru"}, "projection=3: of an LSTM alone; 0 would do for cell='gru'"),
        ({"packed": 13}, "packed=13: 6 to 12 rows would do, or 0 for no packed batch"),
        ({"layers": 0}, "layers=0: must be at least 1"),
        ({"directions": 3}, "directions=3: 1, or 2 for both, would do"),
        ({"cell": "rnn"}, "cell='rnn': one of rnn_tanh, rnn_relu, gru, lstm would do"),
        ({"task": "forward"}, "task='forward': one of inference, training would do"),
        ({"dtype": "fp64"}, "dtype='fp64': one of fp32, bf16, fp16 would do"),
    ],
)
def test_values_that_make_no_layer_are_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(PLAIN, **values)


def test_a_layer_is_not_cut() -> None:
    assert PLAIN.cut_axes == ()
    assert PLAIN.batch_size == 1
    with pytest.raises(ValueError, match="axis='batch': a recurrent layer is not cut"):
        PLAIN.split("batch", (1, 2))
    with pytest.raises(ValueError, match="axis='batch': a recurrent layer is not cut"):
        PLAIN.extent("batch")
    with pytest.raises(ValueError, match="role='z': one of x, h0, c0"):
        PLAIN.shape("z")


@given(p=layers())
def test_text_is_read_back(p: RecurrentProblem) -> None:
    p = replace(p, dtype="bf16", task="training")
    text = format_recurrent(p)
    assert parse_recurrent(text, dtype="bf16", task="training") == p
    assert looks_like_recurrent(text)


def test_defaults_are_left_out_of_text() -> None:
    assert format_recurrent(PLAIN) == "lstm:t4n3i5h6"
    assert format_recurrent(replace(PLAIN, layers=2, directions=2, biases=False)) == "lstm:t4n3i5h6l2d2b0"
    assert format_recurrent(replace(PLAIN, packed=7, projection=2)) == "lstm:t4n3i5h6p7r2"
    assert parse_recurrent(" gru:h6i5n3t4b1l1 ") == RecurrentProblem("gru", 4, 3, 5, 6)
    assert not looks_like_recurrent("alexnet")
    assert not looks_like_recurrent("16x512:512x1024")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lstm:t4n3i5", "has no h"),
        ("lstm:t4n3i5h6q1", "has 'q'; one of t, n, i, h, l, d, b, p, r would do"),
        ("lstm:t4t4n3i5h6", "has 't' twice"),
        ("lstm:t4n3i5h6b2", "b2; b0 for no biases would do"),
        ("lstm:t4n3i5h6l10000", "at most 9999 layers"),
        ("lstm:t4n3i5h0", "hidden=0"),
        ("lstm:t4n3i5h6p5", "packed=5: 6 to 12 rows would do"),
        ("lstm:t4n3i5h6r6", "projection=6: 0, or 1 to 5 of 6 would do"),
        ("rnn_tanh:t4n3i5h6r2", "projection=2: of an LSTM alone"),
        ("lstm:t99999999999999n99999999999999i5h6", "beyond any memory"),
        ("rnn:t4n3i5h6", "not one of rnn_tanh, rnn_relu, gru, lstm"),
        ("lstm:", "not one of"),
    ],
)
def test_text_that_is_no_layer_says_why(text: str, says: str) -> None:
    assert looks_like_recurrent(text)
    with pytest.raises(ValueError, match=says):
        parse_recurrent(text)


@settings(max_examples=60)
@given(p=layers(dtype="fp32", task="training"), parted=st.booleans())
def test_the_reference_is_what_torch_computes_in_float64(p: RecurrentProblem, parted: bool) -> None:
    named = dict(zip(p.operands, (t.double() for t in dense_operands(p, 1)), strict=True))
    module = module_of(p, tuple(named[role] for role in p.weights))
    leaves = {role: named[role].requires_grad_() for role in ("x", "h0", "c0") if role in named}
    state = (leaves["h0"], leaves["c0"]) if "c0" in leaves else leaves["h0"]
    y, last = called(module, leaves["x"], state, packing_of(p) if p.packed else None)
    results = (y, *last) if isinstance(last, tuple) else (y, last)
    starts = [named[f"d{role}"] for role in ("y", "hn", "cn")[: len(results)]]
    want = (*results, *torch.autograd.grad(results, [*leaves.values(), *module._flat_weights], starts))
    with pytest.MonkeyPatch.context() as patch:
        if parted:
            patch.setattr(reference_module, "REFERENCE_BYTES", 1)
        got = p.reference(*named.values())
    assert tuple(t.shape for t in got) == tuple(p.shape(role) for role in p.results)
    for role, a, b in zip(p.results, got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text, role=role: f"{role}: {text}")
    forward = replace(p, task="inference")
    for a, b in zip(forward.reference(*list(named.values())[: len(forward.operands)]), results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@given(p=layers())
def test_sizes_are_those_of_the_tensors(p: RecurrentProblem) -> None:
    assert [tuple(t.shape) for t in make_operands(p)] == [p.shape(role) for role in p.operands]
    module = module_of(replace(p, dtype="fp32"), tuple(torch.zeros(p.shape(r), dtype=torch.float32) for r in p.weights))
    assert [tuple(w.shape) for w in module._flat_weights] == [p.shape(role) for role in p.weights]
    assert p.bytes == sum(p.nbytes(role) for role in p.roles)
    matrices = sum(math.prod(p.shape(role)) for role in p.weights if role.startswith("w"))
    assert p.flops == 2 * p.rows * matrices * (3 if p.task == "training" else 1)


@settings(max_examples=40)
@given(p=layers(cell="rnn_relu", dtype="fp32"))
def test_whole_numbers_are_computed_exactly(p: RecurrentProblem) -> None:
    """So no argument of a ReLU falls on another side of 0 in fp32."""
    operands = whole_operands(p, 1)
    module = module_of(p, operands[2 : 2 + len(p.weights)])
    y, hn = called(module, *operands[:2], packing_of(p) if p.packed else None)
    want = p.reference(*operands)
    assert torch.equal(y.double(), want[0])
    assert torch.equal(hn.double(), want[1])


@settings(max_examples=60)
@given(data=st.data(), p=layers(dtype="fp32"))
def test_the_check_finds_what_is_wrong_in_any_result(data: st.DataObject, p: RecurrentProblem) -> None:
    def computed(*tensors: torch.Tensor) -> Tensors:
        return tuple(t.float() for t in p.reference(*tensors[: len(p.operands)]))

    right = errors_of(p, computed)
    assert right.l2 < 1e-6
    assert right.spread < 1e-6
    place = data.draw(st.integers(0, len(p.results) - 1), "result")

    def wrong(*tensors: torch.Tensor) -> Tensors:
        results = computed(*tensors)
        if results[place].any():
            results[place].mul_(1.001)
        else:  # all arguments of a ReLU were negative
            results[place].fill_(1e-3)
        return results

    assert errors_of(p, wrong).l2 > 5e-4

    def left_out(*tensors: torch.Tensor) -> Tensors:
        results = computed(*tensors)
        results[place].view(-1)[-1] = math.nan
        return results

    assert errors_of(p, left_out).l2 == math.inf


def lengths_of(sizes: list[int]) -> list[int]:
    return [sum(size > sequence for size in sizes) for sequence in range(sizes[0])]


@given(time=st.integers(1, 60), batch=st.integers(1, 20), share=st.floats(0, 1))
def test_typical_lengths_have_the_sum_that_is_asked_for(time: int, batch: int, share: float) -> None:
    least = time + batch - 1
    packing = typical_packing(time, batch, least + round(share * (time * batch - least)))
    lengths = packing.lengths.tolist()
    assert lengths == lengths_of(packing.sizes.tolist())
    assert lengths == sorted(lengths, reverse=True)
    assert (len(lengths), lengths[0], min(lengths) >= 1) == (batch, time, True)
    assert Packing.of(packing.sizes, sum(lengths)).rows == least + round(share * (time * batch - least))


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7), data=st.data())
def test_a_packing_says_where_rows_lie(lengths: list[int], data: st.DataObject) -> None:
    """Against torch's own packing of the number of each sequence and step."""
    lengths.sort(reverse=True)
    numbers = torch.arange(lengths[0] * len(lengths), dtype=torch.int64, device="cpu").view(lengths[0], -1)
    packed = pack_padded_sequence(numbers, lengths)
    packing = Packing.of(packed.batch_sizes, len(packed.data))
    row_of = {int(number): row for row, number in enumerate(packed.data)}
    batch = len(lengths)
    for reverse in (False, True):
        before = []
        for number in packed.data.tolist():
            t, sequence = divmod(number, batch)
            first, step = (lengths[sequence] - 1, 1) if reverse else (0, -1)
            before.append(sequence if t == first else batch + row_of[int(numbers[t + step, sequence])])
        assert packing.rows_before(reverse=reverse).tolist() == before
        last = [row_of[int(numbers[0 if reverse else length - 1, i])] for i, length in enumerate(lengths)]
        assert packing.last_rows(reverse=reverse).tolist() == last
    start = data.draw(st.integers(0, batch - 1), "start")
    length = data.draw(st.integers(1, batch - start), "length")
    part, rows = packing.part(start, length)
    own = pack_padded_sequence(numbers[: lengths[start], start : start + length], lengths[start : start + length])
    assert torch.equal(part.sizes, own.batch_sizes)
    assert torch.equal(packed.data[rows], own.data)


@pytest.mark.parametrize(
    ("sizes", "rows", "says"),
    [
        (torch.tensor([2, 3]), 5, "larger than of the step before"),
        (torch.tensor([2, 0]), 2, "below 1"),
        (torch.tensor([2, 1]), 4, "their sum is 3, but there are 4 rows"),
        (torch.tensor([2.0]), 2, "int64 on the CPU"),
        (torch.tensor([], dtype=torch.int64), 0, "at least one step"),
    ],
)
def test_sizes_that_are_no_packing_are_refused(sizes: torch.Tensor, rows: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Packing.of(sizes, rows)
