"""What this machine is to a pack: its processor and GPUs, its compilers, and the sources of its kernels."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import struct
import sys
from pathlib import Path

import torch

from tilewise.kernels.building import objects
from tilewise.kernels.cuda import launch
from tilewise.kernels.native import autograd, building, extension, programs
from tilewise.kernels.native.extension import Extension
from tilewise.kernels.packs.manifest import Manifest
from tilewise.version import VERSION

__all__ = [
    "architecture_of", "architectures", "cpu_target", "features", "head", "native_modules", "native_target", "sources",
    "versions",
]  # fmt: skip

PACKAGES = ("llvmlite", "numba", "torch", "triton")
FOLDERS = ("cpu", "cuda", "native", "triton")
FILES = ("codelets.py", "cook_toom.py")
SUFFIXES = (".c", ".cu", ".h", ".py")
"""Where the text of kernels lies, below ``kernels/``."""
ELF, MACHINE_CUDA = b"\x7fELF\x02\x01", 190
OLDEST, NEWEST = 50, 130
"""Compute capabilities, times ten, that a cubin is taken to be for."""


def head() -> Manifest:
    """The manifest of a pack that is made here, without entries."""
    return Manifest(VERSION, sources(), versions(), ())


@functools.cache
def sources() -> str:
    """A hash of the text of all kernels: others would not look for what these compiled."""
    kernels = Path(__file__).parents[1]
    found = [path for folder in FOLDERS for path in (kernels / folder).rglob("*") if path.suffix in SUFFIXES]
    digest = hashlib.sha256()
    for path in sorted([*found, *(kernels / name for name in FILES)]):
        digest.update(f"{path.relative_to(kernels).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of what compiles kernels here, by name; what is not installed is left out."""
    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if compiler := nvrtc():
        found["nvrtc"] = compiler
    if importlib.util.find_spec("llvmlite") is not None:
        from llvmlite import binding

        found["processor"] = str(binding.get_host_cpu_name())
        found["features"] = " ".join(features())
    return found


@functools.cache
def nvrtc() -> str:
    """The version and options of the compiler of CUDA C++; empty where there is none."""
    if launch.unavailable():
        return ""
    try:
        return launch.compiler()
    except Exception:  # cuda.core is there, its compiler's library is not
        return ""


def cpu_target() -> str:
    """What CPU kernels are compiled for here; empty where llvmlite, which tells it, is not installed."""
    if importlib.util.find_spec("llvmlite") is None or importlib.util.find_spec("numba") is None:
        return ""
    return f"cpu:{objects.machine_key()}"


def features() -> tuple[str, ...]:
    """The features of this processor that compiled code may use, as LLVM names them. Needs llvmlite."""
    from llvmlite import binding

    return tuple(sorted(name for name, there in binding.get_host_cpu_features().items() if there))


@functools.cache
def native_modules() -> dict[str, Extension]:
    """The modules in C and C++ by name: those that launch kernels for GPUs, and the one that runs programs on CPUs."""
    return {each.EXTENSION.name: each.EXTENSION for each in (autograd, building, programs)}


def native_target(name: str) -> str:
    """What the module of this name is compiled for here. Raises ``KeyError`` where there is no such module."""
    return f"native:{extension.file_name(native_modules()[name]).rpartition('-')[2].partition('.')[0]}"


def architectures() -> tuple[str, ...]:
    """The architectures of the GPUs here, such as ``sm_90``, each once."""
    if not torch.cuda.is_available():
        return ()
    found = (torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
    return tuple(dict.fromkeys(f"sm_{major}{minor}" for major, minor in found))


def architecture_of(code: bytes) -> str:
    """The architecture that a cubin is for, such as ``sm_90``; empty for anything else.

    It stands in the flags of its ELF header: in the lowest byte, or from CUDA 13 on in the next.
    """
    if len(code) < 64 or code[:6] != ELF or struct.unpack_from("<H", code, 18) != (MACHINE_CUDA,):
        return ""
    (flags,) = struct.unpack_from("<I", code, 48)
    capability = next((n for n in (flags & 0xFF, flags >> 8 & 0xFF) if OLDEST <= n <= NEWEST), 0)
    return f"sm_{capability}" if capability else ""
