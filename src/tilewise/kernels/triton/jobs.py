"""What one compilation by Triton takes, as plain JSON: told by the process that wants it, done by any other.

A kernel is named by its module and its own name, never sent. Both sides are Triton's own: what is told is the source
that its launcher made, and what is done with it is :func:`triton.compile`, so that the entry of Triton's cache on disk
is the one that the launcher looks for.
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
"""Kernels come from modules of this package alone."""
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
FIELDS = frozenset({"module", "kernel", "signature", "constants", "attributes", "options", "target", "environment"})


class UnknownJob(ValueError):
    """A job that is not one: the message names what is wrong with it."""


def describe(source: Any, target: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The job of ``triton.compile(source, target, options)``, all but its ``environment``: the variables it runs in.

    Raises ``TypeError`` for what a job cannot hold and ``AttributeError`` where Triton's source is another than known.
    """
    function = source.fn.fn
    return {
        "module": function.__module__,
        "kernel": function.__qualname__,
        "signature": {name: _told("signature", kind) for name, kind in source.signature.items()},
        "constants": _pairs("constants", source.constants),
        "attributes": _pairs("attributes", source.attrs),
        "options": {name: _told("options", value) for name, value in options.items()},
        "target": [target.backend, target.arch, target.warp_size],
    }


def compile_job(job: Any) -> str:
    """Compile into Triton's cache; the hash that names the entry. No GPU is needed, and none is touched.

    Raises :class:`UnknownJob`, and what Triton raises for a kernel that does not compile.
    """
    if not isinstance(job, dict) or job.keys() != FIELDS:
        raise UnknownJob(f"job={str(job)[:200]}: an object of {', '.join(sorted(FIELDS))} would do")
    kernel = _kernel(job["module"], job["kernel"])
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tilewise.kernels.triton.own_cache import own_cache

    try:
        signature = {name: _meant(kind) for name, kind in job["signature"].items()}
        source = ASTSource(kernel, signature, _mapping(job["constants"]), _mapping(job["attributes"]))
        options = {name: _meant(value) for name, value in job["options"].items()}
        target = GPUTarget(*job["target"])
        _enter(job["environment"])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnknownJob(f"a job of {job['kernel']} cannot be read: {error}") from error
    with own_cache():
        return str(triton.compile(source, target=target, options=options).hash)


def _enter(environment: dict[str, str]) -> None:
    """Triton asks for its settings, and for the place of its cache, whenever it compiles."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def read_compiler() -> None:
    """Have Triton's compiler read itself for the keys of its cache, as long a work as compiling a small kernel."""
    import triton.compiler

    assert triton.compiler
    with contextlib.suppress(ImportError):  # elsewhere in another version: the first kernel pays for it then
        from triton.runtime.cache import triton_key

        triton_key()


def _kernel(module: object, name: object) -> Any:
    if not isinstance(module, str) or not module.startswith(f"{PACKAGE}."):
        raise UnknownJob(f"module={module!r}: a module of {PACKAGE} would do")
    parts = [*module.removeprefix(f"{PACKAGE}.").split("."), name]
    if not all(isinstance(part, str) and NAME.fullmatch(part) for part in parts):
        raise UnknownJob(f"module={module!r}, kernel={name!r}: names would do")
    import triton

    try:
        found = getattr(importlib.import_module(module), str(name))
    except (ImportError, AttributeError) as error:
        raise UnknownJob(f"there is no kernel {name} in {module}: {error}") from error
    if not isinstance(found, triton.JITFunction):
        raise UnknownJob(f"{name} of {module} is a {type(found).__name__}, not a Triton kernel")
    return found


def _pairs(what: str, values: Mapping[tuple[int, ...], Any]) -> list[Any]:
    return [[list(path), _told(what, value)] for path, value in values.items()]


def _mapping(pairs: list[Any]) -> dict[tuple[int, ...], Any]:
    return {tuple(path): _meant(value) for path, value in pairs}


def _told(what: str, value: Any) -> Any:
    """``value`` as JSON that :func:`_meant` reads back as the very same."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return {"tuple": [_told(what, item) for item in value]}
    if type(value) is list:
        return [_told(what, item) for item in value]
    raise TypeError(f"{what} hold {value!r}, a {type(value).__name__}, which a job cannot hold")


def _meant(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(_meant(item) for item in value["tuple"])
    return [_meant(item) for item in value] if isinstance(value, list) else value
