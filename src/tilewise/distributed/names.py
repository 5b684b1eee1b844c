"""Which layer of a model is at work, found from the stack when it is asked: modules cost nothing for it."""

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
    """Know the modules of ``model`` by their qualified names."""
    for name, module in model.named_modules():
        _names[module] = name


def current_layer(function: str) -> str:
    """The innermost module whose forward runs, and ``function``, in words."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            return f"{function} of {_described(frame.f_locals['self'])}"
        frame = frame.f_back
    return function


def failed_layer(error: BaseException) -> str:
    """The innermost module whose forward ``error`` left, in words."""
    found, trace = "forward", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is _CALL:
            found = _described(trace.tb_frame.f_locals["self"])
        trace = trace.tb_next
    return found


def failed_backward(error: BaseException) -> str:
    """The module whose hook ``error`` left in backward, in words."""
    trace = error.__traceback__
    while trace is not None:
        # Only hooks of modules know one: to autograd a layer is several nodes.
        hook = trace.tb_frame.f_locals.get("self")
        if isinstance(hook, BackwardHook):
            return f"the backward of {_described(hook.module)}"
        trace = trace.tb_next
    return "backward"


def _described(module: nn.Module) -> str:
    name, kind = _names.get(module), type(module).__name__
    return f"{name!r} ({kind})" if name else kind
