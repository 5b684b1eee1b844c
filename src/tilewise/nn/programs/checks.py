"""Whether slots and steps fit together, asked once when a program is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.nn.programs.slots import KINDS, Slot, Step, root

__all__ = ["check_program"]


def check_program(
    slots: Sequence[Slot],
    steps: Sequence[Step],
    inputs: Sequence[int],
    outputs: Sequence[int],
    device: torch.device,
) -> None:
    """Raise ``ValueError`` where the slots and steps do not make a program of ``device``.

    The message names the slot or step.
    """
    for index, slot in enumerate(slots):
        if reason := _slot_fault(slots, index, device):
            raise ValueError(f"slot {index} ({slot.kind!r}, {slot}): {reason}")
    for what, places in (("inputs", inputs), ("outputs", outputs)):
        for place in places:
            if not 0 <= place < len(slots):
                raise ValueError(f"{what} has slot {place}: 0 to {len(slots) - 1} would do")
    if len(set(inputs)) < len(inputs) or {i for i, s in enumerate(slots) if s.kind == "input"} != set(inputs):
        raise ValueError(f"inputs={tuple(inputs)}: each slot of the kind 'input' once would do")
    if not outputs:
        raise ValueError("outputs is empty: at least one slot would do")
    known = {index for index, slot in enumerate(slots) if slot.kind in ("input", "constant") and slot.view_of is None}
    for number, step in enumerate(steps):
        if reason := _step_fault(slots, step, known):
            raise ValueError(f"step {number} ({step.name!r}): {reason}")
        known.add(root(slots, step.output))
    for index in outputs:
        if root(slots, index) not in known:
            raise ValueError(f"output slot {index} is written by no step")
    results = {root(slots, index) for index in outputs}
    for index, slot in enumerate(slots):
        if slot.kind == "output" and root(slots, index) not in results:
            raise ValueError(f"slot {index} is of the kind 'output', and outputs={tuple(outputs)} have it not")


def _slot_fault(slots: Sequence[Slot], index: int, device: torch.device) -> str:
    """What is wrong with one slot; empty where nothing is."""
    slot = slots[index]
    if slot.kind not in KINDS:
        return f"kind={slot.kind!r}: one of {', '.join(KINDS)} would do"
    if len(slot.shape) != len(slot.strides) or any(n < 0 for n in (*slot.shape, *slot.strides)):
        return "a stride for each size, none negative, would do"
    if slot.offset < 0 or (slot.offset and slot.view_of is None):
        return f"offset={slot.offset}: 0 would do, or in a view a number from 0 on"
    if (slot.kind == "constant") != (slot.tensor is not None):
        return "a tensor for a constant, and for a constant alone, would do"
    if slot.tensor is not None and slot.tensor.layout is not torch.strided:
        return f"its tensor has the layout {slot.tensor.layout}: strided would do; operators hold others as arguments"
    if slot.tensor is not None and not (slot.has(slot.tensor) and slot.tensor.device == device):
        where = "the CPU" if device.type == "cpu" else str(device)
        return f"its tensor is another one: one on {where} that lies as the slot says would do"
    if slot.view_of is None:
        return ""
    if slot.kind in ("input", "constant"):
        return "an input or a constant is no view of another slot"
    if not 0 <= slot.view_of < index:
        return f"view_of={slot.view_of}: a slot before it would do"
    base = slots[slot.view_of]
    if base.dtype is not slot.dtype or slot.offset + slot.extent > base.extent:
        return f"it does not lie within slot {slot.view_of}, {base}"
    return ""


def _step_fault(slots: Sequence[Slot], step: Step, known: set[int]) -> str:
    """What is wrong with one step, where the slots ``known`` have been given or written; empty where nothing is."""
    for index in (*step.inputs, step.output):
        if not 0 <= index < len(slots):
            return f"slot {index}: 0 to {len(slots) - 1} would do"
    for index in step.inputs:
        if root(slots, index) not in known:
            return f"it reads slot {index}, which nothing has written yet"
    kinds = (step.plan is not None) + (step.operator is not None)
    if kinds > 1 or (not kinds and step.run is None):
        return "a plan, an operator or a callable, one of them, would do"
    output = root(slots, step.output)
    if slots[output].kind in ("input", "constant"):
        return f"it writes slot {output}, which is {slots[output].kind}: another slot would do"
    if step.gives_new and (step.output != output or output in known):
        return f"slot {step.output} is a view or already written: one of its own would do for a step that returns it"
    if step.plan is not None:
        problem = step.plan.problem
        count = len(problem.operands) + problem.bias + bool(getattr(problem, "residual", False))
        if len(step.inputs) != count:
            return f"{len(step.inputs)} inputs: {count} would do for {problem.key}"
    if step.operator is not None:
        return _operator_fault(slots, step)
    return ""


def _operator_fault(slots: Sequence[Slot], step: Step) -> str:
    """What is wrong with a step's operator; empty where nothing is."""
    operator = step.operator
    assert operator is not None
    if missing := {place for place in operator.places() if not 0 <= place < len(step.inputs)}:
        return f"{operator.overload} has Place({min(missing)}): 0 to {len(step.inputs) - 1} would do"
    if operator.out and operator.out not in {argument.name for argument in operator.overload._schema.arguments}:
        return f"out={operator.out!r} is no argument of {operator.overload._schema}"
    if operator.mutates and root(slots, step.output) not in {root(slots, index) for index in step.inputs}:
        return f"{operator.overload} writes into an argument: an output that is a view of an input would do"
    return ""
