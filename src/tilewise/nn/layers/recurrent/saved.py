"""What a planned layer keeps for its backward, as a list of tensors that autograd can save, check and release."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["apart", "together"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor: its number in the list."""

    number: int


def apart(value: Any, tensors: list[Tensor | None]) -> Any:
    """``value`` with a place for each tensor in it, which is added to ``tensors`` unless it is there.

    It looks into tuples, lists and dataclasses. :func:`together` undoes it.
    """
    if isinstance(value, Tensor):
        number = next((i for i, t in enumerate(tensors) if t is value), len(tensors))
        if number == len(tensors):
            tensors.append(value)
        return _Place(number)
    return _mapped(value, lambda each: apart(each, tensors))


def together(value: Any, tensors: Sequence[Tensor | None]) -> Any:
    """What :func:`apart` took apart, with the tensors of these places."""
    if isinstance(value, _Place):
        return tensors[value.number]
    return _mapped(value, lambda each: together(each, tensors))


def _mapped(value: Any, function: Any) -> Any:
    """A copy of a tuple, list or dataclass with ``function`` of each entry; anything else itself."""
    if isinstance(value, list):
        return [function(each) for each in value]
    if isinstance(value, tuple):
        entries = [function(each) for each in value]
        return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(twin, field.name, function(getattr(value, field.name)))
        return twin
    return value
