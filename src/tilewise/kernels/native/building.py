"""The C module that queues launches, compiled on this machine and kept where compiled kernels are.

It needs a C compiler and Python's header files, as Triton does, and is compiled once for each version of Python. Where
that cannot be done, kernels are launched from Python as before, and :func:`why_not` says why.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any, NamedTuple

import torch

from tilewise.kernels.native import extension
from tilewise.kernels.native.extension import Extension, Loading

__all__ = ["EXTENSION", "VARIABLE", "Native", "file_name", "load", "native", "start", "switched_on", "why_not"]

VARIABLE = "TILEWISE_NATIVE"
"""The environment variable that keeps launches in Python where it is 0."""
EXTENSION = Extension(
    "launches",
    "launches.c",
    ("driver.h", "launch_api.h", "launch_list.h", "lt_product.h", "pass_call.h", "product.h"),
    flags=("-std=c11", "-D_DEFAULT_SOURCE", "-O2", "-shared", "-fPIC"),
    language="C",
    variable="CC",
    compilers=("cc", "gcc", "clang"),
)
DRIVER = "libcuda.so.1"


def switched_on() -> bool:
    """Whether :data:`VARIABLE` leaves launches in C on. Raises ``ValueError`` for a value that makes no sense."""
    asked = os.environ.get(VARIABLE, "").strip()
    if asked not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={asked!r}: 1 or 0 would do")
    return asked != "0"


def load() -> ModuleType:
    """The module, from its file or compiled. Raises :class:`~tilewise.kernels.native.extension.Unavailable`."""
    return extension.load(EXTENSION)


def file_name() -> str:
    """The name of the file that holds the module for this machine's Python and C library."""
    return extension.file_name(EXTENSION)


@functools.cache
def start() -> None:
    """Begin to load the module, or to compile it, in the background, where launches can come from C.

    Costs nothing the next time. Raises ``ValueError`` for a :data:`VARIABLE` that makes no sense.
    """
    if switched_on() and torch.version.cuda is not None:
        _loading()


@functools.cache
def _loading() -> Loading:
    """This process's attempt to load the module."""
    return Loading(EXTENSION)


class Native(NamedTuple):
    """The module, and the functions of the driver that its ``LaunchList`` takes."""

    module: ModuleType
    driver: Any


def native() -> Native | None:
    """The module with the CUDA driver; ``None`` where launches stay in Python.

    Waits until the module is there, at most for the time of one compilation. That happens once on a machine, and most
    of it while kernels are compiled. So launches come from C from the first call on, or never. Raises as :func:`start`.
    """
    return _native()[0]


def why_not() -> str:
    """Why launches of this process come from Python; empty where they come from C. Waits as :func:`native` does."""
    return _native()[1]


@functools.cache
def _native() -> tuple[Native | None, str]:
    """The module with the driver's functions, or why there are none."""
    if not switched_on():
        return None, f"{VARIABLE} is 0"
    if torch.version.cuda is None:
        return None, "this torch has no CUDA"
    loading = _loading().finished()
    if loading.module is None:
        return None, loading.reason
    try:
        return Native(loading.module, loading.module.Driver(DRIVER)), ""
    except OSError as error:
        return None, str(error)
