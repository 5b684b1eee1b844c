"""CPU kernels' machine code on disk, which LLVM loads without Numba.

Importing Numba takes most of a second in every process and is useful only to one that compiles. A file holds an ELF
object as Numba's compiler left it, the name of the function that is called from outside, and the names that it expects
others to define. The file's own name tells apart the source text of this package, the processor, and the versions of
Numba and LLVM.
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

from tilewise.kernels.building import code_files
from tilewise.kernels.building.kept import refuse
from tilewise.kernels.building.noted import note
from tilewise.machine import cache

__all__ = ["Code", "address", "machine_key", "made_of", "undefined"]

RUNTIME = ("numba_", "NRT_")
"""Prefixes of names that Numba's runtime defines. Our kernels refer to them where they would report errors, which they
do not have."""
UNDEFINED_SECTION, SYMBOL_TABLE = 0, 2
SYMBOL_BYTES = 24


class Code(NamedTuple):
    """An object file, the name of its function, and the names that it does not define.

    ``wanted`` is ``None`` where these names are not known.
    """

    code: bytes
    entry: str
    wanted: tuple[str, ...] | None


def address(name: str, make: Callable[[], Code]) -> int:
    """The address of kernel ``name``, loaded from its file, or compiled by ``make`` where there is none.

    It stays valid as long as the process lives. Within :func:`~tilewise.kernels.building.kept.kept_only` nothing is
    compiled. Warns where a file holds no valid object, and as
    :mod:`tilewise.kernels.building.code_files` does.
    """
    path = cache.kernel_dir() / "cpu" / f"{name}-{machine_key()}.o"
    note(f"cpu/{path.name}")
    stored = code_files.load(path)
    if stored is not None:
        try:
            return _load(_unpacked(stored))
        except (RuntimeError, ValueError, KeyError) as error:
            warnings.warn(f"{path}: a compiled kernel cannot be read ({error})", RuntimeWarning, stacklevel=2)
    refuse(name)
    compiled = make()
    code_files.store(path, _packed(compiled))
    return _load(compiled)


def _packed(compiled: Code) -> bytes:
    """The content of a file."""
    return json.dumps([compiled.entry, compiled.wanted]).encode() + b"\n" + compiled.code


def _unpacked(stored: bytes) -> Code:
    """The code in a file. Raises ``ValueError`` where there is none."""
    head, _, code = stored.partition(b"\n")
    entry, wanted = json.loads(head)
    return Code(code, str(entry), None if wanted is None else tuple(map(str, wanted)))


def made_of() -> list[Path]:
    """The files from whose text kernels are made, in a fixed order."""
    kernels = Path(__file__).parents[1]
    return [*sorted((kernels / "cpu").rglob("*.py")), kernels / "codelets.py", kernels / "cook_toom.py"]


@functools.cache
def machine_key() -> str:
    """A hash of everything that a kernel's code depends on: this package's text, processor, versions, settings."""
    import llvmlite
    from llvmlite import binding

    digest = hashlib.sha256()
    for path in made_of():
        digest.update(path.read_bytes())
    settings = {name: value for name, value in os.environ.items() if name.startswith("NUMBA_")}
    versions = importlib.metadata.version("numba"), llvmlite.__version__, sys.version_info[:2]
    features = binding.get_host_cpu_features().flatten()
    told_apart = versions, binding.get_default_triple(), binding.get_host_cpu_name(), features, sorted(settings.items())
    digest.update(repr(told_apart).encode())
    return digest.hexdigest()[:24]


_engines: list[Any] = []
"""Engines that hold the code of all loaded kernels."""


def _load(compiled: Code) -> int:
    """Load an object file and return the address of its function. Raises ``ValueError`` or ``RuntimeError``."""
    from llvmlite import binding

    _define(compiled.wanted)
    machine = binding.Target.from_default_triple().create_target_machine(codemodel="jitdefault")
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(compiled.code))
    engine.finalize_object()
    where = int(engine.get_function_address(compiled.entry))
    if not where:
        raise ValueError(f"has no function {compiled.entry}")
    _engines.append(engine)
    return where


def _define(wanted: tuple[str, ...] | None) -> None:
    """Define all names that an object file expects. Raises ``ValueError`` for an unknown one."""
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
    """A C function that ends the process, in place of Numba's functions that report errors."""

    def stop() -> None:
        """Say what happened on stderr and end the process."""
        os.write(2, b"tilewise: a compiled kernel reports an error, which it cannot have\n")
        os.abort()

    return ctypes.CFUNCTYPE(None)(stop)


def undefined(code: bytes) -> tuple[str, ...] | None:
    """Names that a 64-bit little-endian ELF object does not define; ``None`` for any other kind of file."""
    if code[:6] != b"\x7fELF\x02\x01":
        return None
    (sections,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, sections + size * i) for i in range(count)]
    names_missing = []
    for _, kind, _, _, offset, length, link, *_ in headers:
        if kind != SYMBOL_TABLE:
            continue
        names = headers[link][4]
        for place in range(offset + SYMBOL_BYTES, offset + length, SYMBOL_BYTES):
            name, _, _, section = struct.unpack_from("<IBBH", code, place)
            if section == UNDEFINED_SECTION:
                start = names + name
                names_missing.append(code[start : code.index(b"\0", start)].decode())
    return tuple(names_missing)
