"""Loads exported models and runs them: no code of the model is needed, and nothing is planned."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tilewise.machine.device import environment
from tilewise.nn.arguments import in_line
from tilewise.nn.exported import files
from tilewise.nn.exported.document import Reading
from tilewise.nn.exported.values import ExportError, decoded
from tilewise.nn.programs.program import ALIGNMENT, Program
from tilewise.nn.programs.slots import Place, Slot
from tilewise.solvers.base import SolverUnavailable
from tilewise.version import VERSION

__all__ = ["Exported", "load_exported"]

CPU = torch.device("cpu")


class Exported:
    """A model that was exported, called as the model was: with the same arguments, for the same results.

    Calls run without gradients, and several threads may call at once. A tensor that lies in another layout than the
    example did is copied first. Raises ``ValueError`` at a call with tensors of other shapes or types than the
    examples had, or other values of other arguments.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/model.safetensors"
    >>> report = tilewise.export(torch.nn.Linear(4, 2).eval(), torch.randn(3, 4), path)
    >>> program = tilewise.load_exported(path)
    >>> program(torch.randn(3, 4)).shape
    torch.Size([3, 2])
    """

    def __init__(self, path: Path, document: Mapping[str, Any], programs: list[_Program]) -> None:
        """:func:`load_exported` makes it."""
        self.path = path
        self.model = str(document.get("model"))
        self.environment = str(document.get("environment"))
        self._programs = programs

    @property
    def examples(self) -> tuple[str, ...]:
        """The tensors of the examples for which there are programs, in words."""
        return tuple(program.in_words() for program in self._programs)

    @property
    def why_not_native(self) -> str:
        """Why steps are called from Python; empty where they are called from native code."""
        return next((each.program.why_not_native for each in self._programs if each.program.why_not_native), "")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments."""
        for program in self._programs:
            tensors = program.fitting(args, kwargs)
            if tensors is not None:
                return program(tensors)
        raise ValueError(self._why_none(args, kwargs))

    def _why_none(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Why no program takes these arguments."""
        leaves, _ = tree_flatten((args, dict(kwargs)))
        for leaf in leaves:
            if isinstance(leaf, Tensor) and (leaf.device != CPU or leaf.layout is not torch.strided):
                return f"called with a tensor on {leaf.device}, {leaf.layout}: plain tensors on the CPU would do"
        given = ", ".join(_told(leaf) for leaf in leaves) or "nothing"
        return f"called with {given}: exported for {'; or '.join(self.examples)}"

    def __repr__(self) -> str:
        return f"<{self.model} exported to {self.path}, for {'; or '.join(self.examples)}>"


class _Program:
    """One program with the arguments that it takes and the results that it gives."""

    def __init__(self, data: Any, reading: Reading, where: str) -> None:
        if not isinstance(data, dict):
            raise ExportError(f"{where} is {data!r:.80}: an object would do")
        self.program: Program = reading.program(data.get("program"), f"{where}.program")
        arguments = decoded(data.get("arguments"), f"{where}.arguments")
        if not (
            isinstance(arguments, list)
            and len(arguments) == 2
            and isinstance(arguments[0], tuple)
            and isinstance(arguments[1], dict)
        ):
            raise ExportError(f"{where}.arguments is {data.get('arguments')!r:.80}: positional and named would do")
        self._names = list(arguments[1])
        self._leaves, self._structure = tree_flatten(tuple(arguments))
        results = decoded(data.get("results"), f"{where}.results")
        self._results, self._results_structure = tree_flatten(results)
        _check_places(self._leaves, len(self.program.inputs), f"{where}.arguments", in_order=True)
        _check_places(self._results, len(self.program.outputs), f"{where}.results", in_order=False)
        self._slots = [self.program.slots[index] for index in self.program.inputs]
        self._plain = not arguments[1] and all(isinstance(each, Place) for each in arguments[0])
        self._single = isinstance(results, Place)

    def in_words(self) -> str:
        """Shapes and types of the tensors that it takes, and other arguments."""
        slots = iter(self._slots)
        return ", ".join(_told(next(slots) if isinstance(leaf, Place) else leaf) for leaf in self._leaves)

    def fitting(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor] | None:
        """The tensors of a call that it takes, as they must lie; ``None`` for another call."""
        if self._plain and not kwargs:
            leaves: Any = args
        else:
            if kwargs.keys() != set(self._names):
                return None
            leaves, structure = tree_flatten((args, {name: kwargs[name] for name in self._names}))
            if structure != self._structure:
                return None
        if len(leaves) != len(self._leaves):
            return None
        tensors, slots = [], iter(self._slots)
        for given, wanted in zip(leaves, self._leaves, strict=True):
            if not isinstance(wanted, Place):
                if type(given) is not type(wanted) or given != wanted:
                    return None
                continue
            slot = next(slots)
            if not isinstance(given, Tensor) or given.shape != slot.shape or given.dtype is not slot.dtype:
                return None
            if given.device != CPU or given.layout is not torch.strided:
                return None
            tensors.append(_laid(given, slot))
        return tensors

    def __call__(self, tensors: list[Tensor]) -> Any:
        """The results."""
        found = self.program(*tensors)
        if self._single:
            return found
        outputs = found if isinstance(found, tuple) else (found,)
        leaves = [outputs[leaf.index] if isinstance(leaf, Place) else leaf for leaf in self._results]
        return tree_unflatten(leaves, self._results_structure)


def load_exported(path: str | os.PathLike[str]) -> Exported:
    """Load a model that :func:`export` wrote. It is checked, bound to this machine's kernels, and ready to be called.

    Where this processor, torch or the number of threads is another than where it was exported, results are as exact,
    but other plans may be faster: a warning says so.

    Kernels that are not on this machine yet are compiled, which takes a minute. A pack that ``tilewise kernels build``
    made of the file brings them.

    Raises ``ExportError`` (a ``ValueError``) for a file that holds no exported model or was damaged, and for a plan
    whose solver does not offer it here; ``SolverUnavailable`` where a plan's kernel cannot run on this machine. Both
    name the step and the reason, and where the file was exported if that was elsewhere.

    >>> report = tilewise.export(torch.nn.Linear(4, 2).eval(), torch.randn(3, 4), "model.safetensors")
    >>> tilewise.load_exported("model.safetensors")(torch.randn(3, 4)).shape
    torch.Size([3, 2])
    """
    if not isinstance(path, str | os.PathLike) or "\0" in str(path):
        raise ValueError(f"path={in_line(path)}: the path of a file would do")
    file = Path(path)
    document, tensors = files.read(file)
    listed = document.get("programs")
    if not isinstance(listed, list) or not listed:
        raise ExportError(f"{file}: programs={listed!r:.80}: a list of them would do")
    reading = Reading(tensors)
    elsewhere = _elsewhere(document)
    try:
        programs = [_Program(data, reading, f"{file}: programs[{i}]") for i, data in enumerate(listed)]
    except (ExportError, SolverUnavailable) as error:
        if not elsewhere:
            raise
        raise type(error)(f"{error}. The file {elsewhere}: export it here") from error
    if elsewhere:
        text = f"{file} {elsewhere}. Its results are as exact, but other plans may be faster: export it here"
        warnings.warn(text, stacklevel=2)
    for each in programs:
        each.program.use_native(checked=bool(elsewhere))
    return Exported(file, document, programs)


def _elsewhere(document: Mapping[str, Any]) -> str:
    """How the environment or version that a model was exported in differs from those here; empty where it does not."""
    here = {"environment": str(environment("cpu")), "torch": torch.__version__, "tilewise": VERSION}
    for name, value in here.items():
        there = document.get(name)
        if there != value:
            return f"was exported with {name} {there!r:.300}; here it is {value!r}"
    return ""


def _check_places(leaves: list[Any], count: int, where: str, *, in_order: bool) -> None:
    """Raise :class:`ExportError` unless tensors have the numbers from 0 to ``count``, each once, in order if asked."""
    numbers = [leaf.index for leaf in leaves if isinstance(leaf, Place)]
    if (numbers if in_order else sorted(numbers)) != list(range(count)):
        raise ExportError(f"{where} has the tensors {numbers!r:.80}: the {count} of the program would do")


def _laid(tensor: Tensor, slot: Slot) -> Tensor:
    """The tensor, or a copy that lies as the slot says."""
    if slot.has(tensor) and tensor.data_ptr() % ALIGNMENT == 0 and not (tensor.is_neg() or tensor.is_conj()):
        return tensor
    copy = torch.empty_strided(slot.shape, slot.strides, dtype=slot.dtype, device=CPU)
    with torch.no_grad():
        return copy.copy_(tensor)


def _told(value: Any) -> str:
    """A tensor or another argument in words."""
    if isinstance(value, Tensor | Slot):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"{value!r:.80}"
