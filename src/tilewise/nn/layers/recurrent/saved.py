"""What a planned layer keeps for its backward, as a list of tensors that autograd can save, check and release."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, contiguous_format

from tilewise.problems.recurrent.packing import Packing
from tilewise.solvers.recurrent._direction import Span

__all__ = ["apart", "apart_in_memory", "together"]

WHOLE: frozenset[type] = frozenset({Packing, Span, type(None), bool, int, float, str, slice})
"""Types of values that are kept as they are: they hold no tensor of a layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor: its number in the list."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class _View:
    """Stands for a view of the tensor with this number, which begins ``offset`` elements behind it."""

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def apart(value: Any, tensors: list[Tensor | None], *, views: bool = False) -> Any:
    """``value`` with a place for each tensor in it, which is added to ``tensors`` unless it is there.

    It looks into tuples, lists and dataclasses. With ``views`` a tensor that lies in the memory of another one of its
    type is not added either: no two of those added share memory then, as an operator's results may not.
    :func:`together` undoes it.
    """
    if isinstance(value, Tensor):
        return _placed(value, tensors, views)
    return _mapped(value, functools.partial(apart, tensors=tensors, views=views))


def _placed(value: Tensor, tensors: list[Tensor | None], views: bool) -> _Place | _View:
    """The place of a tensor, which is added where it has none."""
    for number, t in enumerate(tensors):
        if t is value:
            return _Place(number)
    for number, t in enumerate(tensors if views and value.numel() else ()):
        if t is not None and t.dtype is value.dtype and _memory(t) == _memory(value):
            offset = int(value.storage_offset()) - int(t.storage_offset())
            return _View(number, tuple(value.shape), value.stride(), offset)
    tensors.append(value)
    return _Place(len(tensors) - 1)


def _memory(t: Tensor) -> tuple[int, int]:
    """Where the memory begins that ``t`` is a view of; that of an empty tensor is nobody else's."""
    address = t.untyped_storage().data_ptr()
    return (address, 0) if address else (0, id(t))


def together(value: Any, tensors: Sequence[Tensor | None]) -> Any:
    """What :func:`apart` took apart, with the tensors of these places."""
    if isinstance(value, _Place):
        return tensors[value.number]
    if isinstance(value, _View):
        base = tensors[value.number]
        assert base is not None
        return base.as_strided(value.shape, value.strides, base.storage_offset() + value.offset)
    return _mapped(value, functools.partial(together, tensors=tensors))


def apart_in_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, dense, with copies of those that share memory: the results of an operator may not."""
    seen: set[int] = set()
    made: list[Tensor] = []
    for t in tensors:
        address = t.untyped_storage().data_ptr()
        made.append(t.clone(memory_format=contiguous_format) if address in seen else t.contiguous())
        seen.add(address)
    return made


def _mapped(value: Any, function: Any) -> Any:
    """A copy of a tuple, list or dataclass with ``function`` of each entry; anything else itself."""
    kind: Any = type(value)
    if kind in WHOLE:
        return value
    if kind is list:
        return [function(each) for each in value]
    if isinstance(value, tuple):
        entries = [function(each) for each in value]
        return kind(*entries) if hasattr(value, "_fields") else tuple(entries)
    names = _fields_of(kind)
    if not names:
        return value
    twin = object.__new__(kind)
    for name in names:
        object.__setattr__(twin, name, function(getattr(value, name)))
    return twin


@functools.cache
def _fields_of(kind: Any) -> tuple[str, ...]:
    """The names of a dataclass's fields; none for another type."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()
