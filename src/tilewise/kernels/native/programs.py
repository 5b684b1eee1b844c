"""The C++ module that runs programs of steps, compiled on this machine against the torch that is installed.

It takes about half a minute to compile, once for each version of torch and Python. Until it is there, and where it
cannot be compiled, programs run in Python with the same results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.cpu.threads import forked, openmp_addresses
from tilewise.kernels.native.building import VARIABLE, switched_on
from tilewise.kernels.native.extension import Extension, Loading

__all__ = ["EXTENSION", "loading", "unchanged", "usual_call", "why_never"]

EXTENSION = Extension(
    "program_call",
    "program_call.cpp",
    ("program_call.h", "step_launches.h", "step_operators.h", "step_team.h", "step_values.h", "unchanged.h",
     "usual_call.h"),
    flags=("-std=c++20", "-O1", "-shared", "-fPIC"),
    language="C++",
    variable="CXX",
    compilers=("c++", "g++", "clang++"),
    longest_s=300.0,
    uses_torch=True,
)  # fmt: skip


def why_never() -> str:
    """Why programs of this process run in Python; empty where the module decides. Raises ``ValueError`` for a
    :data:`~tilewise.kernels.native.building.VARIABLE` that makes no sense.
    """
    if not switched_on():
        return f"{VARIABLE} is 0"
    if forked():
        return "a forked process has none of OpenMP's threads"
    return (
        "" if all(openmp_addresses()) else "torch's own threads cannot be reached: a torch with GCC's OpenMP would do"
    )


def unchanged(tensors: Sequence[Tensor], dicts: Sequence[dict[str, Any]]) -> Any:
    """What compares these with what they are now, or ``None``.

    It is ``None`` where the module is not there, for which nothing waits, and for tensors that are not strided.

    Its ``holds()`` says whether all tensors lie as they lay and no dictionary has changed, its ``same_versions()``
    whether no tensor has been written to. CPython counts a dictionary's changes up to 3.11; from 3.12 on it is told
    from what it was by its number of entries alone.
    """
    module = loading().module if loading.cache_info().currsize else None
    if module is None or any(t.layout is not torch.strided for t in tensors):
        return None
    return module.Unchanged(tuple(tensors), tuple(dicts))


def usual_call(readers: Sequence[Callable[[], object]], values: Sequence[object], tensors: Sequence[Tensor]) -> Any:
    """What tells calls like the one with ``tensors`` while all ``readers`` return ``values``, or ``None``.

    It is ``None`` where the module is not there, for which nothing waits, and for tensors that are not strided. Its
    ``fits(args)`` says whether a tuple has as many tensors, each of the same class, shape, strides, dtype, device and
    dispatch, and whether all readers return what they did.
    """
    module = loading().module if loading.cache_info().currsize else None
    if module is None or any(t.layout is not torch.strided for t in tensors):
        return None
    return module.UsualCall(tuple(readers), tuple(values), tuple(tensors))


@functools.cache
def loading() -> Loading:
    """This process's attempt to load the module, begun by the first call."""
    return Loading(EXTENSION)
