"""Programs of steps: what they compute, where tensors lie, several threads, errors, and slots that do not fit."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.nn.programs.programs import aten, doubled, inputs_of, programs, same, separately
from torch import Tensor

from tilewise.nn.programs.arena import ALIGNMENT, Life, most_at_once, packed
from tilewise.nn.programs.program import KEPT_ARENAS, Program
from tilewise.nn.programs.slots import Operator, Place, Slot, Step

FOUR = ((4,), (1,), torch.float32)


def as_tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def chain(*runs: Any) -> Program:
    """Steps one after the other over vectors of 4 numbers."""
    kinds = ["input", *["intermediate"] * (len(runs) - 1), "output"]
    slots = [Slot(*FOUR, kind) for kind in kinds]
    steps = [Step(f"layer{i}", (i,), i + 1, run) for i, run in enumerate(runs)]
    return Program(slots, steps, [0], [len(runs)])


@given(programs(), st.integers(0, 99))
def test_a_program_computes_what_its_steps_do_with_memory_of_their_own(made: Any, seed: int) -> None:
    slots, steps, inputs, outputs = made
    program = Program(slots, steps, inputs, outputs)
    for again in range(2):
        tensors = inputs_of(slots, inputs, seed + again)
        before = [tensor.clone() for tensor in tensors]
        found = as_tuple(program(*tensors))
        for have, want in zip(found, separately(slots, steps, inputs, outputs, *before), strict=True):
            assert torch.equal(have, want)
        assert all(map(torch.equal, tensors, before))


@given(programs())
def test_outputs_stay_as_they_are_when_the_program_is_called_again(made: Any) -> None:
    slots, steps, inputs, outputs = made
    program = Program(slots, steps, inputs, outputs)
    found = as_tuple(program(*inputs_of(slots, inputs, 0)))
    copies = [tensor.clone() for tensor in found]
    program(*inputs_of(slots, inputs, 1))
    assert all(map(torch.equal, found, copies))


@given(st.lists(st.builds(lambda s, a, b: Life(s, min(a, b), max(a, b)), *[st.integers(0, 300)] * 3), max_size=30))
def test_tensors_in_use_at_the_same_time_lie_apart(lives: list[Life]) -> None:
    numbered = dict(enumerate(lives))
    offsets, total = packed(numbered)
    for i, life in numbered.items():
        assert offsets[i] % ALIGNMENT == 0
        assert offsets[i] + life.size <= total
        for j, other in numbered.items():
            if i < j and life.meets(other):
                assert offsets[i] + life.size <= offsets[j] or offsets[j] + other.size <= offsets[i]
    assert most_at_once(numbered) <= total <= sum(-(-life.size // ALIGNMENT) * ALIGNMENT for life in lives)


def test_a_chain_of_steps_needs_the_memory_of_two_tensors() -> None:
    program = chain(*[doubled] * 10)
    assert program.arena_bytes == program.least_bytes == 2 * ALIGNMENT
    assert program.separate_bytes == 9 * 16
    assert torch.equal(program(torch.ones(4, dtype=torch.float32, device="cpu")), torch.full((4,), 1024.0))


def test_a_returned_view_of_an_intermediate_keeps_its_memory_in_use() -> None:
    slots = [Slot(*FOUR, kind) for kind in ("input", "intermediate", "intermediate", "intermediate", "output")]
    steps = [
        Step("first", (0,), 1, doubled),
        Step("view", (1,), 2, same, returns_new=True),
        Step("other", (0,), 3, lambda x, out: out.fill_(9.0)),  # must not lie where the view's numbers are
        Step("sum", (2, 3), 4, lambda x, y, out: torch.add(x, y, out=out)),
    ]
    x = torch.arange(4, dtype=torch.float32, device="cpu")
    assert torch.equal(Program(slots, steps, [0], [4])(x), 2 * x + 9)


def test_threads_call_one_program_at_the_same_time() -> None:
    program = chain(*[doubled] * 20)
    wrong: list[int] = []

    def call(number: int) -> None:
        x = torch.full((4,), float(number), dtype=torch.float32, device="cpu")
        wrong.extend(number for _ in range(50) if not torch.equal(program(x), x * 2.0**20))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 1 <= len(program._frames[0]) <= KEPT_ARENAS
    program.release()
    assert not program._frames


def test_an_error_names_its_step_and_the_next_call_works() -> None:
    fails = [True]

    def may_fail(x: Tensor, out: Tensor) -> None:
        if fails:
            raise RuntimeError("no more")
        out.copy_(x)

    program = chain(doubled, may_fail)
    x = torch.ones(4, dtype=torch.float32, device="cpu")
    with pytest.raises(RuntimeError, match="no more") as caught:
        program(x)
    assert caught.value.__notes__ == ["in step 1 of 2, 'layer1'"]
    fails.clear()
    assert torch.equal(program(x), 2 * x)


def test_gradients_are_not_recorded() -> None:
    x = torch.ones(4, dtype=torch.float32, device="cpu", requires_grad=True)
    assert not chain(doubled)(x).requires_grad


def test_inference_mode_and_autocast_change_nothing() -> None:
    program = chain(doubled, doubled)
    x = torch.ones(4, dtype=torch.float32, device="cpu")
    with torch.inference_mode():
        assert torch.equal(program(x), 4 * x)
    assert torch.equal(program(x), 4 * x)
    matrix = Slot((2, 2), (2, 1), torch.float32, "input")
    product = Operator(aten.mm.default, (Place(0), Place(0)))
    squares = Program(
        [matrix, Slot.like(torch.empty(2, 2), "output")], [Step("mm", (0,), 1, operator=product)], [0], [1]
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert squares(torch.eye(2, dtype=torch.float32, device="cpu")).dtype is torch.float32


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([], "0 inputs given: 1 would do"),
        ([torch.ones(5)], r"input 0 is float32 \(5,\)"),
        ([torch.ones(4, dtype=torch.float64)], "input 0 is float64"),
        ([torch.ones(8)[::2]], r"strides \(2,\).*strides \(1,\) would do"),
        ([torch.ones(4, device="meta")], "input 0 is on meta"),
    ],
)
def test_inputs_that_lie_otherwise_are_refused(tensors: list[Tensor], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        chain(doubled)(*tensors)


def test_an_input_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="input 0 is a float: a tensor would do"):
        chain(doubled)(1.0)  # type: ignore[arg-type]


IN, MID, OUT = (Slot(*FOUR, kind) for kind in ("input", "intermediate", "output"))
RELU = Operator(aten.relu_.default, (Place(0),))
NO_OUT = Operator(aten.tanh.default, (Place(0),), out="out")
TANH = Operator(aten.tanh.out, (Place(0),), out="out")


@pytest.mark.parametrize(
    ("slots", "steps", "outputs", "reason"),
    [
        ([IN, Slot(*FOUR, "temporary")], [Step("a", (0,), 1, doubled)], [1], "kind='temporary'"),
        ([IN, Slot((4,), (1, 1), torch.float32)], [Step("a", (0,), 1, doubled)], [1], "a stride for each size"),
        ([IN, Slot((-1,), (1,), torch.float32)], [Step("a", (0,), 1, doubled)], [1], "none negative"),
        ([IN, Slot(*FOUR, "constant")], [], [0], "a tensor for a constant"),
        ([IN, Slot(*FOUR, "constant", torch.ones(5))], [], [0], "its tensor is another one"),
        ([IN, Slot((5,), (1,), torch.float32, view_of=0)], [], [1], "does not lie within slot 0"),
        ([IN, Slot((4,), (1,), torch.float32, view_of=0, offset=1)], [], [1], "does not lie within slot 0"),
        ([IN, Slot((4,), (1,), torch.int32, view_of=0)], [], [1], "does not lie within slot 0"),
        ([IN, Slot((4,), (1,), torch.float32, view_of=1)], [], [1], "a slot before it would do"),
        ([IN, OUT], [Step("a", (0,), 2, doubled)], [1], "slot 2: 0 to 1 would do"),
        ([IN, OUT], [Step("a", (1,), 1, doubled)], [1], "reads slot 1, which nothing has written"),
        ([IN, OUT], [Step("a", (0,), 0, doubled)], [0], "writes slot 0, which is input"),
        ([IN, OUT], [Step("a", (0,), 1)], [1], "a plan, an operator or a callable"),
        ([IN, OUT], [Step("a", (), 1, operator=TANH)], [1], r"Place\(0\)"),
        ([IN, OUT], [Step("a", (0,), 1, operator=NO_OUT)], [1], "out='out'"),
        ([IN, OUT], [Step("a", (0,), 1, operator=RELU)], [1], "writes into an argument"),
        ([IN, OUT, MID], [Step("a", (0,), 1, doubled)], [2], "output slot 2 is written by no step"),
        ([IN, OUT, MID], [Step("a", (0,), 2, doubled)], [2], "slot 1 is of the kind 'output'"),
        ([IN, OUT], [Step("a", (0,), 1, doubled)], [], "outputs is empty"),
        ([IN, OUT], [Step("a", (0,), 1, doubled)], [-1], "outputs has slot -1"),
        ([IN, OUT], [*[Step("a", (0,), 1, same, returns_new=True)] * 2], [1], "already written"),
    ],
)  # fmt: skip
def test_slots_and_steps_that_do_not_fit_are_refused(
    slots: list[Slot], steps: list[Step], outputs: list[int], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Program(slots, steps, [0], outputs)


def test_every_input_slot_is_given_once() -> None:
    with pytest.raises(ValueError, match="each slot of the kind 'input' once"):
        Program([IN, IN], [], [0], [0])
