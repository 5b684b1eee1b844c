"""Repeated calls of a linear layer, recognised and run in C++: see :mod:`tilewise.nn.layers.repeated`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from tilewise.machine.device import matmul_precision
from tilewise.nn.layers.linear.layer import Entry
from tilewise.nn.layers.repeated import RepeatedCalls, number_of

__all__ = ["RepeatedLinear", "is_usual"]


def is_usual(module: nn.Module) -> bool:
    """Whether weight and bias are the module's own parameters, which C++ reads where they are registered."""
    attributes = module.__dict__
    parameters = attributes["_parameters"]
    return all(name in parameters and name not in attributes for name in ("weight", "bias"))


class RepeatedLinear(RepeatedCalls):
    """The calls of a linear layer whose class runs torch's own code, and whose tensors are as :func:`is_usual` says."""

    __slots__ = ()

    def _made(self, module: types.ModuleType, entry: Entry, tensors: tuple[Any, ...]) -> Any:
        """The call in C++; ``None`` where the entry is not that of these tensors."""
        if not entry.is_like(*tensors):
            return None
        forward = nn.Linear.forward
        return module.ModuleCall(
            kind=nn.Linear,
            methods=(forward, forward),
            installed=(vars(nn.functional), "linear"),
            level=(vars(forward_ad), "_current_level"),
            absent=("weight", "bias"),
            arguments=(),
            layer=self._layer,
            latest="latest",
            entry=entry,
            tensors=tensors,
            settings=(entry.grad, entry.deterministic, number_of(entry.autocast), *_precision_of(entry)),
            run=entry.run,
            geometry=(),
        )


def _precision_of(entry: Entry) -> tuple[str | None, Callable[[], str]]:
    """What torch's precision of products must be, and the shortest way to ask for it."""
    if entry.precision is None or _own_precision() != entry.precision:
        return entry.precision, matmul_precision
    return entry.precision, _own_precision


_own_precision: Callable[[], str] = functools.partial(torch._C._get_fp32_precision_getter, "cuda", "matmul")
