"""The C++ module that runs programs of steps, compiled on this machine against the torch that is installed.

It takes about half a minute to compile, once for each version of torch and Python. Until it is there, and where it
cannot be compiled, programs run in Python with the same results.
"""

from __future__ import annotations

import functools

from tilewise.kernels.cpu.threads import forked, openmp_address
from tilewise.kernels.native.building import VARIABLE, switched_on
from tilewise.kernels.native.extension import Extension, Loading

__all__ = ["EXTENSION", "loading", "why_never"]

EXTENSION = Extension(
    "program_call",
    "program_call.cpp",
    ("program_call.h", "step_launches.h", "step_operators.h", "step_values.h"),
    flags=("-std=c++20", "-O1", "-shared", "-fPIC"),
    language="C++",
    variable="CXX",
    compilers=("c++", "g++", "clang++"),
    longest_s=300.0,
    uses_torch=True,
)


def why_never() -> str:
    """Why programs of this process run in Python; empty where the module decides. Raises ``ValueError`` for a
    :data:`~tilewise.kernels.native.building.VARIABLE` that makes no sense.
    """
    if not switched_on():
        return f"{VARIABLE} is 0"
    if forked():
        return "a forked process has none of OpenMP's threads"
    return "" if openmp_address() else "torch's own threads cannot be reached: a torch with GCC's OpenMP would do"


@functools.cache
def loading() -> Loading:
    """This process's attempt to load the module, begun by the first call."""
    return Loading(EXTENSION)
