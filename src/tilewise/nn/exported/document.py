"""Programs as plain JSON values and tensors, and back. What is read is checked before anything is run.

A program's document has its slots, its steps, and what arguments and results look like. Constants are named tensors
beside it; equal ones of several programs are one tensor. A step is a plan, one of torch's operators, a fused layer by
torch's operators, or a copy into another layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewise import execute
from tilewise.nn.exported.values import ExportError, decoded, encoded, torch_dtype
from tilewise.nn.programs.joined import Joined
from tilewise.nn.programs.pixels import KERNELS, KernelCall, Pixels
from tilewise.nn.programs.program import Program
from tilewise.nn.programs.slots import KINDS, Operator, Slot, Step, copied, offset_in_root, places_in
from tilewise.nn.regions.fused import LAYERS, Call
from tilewise.plan import Plan, PlanFormatError
from tilewise.problems.activations import require_activation
from tilewise.problems.base import Problem, dense_strides
from tilewise.problems.kinds import from_key
from tilewise.solvers.base import SolverUnavailable

__all__ = ["Reading", "Writing"]

MOST_SLOTS = 100_000
MOST_DIMS = 16
LONGEST = 4096
"""Most characters of a name."""


class Writing:
    """Documents of programs, and the tensors that they share, by name: each as its memory lies, in one dimension."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[bytes, str] = {}

    def program(self, program: Program) -> dict[str, Any]:
        """The document of a program. Raises :class:`ExportError` for a step that cannot be written."""
        return {
            "slots": [self._slot(slot) for slot in program.slots],
            "steps": [self._step(step) for step in program.steps],
            "inputs": list(program.inputs),
            "outputs": list(program.outputs),
        }

    def _slot(self, slot: Slot) -> dict[str, Any]:
        """A slot; a constant's names its tensor."""
        told: dict[str, Any] = {
            "shape": list(slot.shape),
            "strides": list(slot.strides),
            "dtype": str(slot.dtype).removeprefix("torch."),
            "kind": slot.kind,
        }
        if slot.view_of is not None:
            told |= {"view_of": slot.view_of, "offset": slot.offset}
        if slot.tensor is not None:
            told["tensor"] = self._kept(slot, slot.tensor)
        return told

    def _kept(self, slot: Slot, tensor: Tensor) -> str:
        """The name of a constant's memory."""
        memory = tensor.detach().as_strided((slot.extent,), (1,)).clone()
        digest = hashlib.sha256(str(memory.dtype).encode())
        digest.update(memory.view(torch.uint8).numpy().data)
        name = self._names.setdefault(digest.digest(), f"constant.{len(self._names)}")
        self.tensors.setdefault(name, memory)
        return name

    def _step(self, step: Step) -> dict[str, Any]:
        """A step."""
        told: dict[str, Any] = {"name": step.name, "inputs": list(step.inputs), "output": step.output}
        where = f"step {step.name!r}"
        if step.plan is not None:
            told["plan"] = {"problem": step.plan.problem.key, "plan": step.plan.plan.to_json()}
        elif step.operator is not None:
            operator = step.operator
            told["operator"] = {
                "name": operator.overload.name(),
                "arguments": encoded(list(operator.arguments), where),
                "keywords": encoded(dict(operator.keywords), where),
                "out": operator.out,
                "result": operator.result,
            }
        elif isinstance(step.run, Pixels):
            told["pixels"] = {"name": step.run.name, "shape": list(step.run.shape), "image": step.run.image}
        elif isinstance(step.run, Joined):
            told["joined"] = {**step.run.__dict__, "channels": list(step.run.channels)}
        elif isinstance(step.run, Call):
            told["layer"] = {"name": step.run.function, "arguments": encoded(list(step.run.arguments), where)}
        elif step.run is copied:
            told["copy"] = True
        else:
            raise ExportError(f"{where} is a function in Python, which a file cannot hold")
        return told


class Reading:
    """Programs from documents. ``tensors`` are those that :class:`Writing` had. Equal plans are bound once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._constants: dict[tuple[Any, ...], Tensor] = {}
        self._bound: dict[tuple[Any, ...], Any] = {}

    def program(self, data: Any, where: str) -> Program:
        """A program of a document.

        Raises :class:`ExportError` naming what is no program, and ``SolverUnavailable`` with the reason where a plan
        cannot run on this machine.
        """
        document = _object(data, where)
        slots = [self._slot(e, i, f"{where}.slots[{i}]") for i, e in enumerate(_list(document, "slots", where))]
        steps = [self._step(e, slots, f"{where}.steps[{i}]") for i, e in enumerate(_list(document, "steps", where))]
        inputs, outputs = (_numbers(document, name, where) for name in ("inputs", "outputs"))
        try:
            return Program(slots, steps, inputs, outputs)
        except ValueError as error:
            raise ExportError(f"{where}: {error}") from error

    def _slot(self, data: Any, index: int, where: str) -> Slot:
        """The slot number ``index``."""
        told = _object(data, where)
        shape, strides = _numbers(told, "shape", where), _numbers(told, "strides", where)
        if len(shape) > MOST_DIMS or len(strides) != len(shape):
            raise ExportError(
                f"{where} has {len(shape)} sizes and {len(strides)} strides: as many, {MOST_DIMS} at most"
            )
        dtype, kind = torch_dtype(told.get("dtype"), where), told.get("kind")
        if kind not in KINDS:
            raise ExportError(f"{where} has kind={kind!r:.80}: one of {', '.join(KINDS)} would do")
        view_of = _number(told, "view_of", where) if "view_of" in told else None
        if view_of is not None and view_of >= index:
            raise ExportError(f"{where} has view_of={view_of}: a slot before it would do")
        offset = _number(told, "offset", where) if "offset" in told else 0
        slot = Slot(shape, strides, dtype, kind, view_of=view_of, offset=offset)
        if kind != "constant":
            return slot
        return Slot(shape, strides, dtype, kind, self._constant(told.get("tensor"), slot, where))

    def _constant(self, name: Any, slot: Slot, where: str) -> Tensor:
        """The tensor of a constant."""
        memory = self._tensors.get(name) if isinstance(name, str) else None
        if memory is None:
            raise ExportError(f"{where} has tensor={name!r:.80}: the name of a tensor of the file would do")
        if memory.dtype is not slot.dtype or memory.dim() != 1 or memory.numel() != slot.extent:
            raise ExportError(f"{where}: tensor {name!r} has {memory.numel()} {memory.dtype}, not {slot.extent} {slot}")
        key = name, slot.shape, slot.strides
        return self._constants.setdefault(key, memory.as_strided(slot.shape, slot.strides))

    def _step(self, data: Any, slots: list[Slot], where: str) -> Step:
        """A step over ``slots``."""
        told = _object(data, where)
        name = _text(told, "name", where)
        inputs, output = _numbers(told, "inputs", where), _number(told, "output", where)
        if any(index >= len(slots) for index in (*inputs, output)):
            raise ExportError(f"{where} has slot {max(*inputs, output)}: 0 to {len(slots) - 1} would do")
        if "plan" in told:
            return Step(name, inputs, output, plan=self._plan(told["plan"], slots, (*inputs, output), where))
        if "operator" in told:
            return Step(name, inputs, output, operator=_operator(told["operator"], where))
        for kind, read in (("pixels", _pixels), ("joined", _joined)):
            if kind in told:
                run = read(told[kind], where)
                _check_slots(run, [slots[i] for i in (*inputs, output)], where)
                return Step(name, inputs, output, run=run)
        if "layer" in told:
            return Step(name, inputs, output, run=_layer(told["layer"], len(inputs), where), returns_new=True)
        if told.get("copy") is not True:
            raise ExportError(f"{where}: a plan, an operator, a layer or a copy would do")
        if len(inputs) != 1 or slots[inputs[0]].shape != slots[output].shape:
            raise ExportError(f"{where}: a copy of one tensor into one of its shape would do")
        return Step(name, inputs, output, run=copied)

    def _plan(self, data: Any, slots: list[Slot], places: tuple[int, ...], where: str) -> Any:
        """A plan bound to tensors that lie as the slots at ``places`` say: operands, what is added, and the result.

        The plan computes one tensor, of an image alone (a pooling) or of an image and a filter.
        """
        told = _object(data, where)
        key = _text(told, "problem", where)
        try:
            problem, plan = from_key(key), Plan.from_json(told.get("plan"))
        except (ValueError, PlanFormatError) as error:
            raise ExportError(f"{where}: {error}") from error
        if problem.device != "cpu" or len(problem.operands) > 2 or len(problem.results) != 1:
            raise ExportError(f"{where}: {key}: what computes one tensor on the CPU from one or two would do")
        _check_tensors(problem, slots, places, where)
        x, *filters = (slots[index] for index in places[: len(problem.operands)])
        bound = self._bound.get((problem, plan))
        if bound is None:
            first = torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="cpu")
            try:
                bound = execute.bind(plan, problem, first, *(w.tensor for w in filters))
            except execute.PlanMismatch as error:
                raise ExportError(f"{where}: {error}") from error
            except SolverUnavailable as error:
                raise SolverUnavailable(f"{where}: {plan.solver} cannot run here: {error}") from error
            self._bound[problem, plan] = bound
        return bound


def _check_tensors(problem: Problem, slots: list[Slot], places: tuple[int, ...], where: str) -> None:
    """Raise :class:`ExportError` where slots do not lie as a problem's tensors do: kernels ask nothing more."""
    (result,) = problem.results
    roles = [*problem.operands, *["bias"] * bool(problem.bias), *[result] * bool(getattr(problem, "residual", False))]
    roles.append(result)
    if len(places) != len(roles):
        raise ExportError(f"{where} has {len(places)} tensors: {len(roles)} would do for {problem.key}")
    for role, index in zip(roles, places, strict=True):
        slot = slots[index]
        if role == "bias":
            wanted, alignment = Slot((problem.shape(result)[problem.bias_dim],), (1,), problem.torch_dtype(result)), 1
        else:
            shape = problem.shape(role)
            wanted = Slot(shape, dense_strides(shape, problem.layout(role)), problem.torch_dtype(role))
            alignment = problem.alignment_of(role)
        if (slot.shape, slot.dtype) != (wanted.shape, wanted.dtype) or not _lies_as(slot, wanted):
            raise ExportError(f"{where}: {role} is {slot}: {wanted} would do")
        if offset_in_root(slots, index) * slot.dtype.itemsize % alignment:
            raise ExportError(f"{where}: {role} begins between two multiples of {alignment} bytes")
    if problem.constant_operand and slots[places[1]].tensor is None:
        raise ExportError(f"{where}: its second input is no constant: the filter would do")


def _lies_as(slot: Slot, wanted: Slot) -> bool:
    """Whether the elements of two slots of one shape lie alike."""
    return all(n == 1 or a == b for n, a, b in zip(slot.shape, slot.strides, wanted.strides, strict=True))


def _operator(data: Any, where: str) -> Operator:
    """A call of one of torch's operators that computes a new tensor from others, and does nothing else."""
    told = _object(data, where)
    name, out = _text(told, "name", where), told.get("out", "")
    overload = _overload(name, where)
    arguments, keywords = decoded(told.get("arguments"), where), decoded(told.get("keywords"), where)
    if not isinstance(arguments, list) or not isinstance(keywords, dict) or not isinstance(out, str):
        raise ExportError(f"{where}: a list of arguments, an object of keywords and the name of a result would do")
    operator = Operator(overload, tuple(arguments), keywords, out=out, result=_number(told, "result", where))
    if operator.mutates or not _reads_tensors(operator):
        raise ExportError(f"{where}: {name} writes into an argument or reads no tensor: another operator would do")
    return operator


def _reads_tensors(operator: Operator) -> bool:
    """Whether an operator's tensors stand where its schema has tensors, and there is one: none that reads a file."""
    schema = {argument.name: str(argument.type) for argument in operator.overload._schema.arguments}
    given = {**dict(zip(schema, operator.arguments, strict=False)), **operator.keywords}
    tensors = [name for name, value in given.items() if places_in([value])]
    return bool(tensors) and all("Tensor" in schema.get(name, "") for name in tensors)


def _overload(name: str, where: str) -> torch._ops.OpOverload:
    """The overload of an ATen operator called ``name``, such as ``aten::add.Tensor``."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found = None
    if namespace == "aten" and packet.isidentifier() and (overload or "default").isidentifier():
        found = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    if not isinstance(found, torch._ops.OpOverload) or found.name() != name:
        raise ExportError(f"{where} calls {name!r:.80}: an operator of torch's namespace aten would do")
    return found


def _layer(data: Any, count: int, where: str) -> Call:
    """A fused layer by torch's operators, with ``count`` inputs."""
    told = _object(data, where)
    name, arguments = told.get("name"), decoded(told.get("arguments"), where)
    if name not in LAYERS or not isinstance(arguments, list):
        raise ExportError(f"{where} calls the layer {name!r:.80}: one of {', '.join(LAYERS)} would do")
    call = Call(name, tuple(arguments))
    if not call.places() <= set(range(count)):
        raise ExportError(f"{where} has the tensors {sorted(call.places())}: 0 to {count - 1} would do")
    return call


def _pixels(data: Any, where: str) -> Pixels:
    """A call of a kernel over pixels."""
    told = _object(data, where)
    name, shape, image = told.get("name"), _numbers(told, "shape", where), _number(told, "image", where)
    if name not in KERNELS or len(shape) != 4 or not all(shape) or image > 1:
        raise ExportError(f"{where} has pixels={data!r:.80}: one of {', '.join(KERNELS)}, and the shape of images")
    return Pixels(name, shape, image)


def _joined(data: Any, where: str) -> Joined:
    """A call of the kernel that joins images."""
    told = _object(data, where)
    images, height, width = (_number(told, name, where) for name in ("images", "height", "width"))
    channels, activation = _numbers(told, "channels", where), _text(told, "activation", where)
    if not (images and height and width and channels and all(channels)):
        raise ExportError(f"{where} has joined={data!r:.80}: sizes of 1 and more would do")
    try:
        require_activation(activation)
    except ValueError as error:
        raise ExportError(f"{where}: {error}") from error
    return Joined(images, channels, height, width, activation)


def _check_slots(call: KernelCall, slots: list[Slot], where: str) -> None:
    """Raise :class:`ExportError` where slots are not as a call's tensors are."""
    layouts = ["channels_last" if len(shape) == 4 else "contiguous" for shape in call.shapes]
    wanted = [Slot(s, dense_strides(s, each), torch.float32) for s, each in zip(call.shapes, layouts, strict=True)]
    if len(slots) != len(wanted) or not all(
        (a.shape, a.dtype) == (b.shape, b.dtype) and _lies_as(a, b) for a, b in zip(slots, wanted, strict=True)
    ):
        raise ExportError(f"{where}: {', '.join(map(str, wanted))} would do")


def _object(value: Any, where: str) -> dict[str, Any]:
    """``value``, which must be an object."""
    if not isinstance(value, dict):
        raise ExportError(f"{where} is {value!r:.80}: an object would do")
    return value


def _list(told: Mapping[str, Any], name: str, where: str) -> list[Any]:
    """A list of a document."""
    value = told.get(name)
    if not isinstance(value, list) or len(value) > MOST_SLOTS:
        raise ExportError(f"{where}.{name} is {value!r:.80}: a list of {MOST_SLOTS} entries at most would do")
    return value


def _numbers(told: Mapping[str, Any], name: str, where: str) -> tuple[int, ...]:
    """A list of numbers that are not negative."""
    values = _list(told, name, where)
    if any(type(value) is not int or not 0 <= value < 2**62 for value in values):
        raise ExportError(f"{where}.{name} is {values!r:.80}: numbers from 0 on would do")
    return tuple(values)


def _number(told: Mapping[str, Any], name: str, where: str) -> int:
    """A number that is not negative."""
    value = told.get(name)
    if type(value) is not int or not 0 <= value < 2**62:
        raise ExportError(f"{where}.{name} is {value!r:.80}: a number from 0 on would do")
    return value


def _text(told: Mapping[str, Any], name: str, where: str) -> str:
    """A text that is not too long."""
    value = told.get(name)
    if not isinstance(value, str) or len(value) > LONGEST:
        raise ExportError(f"{where}.{name} is {value!r:.80}: a text of {LONGEST} characters at most would do")
    return value
