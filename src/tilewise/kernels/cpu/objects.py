"""Kernels' machine code on disk, which LLVM loads without Numba.

Importing Numba and telling it its own functions takes most of a second in every process, and is of use to one that
compiles alone. A file holds an ELF object as Numba's compiler left it, the name of the function that is called from
outside, and the names that it asks others for. Its own name tells apart the text of this package, the processor, and
the versions of Numba and LLVM.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import json
import os
import struct
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tilewise import cache
from tilewise.kernels import code_files

__all__ = ["Code", "address", "undefined"]

RUNTIME = ("numba_", "NRT_")
"""How names begin that Numba's own runtime has: our kernels ask for them where they report errors, which they have
none of."""
UNDEFINED_SECTION, SYMBOL_TABLE = 0, 2
SYMBOL_BYTES = 24


class Code(NamedTuple):
    """An object file, the name of its function, and the names it does not define; ``None`` where those are unknown."""

    code: bytes
    entry: str
    wanted: tuple[str, ...] | None


def address(name: str, make: Callable[[], Code]) -> int:
    """Where the function of the kernel ``name`` begins, of its file or, where there is none, as ``make`` compiles it.

    It stays there as long as the process lives. Warns where a file holds what is no object, and as
    :mod:`tilewise.kernels.code_files` does.
    """
    path = cache.kernel_dir() / "cpu" / f"{name}-{_machine()}.o"
    kept = code_files.load(path)
    if kept is not None:
        try:
            return _load(_unpacked(kept))
        except (RuntimeError, ValueError, KeyError) as error:
            warnings.warn(f"{path}: a compiled kernel cannot be read ({error})", RuntimeWarning, stacklevel=2)
    made = make()
    code_files.store(path, _packed(made))
    return _load(made)


def _packed(found: Code) -> bytes:
    return json.dumps([found.entry, found.wanted]).encode() + b"\n" + found.code


def _unpacked(kept: bytes) -> Code:
    head, _, code = kept.partition(b"\n")
    entry, wanted = json.loads(head)
    return Code(code, str(entry), None if wanted is None else tuple(map(str, wanted)))


@functools.cache
def _machine() -> str:
    """Of all that decides what a kernel is compiled to."""
    import llvmlite
    from llvmlite import binding

    here = Path(__file__).parent
    found = hashlib.sha256()
    for path in (*sorted(here.glob("*.py")), here.parent / "cuda" / "codelets.py"):
        found.update(path.read_bytes())
    settings = {name: value for name, value in os.environ.items() if name.startswith("NUMBA_")}
    versions = importlib.metadata.version("numba"), llvmlite.__version__, sys.version_info[:2]
    features = binding.get_host_cpu_features().flatten()
    told_apart = versions, binding.get_default_triple(), binding.get_host_cpu_name(), features, sorted(settings.items())
    found.update(repr(told_apart).encode())
    return found.hexdigest()[:24]


_engines: list[Any] = []
"""Hold the code of all kernels."""


def _load(found: Code) -> int:
    from llvmlite import binding

    _define(found.wanted)
    machine = binding.Target.from_default_triple().create_target_machine(codemodel="jitdefault")
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(found.code))
    engine.finalize_object()
    where = int(engine.get_function_address(found.entry))
    if not where:
        raise ValueError(f"has no function {found.entry}")
    _engines.append(engine)
    return where


def _define(wanted: tuple[str, ...] | None) -> None:
    """See that every name is defined. ``ValueError`` for one that is not."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    if wanted is None:  # then Numba's runtime must be there
        from numba.core.registry import cpu_target

        cpu_target.target_context.refresh()
        return
    for name in wanted:
        if binding.address_of_symbol(name) is None:
            function = _stop() if name.startswith(RUNTIME) else getattr(ctypes.pythonapi, name, None)
            if function is None:
                raise ValueError(f"nothing here defines {name}")
            binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)


@functools.cache
def _stop() -> Any:
    def stop() -> None:
        os.write(2, b"tilewise: a compiled kernel reports an error, which it cannot have\n")
        os.abort()

    return ctypes.CFUNCTYPE(None)(stop)


def undefined(code: bytes) -> tuple[str, ...] | None:
    """Names that a 64-bit little-endian ELF object does not define; ``None`` of any other kind of file."""
    if code[:6] != b"\x7fELF\x02\x01":
        return None
    (sections,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, sections + size * i) for i in range(count)]
    found = []
    for _, kind, _, _, offset, length, link, *_ in headers:
        if kind != SYMBOL_TABLE:
            continue
        names = headers[link][4]
        for place in range(offset + SYMBOL_BYTES, offset + length, SYMBOL_BYTES):
            name, _, _, section = struct.unpack_from("<IBBH", code, place)
            if section == UNDEFINED_SECTION:
                start = names + name
                found.append(code[start : code.index(b"\0", start)].decode())
    return tuple(found)
