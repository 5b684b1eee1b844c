"""Which class a layer's type names: the built-in ones, and those that users add."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.layers.base import Layer, Phase, Shape

__all__ = [
    "Maker",
    "input_places",
    "layer_types",
    "maker",
    "name_losses",
    "register",
    "register_python",
    "unknown_layers",
]

Maker = Callable[[Any, Sequence[Shape], Phase], Layer]
"""Makes a layer of its ``LayerParameter``, the shapes of its bottoms and the phase. A class of layers is one."""
Made = TypeVar("Made", bound=Maker)

_MAKERS: dict[str, Maker] = {}
_PYTHON: dict[tuple[str, str], Maker] = {}


def register(name: str) -> Callable[[Made], Made]:
    """Let layers of type ``name`` be made by the class or function below. The last one registered is used.

    The class is a subclass of :class:`~tilewise.frontends.caffe.layers.base.Layer`:

        >>> @register("Double")
        ... class Double(Layer):
        ...     def forward(self, x):
        ...         return 2 * x
        >>> "Double" in layer_types()
        True

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` for an empty name.
    """
    if not name:
        raise CaffeError("name = '': the type that networks name would do")

    def add(made: Made) -> Made:
        _MAKERS[name] = made
        return made

    return add


def register_python(module: str, layer: str) -> Callable[[Made], Made]:
    """Let ``Python`` layers of this module and name be made by the class or function below.

    A network only names the class: no module is imported because a file says so.

        >>> @register_python("pascal_layers", "Half")
        ... class Half(Layer):
        ...     def forward(self, x):
        ...         return x / 2
    """

    def add(made: Made) -> Made:
        _PYTHON[module, layer] = made
        return made

    return add


def layer_types() -> tuple[str, ...]:
    """The types of layers that can be made, in the order of the alphabet.

    >>> from tilewise.frontends.caffe import layer_types
    >>> "Convolution" in layer_types()
    True
    """
    return tuple(sorted({*_MAKERS, *(("Python",) if _PYTHON else ())}))


def maker(name: str) -> Maker | None:
    """What makes layers of type ``name``; ``None`` where nothing does."""
    return _MAKERS.get(name)


def maker_of(parameter: Any) -> Maker | None:
    """What makes this layer; ``None`` where nothing does."""
    if parameter.type == "Python":
        python = parameter.python_param
        return _PYTHON.get((python.module, python.layer))
    return maker(parameter.type)


def input_places(parameters: Iterable[Any], data_types: Iterable[str], shapes: Iterable[str]) -> set[int]:
    """Which of some ``LayerParameter`` give a network its inputs, by their numbers.

    Those are layers of data, and layers without bottoms that nothing here makes but for whose tops the caller has
    ``shapes``: a fork's layers of data, or a program's own in Python.
    """
    known, given = set(data_types), set(shapes)
    return {
        place
        for place, p in enumerate(parameters)
        if not p.bottom and (p.type in known or (p.top and maker_of(p) is None and given.issuperset(p.top)))
    }


def name_losses(parameters: Sequence[Any]) -> None:
    """Give losses without a top one of their own name, as old networks leave it out and Caffe adds it."""
    taken = {top for p in parameters for top in p.top}
    for p in parameters:
        if not p.top and getattr(maker_of(p), "is_loss", False):
            name = str(p.name) or str(p.type)
            while name in taken:
                name += "_"
            taken.add(name)
            p.top.append(name)


def unknown_layers(parameters: Iterable[Any]) -> CaffeError | None:
    """One error for all ``LayerParameter`` that nothing makes, ``None`` where there is none."""
    lines = []
    for parameter in parameters:
        if maker_of(parameter) is not None:
            continue
        if parameter.type == "Python":
            python = parameter.python_param
            hint = f"register_python({python.module!r}, {python.layer!r}) above a Layer class would add it"
        else:
            types = {name.lower(): name for name in layer_types()}
            close = [types[name] for name in difflib.get_close_matches(parameter.type.lower(), types, n=2)]
            hint = f"register({parameter.type!r}) above a Layer class would add it"
            hint = (f"did you mean {' or '.join(map(repr, close))}? " if close else "") + hint
        if not parameter.bottom and parameter.top:
            shapes = ", ".join(f"{top!r}: (...)" for top in parameter.top)
            hint += f"; so would shapes={{{shapes}}}, which makes its tops inputs"
        lines.append(f"layer {parameter.name!r} has the unknown type {parameter.type!r}: {hint}")
    return CaffeError("; ".join(lines)) if lines else None
