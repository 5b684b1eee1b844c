"""Programs as native code runs them: each plan becomes the launches and operators that it consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewise.execute.recorded import Called, Launch, NotRecorded, Recorded, Shown, TwoPlaces, recorded
from tilewise.kernels.cpu.threads import openmp_addresses
from tilewise.kernels.native.programs import loading
from tilewise.nn.programs.arena import Use, lives_of, packed
from tilewise.nn.programs.pixels import KernelCall
from tilewise.nn.programs.slots import Place, Slot, Step, planned

__all__ = ["Native", "native_program"]

INPUT, CONSTANT, ARENA, FRESH, RETURNED, VIEW = range(6)
CPU = torch.device("cpu")
SEED = 8
"""Of the random numbers on which plans are compared."""


@dataclass(slots=True)
class _Value:
    """A tensor as native code is told of it; ``offset`` is in bytes."""

    kind: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    root: int
    offset: int = 0
    tensor: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last element in memory."""
        return Slot(self.shape, self.strides, self.dtype).nbytes

    def told(self) -> tuple[Any, ...]:
        """What native code takes."""
        return self.kind, self.dtype, self.shape, self.strides, self.root, self.offset, self.tensor


@dataclass(slots=True)
class Native:
    """A program in native code: ``call(*inputs)`` gives the outputs, or ``NotImplemented`` where Python must look.

    ``arena_bytes`` counts the plans' workspaces too. ``in_python`` says of steps that Python runs why it does.
    ``held`` is what native code refers to by address. ``constants`` are tensors with their versions and addresses.
    """

    call: Any
    arena_bytes: int
    in_python: dict[int, str]
    held: list[Any]
    constants: list[tuple[Tensor, tuple[int, int]]]
    of_step: list[int]
    """The step that each piece of code belongs to."""

    def step_ms(self, code_ns: Sequence[float]) -> list[float]:
        """Milliseconds of each step, from nanoseconds of each piece of code."""
        taken = [0.0] * (max(self.of_step, default=-1) + 1)
        for step, ns in zip(self.of_step, code_ns, strict=True):
            taken[step] += ns / 1e6
        return taken

    def has_stale_constants(self) -> bool:
        """Whether a constant has changed since, as far as torch counts it."""
        return any(_seen(tensor) != seen for tensor, seen in self.constants)


def _seen(tensor: Tensor) -> tuple[int, int]:
    """What tells a change of ``tensor``: its version, -1 where torch counts none, and its address."""
    return -1 if tensor.is_inference() else tensor._version, tensor.data_ptr()


@dataclass(slots=True)
class _List:
    """Values and code of a program while it is made."""

    values: list[_Value]
    code: list[tuple[Any, ...]] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    of_step: list[int] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)

    def value(self, kind: int, like: Shown, root: int | None = None) -> int:
        """The number of a new value."""
        index = len(self.values)
        offset = 0 if root is None else like.offset
        self.values.append(_Value(kind, like.shape, like.strides, like.dtype, index if root is None else root, offset))
        return index

    def shown(self, like: Shown) -> int:
        """The number of the value that shows ``like``, whose offset is counted from the value ``like.value`` on."""
        base = self.values[like.value]
        offset = like.offset + (base.offset if base.kind == VIEW else 0)
        for index in {base.root, like.value}:
            value = self.values[index]
            at = value.offset if value.kind == VIEW else 0
            if (at, value.shape, value.strides, value.dtype) == (offset, like.shape, like.strides, like.dtype):
                return index
        return self.value(VIEW, like._replace(offset=offset), base.root)

    def add(self, step: int, told: tuple[Any, ...], use: Use) -> None:
        """Append code of a step."""
        self.code.append(told)
        self.uses.append(use)
        self.of_step.append(step)


def native_program(program: Any, *, checked: bool = True) -> Native:
    """``program`` in native code. Raises ``ValueError`` for what native code refuses.

    With ``checked`` each plan is compared with its run in Python, on random tensors and bit by bit; one that gives
    other bits is left to Python. The module must have been loaded.
    """
    made = _List(_values(program))
    in_python: dict[int, str] = {}
    memory = TwoPlaces()
    for number, step in enumerate(program.steps):
        if step.plan is not None:
            try:
                _add_plan(made, program, number, memory, check=checked)
                continue
            except NotRecorded as error:
                in_python[number] = str(error)
        if step.operator is not None:
            _add_operator(made, number, step)
            continue
        if isinstance(step.run, KernelCall):
            _add_kernel(made, number, step, step.run)
            continue
        in_python.setdefault(number, "it is a function in Python")
        told = ("python", (step.call(), tuple(step.inputs)), step.output, step.gives_new)
        made.add(number, told, Use(step.inputs, step.output, step.may_alias))
    return _made(program, made, in_python)


def _made(program: Any, made: _List, in_python: dict[int, str] | None = None) -> Native:
    """The list in native code, with places for its values."""
    sizes = [value.nbytes for value in made.values]
    lives = lives_of(sizes, [value.root for value in made.values], made.uses, program.outputs)
    for index, value in enumerate(made.values):
        if value.kind == ARENA and not (sizes[index] and index in lives):
            value.kind = FRESH  # without elements, or not in use
    kept = {i: life for i, life in lives.items() if made.values[i].kind == ARENA}
    offsets, total = packed(kept, over=program.over)
    for index, offset in offsets.items():
        made.values[index].offset = offset
    constants = [(value.tensor, _seen(value.tensor)) for value in made.values if value.tensor is not None]
    module = loading().module
    assert module is not None
    call = module.NativeProgram(
        tuple(value.told() for value in made.values), tuple(made.code), program.inputs, program.outputs,
        tuple(program.note(number) for number in made.of_step), total, program.kept_arenas,
        *openmp_addresses(),
    )  # fmt: skip
    return Native(call, total, in_python or {}, made.held, constants, made.of_step)


def _values(program: Any) -> list[_Value]:
    """The values of the program's slots, with the same numbers."""
    values: list[_Value] = []
    for index, slot in enumerate(program.slots):
        value = _Value(ARENA, slot.shape, slot.strides, slot.dtype, index, tensor=slot.tensor)
        if slot.view_of is not None:
            base = values[slot.view_of]
            before = base.offset if base.kind == VIEW else 0
            value.kind, value.root, value.offset = VIEW, base.root, before + slot.offset * slot.dtype.itemsize
        elif slot.kind in ("input", "constant"):
            value.kind = INPUT if slot.kind == "input" else CONSTANT
        elif index in program.new:
            value.kind = RETURNED
        elif index in program.fresh or index not in program.offsets:
            value.kind = FRESH
        values.append(value)
    return values


def _add_operator(made: _List, number: int, step: Step) -> None:
    """Append an operator's call."""
    operator = step.operator
    assert operator is not None
    names = [argument.name for argument in operator.overload._schema.arguments]
    given = {**dict(zip(names, operator.arguments, strict=False)), **operator.keywords}
    told = {name: _told(value, step.inputs) for name, value in given.items()}
    if operator.out:
        told[operator.out] = ("value", step.output)
    made.add(
        number, _operator_code(operator.overload, told, operator.result, step.output, step.gives_new),
        Use(step.inputs, step.output, step.may_alias),
    )  # fmt: skip


def _add_kernel(made: _List, number: int, step: Step, call: KernelCall) -> None:
    """Append a launch of a kernel."""
    worker, words, places = call.words()
    values = (*step.inputs, step.output)
    addresses = tuple((word, value, 0) for word, value in zip(places, values, strict=True))
    made.add(number, ("launch", (worker, words.tobytes(), addresses, call.threads), -1, False), Use(values, -1))


def _operator_code(
    overload: torch._ops.OpOverload, told: Mapping[str, Any], result: int, output: int, is_new: bool
) -> tuple[Any, ...]:
    """An operator's call as native code takes it."""
    schema = overload._schema
    return "operator", (schema.name, schema.overload_name, dict(told), result), output if is_new else -1, is_new


def _told(value: Any, inputs: Sequence[int]) -> Any:
    """An argument with ("value", number) in place of places of tensors; lists of them are lists, others tuples."""
    if isinstance(value, Place):
        return "value", inputs[value.index]
    if isinstance(value, tuple | list):
        told = [_told(v, inputs) for v in value]
        return told if any(isinstance(v, Place | Tensor) for v in value) else tuple(told)
    return value


def _add_plan(made: _List, program: Any, number: int, memory: TwoPlaces, *, check: bool) -> None:
    """Append what a plan does. Raises :class:`NotRecorded`."""
    step: Step = program.steps[number]
    slots = [program.slots[index] for index in (*step.inputs, step.output)]
    constants = {i: slot.tensor.detach() for i, slot in enumerate(slots) if slot.tensor is not None}
    done = recorded(step.plan, [_empty(slot) for slot in slots], constants, memory)
    if check and (reason := _difference(program, number, done)):
        raise NotRecorded(reason)
    _add_recorded(made, program, number, done)


def _add_recorded(made: _List, program: Any, number: int, done: Recorded) -> None:
    """Append what was recorded of a step's plan."""
    step: Step = program.steps[number]
    places = [*step.inputs, step.output]
    if done.workspace:
        places.append(made.value(ARENA, Shown(-1, 0, (done.workspace,), (1,), torch.uint8)))
    places += [made.value(RETURNED if returned else ARENA, shown) for shown, returned in done.made]
    made.held.append(done.held)
    for one in _without_last_copy(made, done, places, step.output):
        if isinstance(one, Launch):
            addresses = tuple(
                (word, -1 if value < 0 else places[value], offset) for word, value, offset in one.addresses
            )
            words = torch.tensor(one.words, dtype=torch.int64, device="cpu").numpy().tobytes()
            touched = tuple(value for _, value, _ in addresses if value >= 0)
            made.add(number, ("launch", (one.worker, words, addresses, one.threads), -1, False), Use(touched, -1))
        else:
            _add_called(made, number, one, places)


def _without_last_copy(made: _List, done: Recorded, places: list[int], output: int) -> Sequence[Launch | Called]:
    """What was recorded, without a last copy of a returned tensor into the output, which then is that tensor."""
    does = done.does
    last = does[-1] if does else None
    if not isinstance(last, Called) or last.overload is not torch.ops.aten.copy_.default or len(last.arguments) != 2:
        return does
    into, source = last.arguments
    made_from = len(places) - len(done.made)
    whole = made.values[output]
    if (
        isinstance(into, Shown) and isinstance(source, Shown)
        and source.value >= made_from and done.made[source.value - made_from] == (source, True)
        and places[into.value] == output and whole.kind in (ARENA, FRESH)
        and all(place != output for place in places[: made_from - 1 - bool(done.workspace)])
        and not any(_mentions(one, into.value) for one in does[:-1])
        and not any(output == made.values[i].root for use in made.uses for i in use.touches)
        and (source.shape, source.dtype) == (whole.shape, whole.dtype)
        and all(n == 1 or a == b for n, a, b in zip(whole.shape, source.strides, whole.strides, strict=True))
    ):  # fmt: skip
        whole.kind = RETURNED
        places[source.value] = output
        return does[:-1]
    return does


def _mentions(one: Launch | Called, value: int) -> bool:
    """Whether ``value`` is used."""
    if isinstance(one, Launch):
        return any(v == value for _, v, _ in one.addresses)
    return any(shown.value == value for shown in _shown((*one.arguments, *one.keywords.values())))


def _shown(values: Sequence[Any]) -> list[Shown]:
    """All tensors among arguments."""
    found: list[Shown] = []
    for value in values:
        if isinstance(value, Shown):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _shown(value)
    return found


def _add_called(made: _List, number: int, called: Called, places: Sequence[int]) -> None:
    """Append an operator's call that was recorded."""
    touched: list[int] = []

    def told(value: Any) -> Any:
        if isinstance(value, Shown):
            index = made.shown(value._replace(value=places[value.value]))
            touched.append(index)
            return "value", index
        if isinstance(value, tuple | list):
            found = [told(v) for v in value]
            return found if any(isinstance(v, Shown | Tensor) for v in value) else tuple(found)
        return value

    names = [argument.name for argument in called.overload._schema.arguments]
    given = {**dict(zip(names, called.arguments, strict=False)), **called.keywords}
    arguments = {name: told(value) for name, value in given.items()}
    output = places[called.gives] if called.gives >= 0 else -1
    code = _operator_code(called.overload, arguments, 0, output, called.gives >= 0)
    made.add(number, code, Use(tuple(touched), output))


def _empty(slot: Slot) -> Tensor:
    """A tensor that lies as ``slot`` says."""
    return torch.empty_strided(slot.shape, slot.strides, dtype=slot.dtype, device=CPU)


def _difference(program: Any, number: int, done: Recorded) -> str:
    """Why native code does not give the bits that the plan gives in Python; empty where it does."""
    step: Step = program.steps[number]
    slots = [program.slots[index] for index in step.inputs]
    slots = [slot if slot.tensor is not None else Slot(slot.shape, slot.strides, slot.dtype, "input") for slot in slots]
    out = program.slots[step.output]
    last = len(slots)
    alone = Step(step.name, tuple(range(last)), last, run=planned(step.plan))
    inputs = [i for i, slot in enumerate(slots) if slot.tensor is None]
    single = type(program)([*slots, Slot(out.shape, out.strides, out.dtype, "output")], [alone], inputs, [last])
    made = _List(_values(single))
    _add_recorded(made, single, 0, done)
    native = _made(single, made)
    generator = torch.Generator(CPU).manual_seed(SEED)
    with torch.inference_mode(False), torch.no_grad():
        for _ in range(2):
            given = [_empty(slots[i]).normal_(generator=generator) for i in inputs]
            found = native.call(*given)
            if found is NotImplemented or not _same_bits(found, single.in_python(*given)):
                return "native code gives other bits than the plan does in Python"
    return ""


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.view(kind), other.view(kind))
