"""One compilation as plain JSON, written by the process that needs it and done by another.

A program in CUDA C++ is sent as its text. A kernel of Triton is named by its module and its own name, and never sent.
Both sides use Triton: the job holds what Triton's launcher would compile, and :func:`triton.compile` compiles it. So
the entry in Triton's cache on disk is the one that the launcher looks for.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["PACKAGE", "UnknownJob", "compile_job", "describe", "read_compiler"]

PACKAGE = "tilewise.kernels.triton"
"""The package whose kernels may be compiled; a job can name no others."""
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
FIELDS = frozenset({"module", "kernel", "signature", "constants", "attributes", "options", "target", "environment"})
"""Fields of a job for Triton."""
CUDA_FIELDS = frozenset({"cuda", "architecture", "environment"})
"""Fields of a job in CUDA C++: its whole text, and an architecture such as ``sm_90a``."""


class UnknownJob(ValueError):
    """Something is no job. The message says what is wrong with it."""


def describe(source: Any, target: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The job of ``triton.compile(source, target, options)``, without its ``environment`` (variables to compile under).

    Raises ``TypeError`` for a value that a job cannot hold, and ``AttributeError`` where Triton's source is not as
    known.
    """
    function = source.fn.fn
    return {
        "module": function.__module__,
        "kernel": function.__qualname__,
        "signature": {name: _encoded("signature", kind) for name, kind in source.signature.items()},
        "constants": _pairs("constants", source.constants),
        "attributes": _pairs("attributes", source.attrs),
        "options": {name: _encoded("options", value) for name, value in options.items()},
        "target": [target.backend, target.arch, target.warp_size],
    }


def compile_job(job: Any) -> str:
    """Compile a job into Triton's cache, or where cubins are kept, and return the name of the entry.

    No GPU is needed or touched. Raises :class:`UnknownJob`, and what compilers raise for what does not compile.
    """
    if isinstance(job, dict) and job.keys() == CUDA_FIELDS:
        return _compile_cuda(job)
    if not isinstance(job, dict) or job.keys() != FIELDS:
        raise UnknownJob(f"job={str(job)[:200]}: an object of {', '.join(sorted(FIELDS))} would do")
    kernel = _kernel(job["module"], job["kernel"])
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tilewise.kernels.building.kernel_keys import settle
    from tilewise.kernels.triton.own_cache import own_cache

    settle(kernel)
    try:
        signature = {name: _decoded(kind) for name, kind in job["signature"].items()}
        source = ASTSource(kernel, signature, _mapping(job["constants"]), _mapping(job["attributes"]))
        options = {name: _decoded(value) for name, value in job["options"].items()}
        target = GPUTarget(*job["target"])
        _enter(job["environment"])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnknownJob(f"a job of {job['kernel']} cannot be read: {error}") from error
    with own_cache():
        return str(triton.compile(source, target=target, options=options).hash)


def _compile_cuda(job: dict[str, Any]) -> str:
    """Compile a program in CUDA C++ and keep it. Raises :class:`UnknownJob`, and what the compiler raises."""
    text, architecture = job["cuda"], job["architecture"]
    if not isinstance(text, str) or not isinstance(architecture, str):
        raise UnknownJob("cuda, architecture: a program's text and the name of an architecture would do")
    from tilewise.kernels.cuda.nvrtc import compile_text

    try:
        _enter(job["environment"])
    except (AttributeError, TypeError) as error:
        raise UnknownJob(f"environment cannot be read: {error}") from error
    return compile_text(text, architecture)[1].name


def _enter(environment: dict[str, str]) -> None:
    """Make ``environment`` this process's: Triton reads its settings and the place of its cache from it."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def read_compiler() -> None:
    """Have Triton hash its own compiler for the keys of its cache, which takes as long as compiling a small kernel."""
    import triton.compiler

    assert triton.compiler
    with contextlib.suppress(ImportError):  # elsewhere in another version: the first kernel pays for it then
        from triton.runtime.cache import triton_key

        triton_key()


def _kernel(module: object, name: object) -> Any:
    """The kernel that a job names. Raises :class:`UnknownJob` unless it is one of :data:`PACKAGE`."""
    if not isinstance(module, str) or not module.startswith(f"{PACKAGE}."):
        raise UnknownJob(f"module={module!r}: a module of {PACKAGE} would do")
    parts = [*module.removeprefix(f"{PACKAGE}.").split("."), name]
    if not all(isinstance(part, str) and NAME.fullmatch(part) for part in parts):
        raise UnknownJob(f"module={module!r}, kernel={name!r}: names would do")
    import triton

    try:
        kernel = getattr(importlib.import_module(module), str(name))
    except (ImportError, AttributeError) as error:
        raise UnknownJob(f"there is no kernel {name} in {module}: {error}") from error
    if not isinstance(kernel, triton.JITFunction):
        raise UnknownJob(f"{name} of {module} is a {type(kernel).__name__}, not a Triton kernel")
    return kernel


def _pairs(field: str, values: Mapping[tuple[int, ...], Any]) -> list[Any]:
    """A mapping by paths as a list of pairs."""
    return [[list(path), _encoded(field, value)] for path, value in values.items()]


def _mapping(pairs: list[Any]) -> dict[tuple[int, ...], Any]:
    """The mapping that :func:`_pairs` wrote."""
    return {tuple(path): _decoded(value) for path, value in pairs}


def _encoded(field: str, value: Any) -> Any:
    """``value`` as JSON that :func:`_decoded` reads back as the very same. Raises ``TypeError`` naming ``field``."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return {"tuple": [_encoded(field, item) for item in value]}
    if type(value) is list:
        return [_encoded(field, item) for item in value]
    raise TypeError(f"{field} hold {value!r}, a {type(value).__name__}, which a job cannot hold")


def _decoded(value: Any) -> Any:
    """The value that :func:`_encoded` wrote."""
    if isinstance(value, dict):
        return tuple(_decoded(item) for item in value["tuple"])
    return [_decoded(item) for item in value] if isinstance(value, list) else value
