"""CUDA C++ compiled through NVIDIA's cuda.core (NVRTC), and kept on disk. No GPU and no torch is needed."""

from __future__ import annotations

import functools
import importlib
import importlib.resources
import threading
from pathlib import Path
from typing import Any

from tilewise.kernels.building import cubins

__all__ = ["compile_text", "compiler", "core", "read_source", "unavailable"]

OPTIONS = {"std": "c++17", "device_as_default_execution_space": True}
_IMPORTING = threading.Lock()
CORE = ("cuda.core", "cuda.core.experimental")
"""Modules in which cuda.core keeps ``Program``: the first from version 0.5 on, the second before."""


def core() -> tuple[Any, Any, str]:
    """The modules of cuda.core and of the driver, or the reason why there are none."""
    with _IMPORTING:  # of several threads that import cuda.core at once, one may find it half imported
        return _core()


@functools.cache
def _core() -> tuple[Any, Any, str]:
    """See :func:`core`."""
    for name in CORE:
        try:
            core = importlib.import_module(name)
            driver = importlib.import_module("cuda.bindings.driver")
        except ModuleNotFoundError as error:
            reason = f"cuda-core is not installed: pip install 'tilewise[gpu]' would do ({error})"
        except Exception as error:  # a library of another CUDA version, or of none
            reason = f"importing {name} failed: {type(error).__name__}: {error}"
        else:
            if hasattr(core, "Program") and hasattr(core, "ObjectCode"):
                return core, driver, ""
            reason = f"{name} has no Program or no ObjectCode: cuda-core 1.2 would do"
    return None, None, reason


def unavailable() -> str:
    """Why kernels of this package cannot be compiled here; empty when they can. Imports cuda.core."""
    return core()[2]


@functools.cache
def read_source(name: str) -> str:
    """The text of a CUDA C++ file of this package."""
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@functools.cache
def compiler() -> str:
    """The compiler's version and options as text. Raises ``RuntimeError`` where it does not tell."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    error, *version = nvrtc.nvrtcVersion()
    if int(error):
        raise RuntimeError(f"nvrtcVersion failed: {error}")
    return f"nvrtc {version} {OPTIONS}"


def compile_text(text: str, architecture: str) -> tuple[Any, Path]:
    """The compiled code of a whole program, and the file in which it is kept. Raises what the compiler raises."""
    modules, _, reason = core()
    if reason:
        raise RuntimeError(reason)
    program = modules.Program(text, code_type="c++", options=modules.ProgramOptions(arch=architecture, **OPTIONS))
    compiled = program.compile("cubin")
    path = cubins.path_of(text, architecture, compiler())
    cubins.store(path, bytes(compiled.code))
    return compiled, path
