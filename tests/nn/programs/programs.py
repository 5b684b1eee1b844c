"""Programs for tests: generated ones, and what they give when every tensor has its own memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tilewise.nn.programs.program import Program
from tilewise.nn.programs.slots import Operator, Place, Slot, Step

aten = torch.ops.aten
LAYOUTS = (torch.contiguous_format, torch.channels_last)


def doubled(x: Tensor, out: Tensor) -> None:
    """A step in Python that writes into its output."""
    torch.add(x, x, out=out)


def same(x: Tensor) -> Tensor:
    """A step in Python that returns its input."""
    return x


class Drawn:
    """A program that grows step by step. All tensors of four dimensions have ``shape``."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.slots: list[Slot] = []
        self.steps: list[Step] = []

    def slot(self, kind: str, layout: torch.memory_format, tensor: Tensor | None = None) -> int:
        like = torch.empty(self.shape, dtype=torch.float32, device="meta").to(memory_format=layout)
        self.slots.append(Slot(self.shape, tuple(like.stride()), torch.float32, kind, tensor))
        return len(self.slots) - 1

    def step(self, output: int, *inputs: int, **how: Any) -> int:
        self.steps.append(Step(f"layer{len(self.steps)}", inputs, output, **how))
        return output


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Slot], list[Step], list[int], list[int]]:
    """Slots, steps, inputs and outputs of a program with every kind of step, in contiguous and channels_last memory."""
    drawn = Drawn(draw(st.tuples(*[st.integers(1, 4)] * 4)))
    layouts = st.sampled_from(LAYOUTS)
    inputs = [drawn.slot("input", draw(layouts)) for _ in range(draw(st.integers(1, 2)))]
    generator = torch.Generator("cpu").manual_seed(draw(st.integers(0, 99)))
    constant = torch.randn(drawn.shape, generator=generator, dtype=torch.float32, device="cpu")
    known = [*inputs, drawn.slot("constant", torch.contiguous_format, constant)]
    frozen = set(known)
    for _ in range(draw(st.integers(1, 10))):
        x, y = draw(st.sampled_from(known)), draw(st.sampled_from(known))
        kind = draw(st.sampled_from(["add", "tanh", "relu", "python", "new", "same", "view", "relu_", "pool"]))
        like = LAYOUTS[drawn.slots[x].strides != contiguous(drawn.shape)]
        if kind == "relu_":
            target = next((i for i in reversed(known) if i not in frozen), None)
            if target is None:
                continue
            slot = drawn.slots[target]
            drawn.slots.append(Slot(slot.shape, slot.strides, slot.dtype, view_of=target))
            out = drawn.step(len(drawn.slots) - 1, target, operator=Operator(aten.relu_.default, (Place(0),)))
            frozen.add(out)  # a view of a tensor that is in known already
        elif kind == "view":
            slot = drawn.slots[x]
            drawn.slots.append(Slot(slot.shape, slot.strides, slot.dtype, view_of=x))
            out = len(drawn.slots) - 1
            frozen.add(out)
        elif kind == "same":
            out = drawn.step(drawn.slot("intermediate", like), x, run=same, returns_new=True)
            frozen.add(out)  # it may be an input
        elif kind == "new":
            out = drawn.step(drawn.slot("intermediate", torch.contiguous_format), x, run=flipped, returns_new=True)
        elif kind == "pool":
            operator = Operator(aten.max_pool2d_with_indices.default, (Place(0), [3, 3], [1, 1], [1, 1]))
            out = drawn.step(drawn.slot("intermediate", like), x, operator=operator)
        else:
            out = drawn.slot("intermediate", draw(layouts))
            if kind == "python":
                drawn.step(out, x, run=doubled)
            else:
                operator = {
                    "add": Operator(aten.add.out, (Place(0), Place(1)), {"alpha": 2}, out="out"),
                    "tanh": Operator(aten.tanh.out, (Place(0),), out="out"),
                    "relu": Operator(aten.clamp_min.out, (Place(0), 0.0), out="out"),
                }[kind]
                drawn.step(out, *((x, y) if kind == "add" else (x,)), operator=operator)
        known.append(out)
    outputs = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3))
    return drawn.slots, drawn.steps, inputs, outputs


def flipped(x: Tensor) -> Tensor:
    """A step in Python that returns a new contiguous tensor."""
    return x.flip(2).contiguous()


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(torch.empty(shape, dtype=torch.float32, device="meta").stride())


def inputs_of(slots: list[Slot], inputs: list[int], seed: int) -> list[Tensor]:
    """Random inputs as the slots say."""
    generator = torch.Generator("cpu").manual_seed(seed)
    given = []
    for index in inputs:
        slot = slots[index]
        tensor = torch.empty_strided(slot.shape, slot.strides, dtype=slot.dtype, device="cpu")
        given.append(tensor.copy_(torch.randn(slot.shape, generator=generator, dtype=slot.dtype, device="cpu")))
    return given


def separately(slots: list[Slot], steps: list[Step], inputs: list[int], outputs: list[int], *given: Tensor) -> Any:
    """The outputs as copies, computed with memory of its own for every slot."""
    values: dict[int, Tensor] = dict(zip(inputs, given, strict=True))

    def value(index: int) -> Tensor:
        slot = slots[index]
        if slot.view_of is not None:
            base = value(slot.view_of)
            return base.as_strided(slot.shape, slot.strides, base.storage_offset() + slot.offset)
        if index not in values:
            empty = torch.empty_strided(slot.shape, slot.strides, dtype=slot.dtype, device="cpu")
            values[index] = empty if slot.tensor is None else slot.tensor
        return values[index]

    for step in steps:
        read = [value(index) for index in step.inputs]
        if step.gives_new:
            values[step.output] = step.call()(*read)
        else:
            step.call()(*read, value(step.output))
    return tuple(value(index).clone() for index in outputs)


def assert_native(program: Program, given: Sequence[Tensor], wanted: Tensor) -> None:
    """All steps run in native code, with the same bits, and are timed there; skipped where it cannot be had."""
    if program.use_native():
        pytest.skip(program.why_not_native)
    assert program.native is not None
    assert not program.native.in_python
    for _ in range(3):
        assert torch.equal(program(*given), wanted)
    assert all(ms > 0 for ms in program.step_ms(given, 3))
