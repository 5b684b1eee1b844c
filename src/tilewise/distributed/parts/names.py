"""Finds which layer of a model runs, by a look at Python's stack, so that modules need no hooks for it."""

from __future__ import annotations

import sys
import weakref
from types import FrameType

from torch import nn
from torch.utils.hooks import BackwardHook

__all__ = ["current_layer", "failed_backward", "failed_layer", "remember"]

_names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_CALL = nn.Module._call_impl.__code__


def remember(model: nn.Module) -> None:
    """Remember the qualified names of the modules of ``model``."""
    for name, module in model.named_modules():
        _names[module] = name


def current_layer(function: str) -> str:
    """A text with ``function`` and the innermost module whose forward runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            return f"{function} of {_described(frame.f_locals['self'])}"
        frame = frame.f_back
    return function


def failed_layer(error: BaseException) -> str:
    """A text that names the innermost module in whose forward ``error`` was raised."""
    layer, trace = "forward", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is _CALL:
            layer = _described(trace.tb_frame.f_locals["self"])
        trace = trace.tb_next
    return layer


def failed_backward(error: BaseException) -> str:
    """A text that names the module in whose backward hook ``error`` was raised."""
    trace = error.__traceback__
    while trace is not None:
        # Only hooks of modules know their module: to autograd a layer is several nodes.
        hook = trace.tb_frame.f_locals.get("self")
        if isinstance(hook, BackwardHook):
            return f"the backward of {_described(hook.module)}"
        trace = trace.tb_next
    return "backward"


def _described(module: nn.Module) -> str:
    """The name and class of ``module``, or the class alone where the name is not known."""
    name, kind = _names.get(module), type(module).__name__
    return f"{name!r} ({kind})" if name else kind
