"""Arguments and results as plain JSON values, and back: numbers, texts, torch's own constants, and places of tensors.

What JSON has is written as it is. Everything else is an object with one entry, whose name says what it is: a tuple is
``{"tuple": [...]}``, a type ``{"dtype": "float32"}``, the tensor with number 2 ``{"tensor": 2}``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_list

from tilewise.nn.programs.slots import Place

__all__ = ["ExportError", "decoded", "encoded", "torch_dtype"]

MOST_LEVELS = 32
NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
"""Kinds of torch's constants, each a name in ``torch``."""
DICTS = {"dict": dict, "OrderedDict": OrderedDict}
FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class ExportError(ValueError):
    """A model that cannot be exported, or a file that is no exported model; the message says why.

    >>> try:
    ...     tilewise.load_exported("no_such_model.safetensors")
    ... except (tilewise.nn.ExportError, OSError) as error:
    ...     print("cannot be loaded")
    cannot be loaded
    """


def encoded(value: Any, where: str) -> Any:
    """``value`` as JSON. ``where`` names it in the :class:`ExportError` that is raised for what cannot be written."""
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Place):
        return {"tensor": value.index}
    if type(value) in (list, immutable_list):
        return [encoded(each, where) for each in value]
    if type(value) is tuple or isinstance(value, torch.Size):
        return {"tuple": [encoded(each, where) for each in value]}
    if type(value) in DICTS.values() and all(type(name) is str for name in value):
        kind = next(kind for kind, of in DICTS.items() if of is type(value))
        return {kind: {name: encoded(each, where) for name, each in value.items()}}
    for kind, of in NAMED.items():
        if isinstance(value, of):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device) and value.type == "cpu":
        return {"device": "cpu"}
    raise ExportError(
        f"{where} has a {type(value).__name__}: tensors, numbers, texts, None, and tuples, lists and dicts of them "
        "can be exported"
    )


def decoded(data: Any, where: str, levels: int = MOST_LEVELS) -> Any:
    """What :func:`encoded` wrote. Raises :class:`ExportError` naming ``where`` for anything else."""
    if not levels:
        raise ExportError(f"{where} is nested more than {MOST_LEVELS} deep")
    if data is None or isinstance(data, bool | str | int | float):
        return data
    if isinstance(data, list):
        return [decoded(each, where, levels - 1) for each in data]
    if not isinstance(data, Mapping) or len(data) != 1:
        raise ExportError(f"{where} has {data!r:.80}: a value as tilewise.export writes it would do")
    ((kind, value),) = data.items()
    if kind in DICTS:
        return DICTS[kind](_dict(value, where, levels - 1))
    read = READ.get(kind)
    if read is not None:
        return read(value, where, levels - 1)
    if kind in NAMED:
        return _constant_of_torch(kind, value, where)
    raise ExportError(
        f"{where} has a value of the kind {kind!r:.80}: one of {', '.join((*READ, *DICTS, *NAMED))} would do"
    )


def torch_dtype(name: object, where: str) -> torch.dtype:
    """The type called ``name``, such as ``float32``. Raises :class:`ExportError`."""
    dtype: torch.dtype = _constant_of_torch("dtype", name, where)
    return dtype


def _constant_of_torch(kind: str, name: object, where: str) -> Any:
    """A constant of torch by its name."""
    found = getattr(torch, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not isinstance(found, NAMED[kind]):
        raise ExportError(f"{where} has {kind}={name!r:.80}: the name of one in torch would do")
    return found


def _tensor(value: Any, where: str, _: int) -> Place:
    """The place of a tensor."""
    if type(value) is not int or value < 0:
        raise ExportError(f"{where} has tensor={value!r:.80}: a number from 0 on would do")
    return Place(value)


def _tuple(value: Any, where: str, levels: int) -> tuple[Any, ...]:
    """A tuple."""
    if not isinstance(value, list):
        raise ExportError(f"{where} has tuple={value!r:.80}: a list would do")
    return tuple(decoded(each, where, levels) for each in value)


def _dict(value: Any, where: str, levels: int) -> dict[str, Any]:
    """A dict with names."""
    if not isinstance(value, dict):
        raise ExportError(f"{where} has dict={value!r:.80}: an object would do")
    return {name: decoded(each, where, levels) for name, each in value.items()}


def _float(value: Any, where: str, _: int) -> float:
    """A number that JSON has no word for."""
    if not isinstance(value, str) or value not in FLOATS:
        raise ExportError(f"{where} has float={value!r:.80}: one of {', '.join(FLOATS)} would do")
    return FLOATS[value]


def _device(value: Any, where: str, _: int) -> torch.device:
    """The CPU."""
    if value != "cpu":
        raise ExportError(f"{where} has device={value!r:.80}: cpu would do")
    return torch.device("cpu")


READ: dict[str, Callable[[Any, str, int], Any]] = {
    "tensor": _tensor,
    "tuple": _tuple,
    "float": _float,
    "device": _device,
}
"""What reads each kind of value that JSON has not."""
