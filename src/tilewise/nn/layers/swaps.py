"""Replacing ``forward`` of one module: setting it, finding it, undoing it, and keeping it out of copies and pickles.

The swap is an instance attribute ``forward``, a method bound to the module, so the module's class, parameters, hooks
and ``state_dict`` stay as they were. A method bound to one module must not get into another module's dictionary. So
three more attributes answer for the module while it is swapped, by protocols of torch and Python:

- ``__getstate__`` leaves all of them out: a shallow copy and a pickle hold exactly what the plain module's would.
- ``__deepcopy__`` and ``_replicate_for_data_parallel`` bind the swap to the copy.
- ``__prepare_scriptable__`` says that ``torch.jit.script`` needs the plain module.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["copies_itself", "own_attributes", "standing_attributes", "swap", "swap_back", "swapped"]

_forwards: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
"""Every function that was swapped in. A function that wraps one takes over its attributes, but is not in here."""


def swap(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let ``module`` compute by ``forward``; copies of it get their own binding."""
    _forwards.add(forward)
    module.__dict__["forward"] = types.MethodType(forward, module)
    for name, function in _PROTOCOLS.items():
        module.__dict__[name] = types.MethodType(function, module)


def swap_back(module: nn.Module) -> None:
    """Undo :func:`swap`. A ``forward`` that was set by others since then stays."""
    for name in own_attributes(module):
        del module.__dict__[name]


def swapped(module: nn.Module) -> Callable[..., Any] | None:
    """The function by which this module computes since :func:`swap`; ``None`` where it does not."""
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    return function if isinstance(function, types.FunctionType) and function in _forwards else None


def standing_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of the instance under the names that :func:`swap` uses, whoever set them."""
    return {name: module.__dict__[name] for name in ("forward", *_PROTOCOLS) if name in module.__dict__}


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of the instance that :func:`swap` set and that are still there."""
    attributes = module.__dict__
    ours = {
        name: attributes[name]
        for name, function in _PROTOCOLS.items()
        if getattr(attributes.get(name), "__func__", None) is function
    }
    if swapped(module) is not None:
        ours["forward"] = attributes["forward"]
    return ours


def copies_itself(module: nn.Module) -> str:
    """Why copies of this module could stay bound to it, as a reason not to swap; empty where they could not."""
    for name in ("__copy__", "__reduce__", "__reduce_ex__"):
        if getattr(type(module), name, None) is not getattr(nn.Module, name, None):
            return f"{type(module).__name__} has a {name} of its own, so that a copy could run with this one's weights"
    for name in _PROTOCOLS:
        if name in module.__dict__ and name not in own_attributes(module):
            return f"has a {name} set on the instance"
    return ""


def _getstate(self: Any) -> Any:
    """The state that the class gives, without what :func:`swap` added."""
    kind: Any = type(self)
    state = kind.__getstate__(self)
    if isinstance(state, dict):
        for name, value in own_attributes(self).items():
            if state.get(name) is value:
                del state[name]
    return state


def _deepcopy(self: Any, memo: dict[int, Any]) -> nn.Module:
    """A copy as the class makes it, swapped as the original is."""
    class_deepcopy = getattr(type(self), "__deepcopy__", None)
    if class_deepcopy is not None:
        twin: nn.Module = class_deepcopy(self, memo)
    else:
        make, arguments, state = self.__reduce_ex__(4)[:3]
        twin = memo[id(self)] = make(*copy.deepcopy(arguments, memo))  # first: its hooks may lead back to it
        twin.__setstate__(copy.deepcopy(state, memo))
    return _swapped_alike(self, twin)


def _replicate_for_data_parallel(self: Any) -> nn.Module:
    """A replica for :class:`torch.nn.DataParallel`, whose own copying copies the instance's dictionary."""
    return _swapped_alike(self, type(self)._replicate_for_data_parallel(self))


def _prepare_scriptable(self: Any) -> nn.Module:
    """Raise ``RuntimeError``, which says to script the plain model."""
    raise RuntimeError(
        f"torch.jit.script: this {type(self).__name__} runs by tilewise's plans, which TorchScript cannot hold. "
        "Script the plain model: torch.jit.script(tilewise.restore(model)), or a copy.deepcopy of it restored"
    )


def _swapped_alike(module: nn.Module, twin: nn.Module) -> nn.Module:
    """``twin``, a copy of ``module``, with a swap of its own in place of that of ``module``."""
    forward = swapped(module)
    if twin is not module and type(twin) is type(module):
        for name, value in own_attributes(module).items():
            if twin.__dict__.get(name) is value:
                del twin.__dict__[name]
        if forward is not None:
            swap(twin, forward)
    return twin


_PROTOCOLS: dict[str, Callable[..., Any]] = {
    "__getstate__": _getstate,
    "__deepcopy__": _deepcopy,
    "_replicate_for_data_parallel": _replicate_for_data_parallel,
    "__prepare_scriptable__": _prepare_scriptable,
}
