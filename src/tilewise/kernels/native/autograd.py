"""The C++ module that runs a planned call with autograd, compiled on this machine against the torch that is installed.

It takes about a quarter of a minute to compile, once for each version of torch and Python. Nothing waits for it: until
it is there, and where it cannot be compiled, calls come from Python, and :func:`why_not` says why.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

import torch

from tilewise.kernels.native.building import VARIABLE, switched_on
from tilewise.kernels.native.extension import Extension, Loading, is_kept, missing

__all__ = [
    "DEVICES",
    "EXTENSION",
    "expected",
    "linear_call",
    "native_calls",
    "planned_call",
    "start",
    "when_there",
    "why_never",
    "why_not",
]

EXTENSION = Extension(
    "planned_call",
    "planned_call.cpp",
    (
        "alike_tensors.h",
        "backward_node.h",
        "launch_api.h",
        "linear_call.h",
        "module_call.h",
        "operators.h",
        "passes.h",
        "plan_pass.h",
        "recurrent_call.h",
        "recurrent_plan.h",
    ),
    flags=("-std=c++20", "-O1", "-shared", "-fPIC"),
    language="C++",
    variable="CXX",
    compilers=("c++", "g++", "clang++"),
    longest_s=300.0,
    uses_torch=True,
)

DEVICES = {"cuda"}
"""Types of devices whose calls come from C++. On a CPU what Python takes is little beside what is computed, and the
compiler would disturb what is measured."""

_waiting: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()


def start(device_types: Collection[str]) -> None:
    """Begin to load the module, or to compile it, in the background, where calls on such devices can come from C++.

    Costs nothing the next time. Raises ``ValueError`` for a :data:`VARIABLE` that makes no sense.
    """
    if not DEVICES.isdisjoint(device_types) and not why_never():
        _loading()


def native_calls(device_type: str) -> ModuleType | None:
    """The module, for calls on such a device; ``None`` while it is not there."""
    if device_type not in DEVICES or why_never():
        return None
    return _loading().module


def planned_call(device_type: str) -> Callable[..., Any] | None:
    """The module's class ``PlannedCall``, as :func:`native_calls`."""
    module = native_calls(device_type)
    return None if module is None else module.PlannedCall


def linear_call(device_type: str) -> Callable[..., Any] | None:
    """The module's class ``LinearCall``, as :func:`native_calls`."""
    module = native_calls(device_type)
    return None if module is None else module.LinearCall


def when_there(holder: Any) -> None:
    """Have ``holder.use_native()`` called once the module is there, from another thread; ``holder`` is held weakly.

    Nothing is called where the module is there already, or nobody asked for it.
    """
    if not _loading.cache_info().currsize:
        return
    with _lock:
        if _loading().module is None and not _loading().ended:
            _waiting.add(holder)


def why_not() -> str:
    """Why calls of this process come from Python; empty where they come from C++. Waits for the compiler."""
    return why_never() or _loading().finished().reason


def expected() -> str:
    """Why calls will come from Python; empty where they come from C++, or will once the module is compiled.

    Compiles nothing: a module that is kept on disk is loaded, and else no compiler is asked.
    """
    if (reason := why_never()) or is_kept(EXTENSION):
        return reason or why_not()
    return _loading().reason if _loading.cache_info().currsize and _loading().ended else missing(EXTENSION)


def why_never() -> str:
    """Why nothing is compiled in this process; empty where it is. Raises as :func:`start`."""
    if not switched_on():
        return f"{VARIABLE} is 0"
    if "cpu" in DEVICES:
        return ""
    return "this torch has no CUDA" if torch.version.cuda is None else ""


@functools.cache
def _loading() -> Loading:
    """This process's attempt to load the module."""
    return Loading(EXTENSION, _tell)


def _tell() -> None:
    """Tell all that wait that the module is there."""
    with _lock:
        holders = list(_waiting)
        _waiting.clear()
    for holder in holders:
        holder.use_native()
