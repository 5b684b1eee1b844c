"""A module's repeated calls, recognised and run in C++ where that is there: in Python that takes some 10 us a layer."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from tilewise.kernels.native.autograd import native_calls
from tilewise.kernels.native.sequence import SCALAR_TYPES
from tilewise.machine.device import conv_precision
from tilewise.nn.layers.layer import Entry, Layer, is_like
from tilewise.nn.layers.overrides import CONV, ClassCode

__all__ = ["Repeated", "RepeatedCalls", "number_of"]

MOST_PATIENCE = 1024
"""Calls unlike the one that C++ knows until it is told of another, at the most."""


class RepeatedCalls:
    """The calls of one module's ``layer``, which has the entry of its ``latest`` call.

    ``call(module, input)`` is the result of a call like the one that :meth:`learn` saw last, and ``None`` of any other;
    it is ``None`` itself as long as C++ knows no call. ``entry`` is what ran the call that was seen. A subclass says
    for a kind of modules what C++ is told.
    """

    __slots__ = ("_layer", "_misses", "_patience", "call", "entry")

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.call: Callable[[Any, torch.Tensor], torch.Tensor | None] | None = None
        self.entry: Any = None
        self._misses, self._patience = 0, 1

    def learn(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> None:
        """Let C++ run calls like this one from now on, which Python has just run; not each time where calls alternate.

        The module's class and attributes have been found as they should be.
        """
        self._misses += 1
        if self._misses < self._patience:
            return
        self._misses, self._patience = 0, min(2 * self._patience, MOST_PATIENCE)
        self.entry = entry = self._layer.latest
        module = native_calls(x.device.type)
        self.call = None
        if module is None or entry is None:
            return
        try:
            self.call = self._made(module, entry, (x, w, b))
        except RuntimeError:  # Python has counted the versions of its classes to the end
            return

    def _made(self, module: types.ModuleType, entry: Any, tensors: tuple[Any, ...]) -> Any:
        """The call in C++; ``None`` where it cannot be told, or where the entry is not that of these tensors."""
        raise NotImplementedError


class Repeated(RepeatedCalls):
    """The calls of a convolution, whose class runs the ``code`` of torch.

    ``arguments`` are the names and values of the module's attributes on which its result depends.
    """

    __slots__ = ("_arguments", "_code")

    def __init__(self, layer: Layer, code: ClassCode, arguments: dict[str, Any]) -> None:
        super().__init__(layer)
        self._code, self._arguments = code, tuple(arguments.items())

    def _made(self, module: types.ModuleType, entry: Entry, tensors: tuple[Any, ...]) -> Any:
        """The call in C++; ``None`` where torch runs it with other arguments than it can be told."""
        g, code = self._layer.geometry, self._code
        if not is_like(entry, *tensors) or entry.libraries is not None or (entry.run is None and not g.symmetric):
            return None
        return module.ModuleCall(
            kind=code.kind,
            methods=(code.forward, code.helper),
            installed=(vars(CONV.F), code.function),
            level=(vars(forward_ad), "_current_level"),
            absent=(code.helper_name, "weight", "bias"),
            arguments=self._arguments,
            layer=self._layer,
            latest="latest",
            entry=entry,
            tensors=tensors,
            settings=(entry.grad, entry.deterministic, number_of(entry.autocast), *_precision_of(entry)),
            run=entry.run,
            geometry=(g.stride, tuple(before for before, _ in g.padding), g.dilation, g.groups),
        )


def number_of(dtype: torch.dtype | None) -> int:
    """The number of a dtype in C++; -1 for none."""
    return -1 if dtype is None else SCALAR_TYPES[dtype]


def _precision_of(entry: Entry) -> tuple[str | None, Callable[[], str]]:
    """What torch's precision of convolutions must be, and the shortest way to ask for it.

    Where torch's own setting of convolutions says nothing, those that it inherits from are asked, too.
    """
    if entry.precision is None or _own_precision() != entry.precision:
        return entry.precision, conv_precision
    return entry.precision, _own_precision


_own_precision: Callable[[], str] = functools.partial(torch._C._get_fp32_precision_getter, "cuda", "conv")
