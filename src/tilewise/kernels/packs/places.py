"""Where compiled kernels lie on this machine, how they are read for a pack, and how they are written from one.

Kernels for CPUs, those in CUDA C++ and the modules that launch them are files of the cache directory with a checksum
each. A pack has their content without it. What Triton keeps has a place of its own: see ``triton_place``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from tilewise.kernels.building import code_files
from tilewise.kernels.packs import here
from tilewise.kernels.packs.manifest import NAMES, Entry, Manifest, PackError
from tilewise.machine import cache, trusted

__all__ = ["CodeFiles", "Place", "code_places", "other_architecture", "other_version"]

ELF = b"\x7fELF"
MOST_FEATURES = 4
"""Features of a processor that an error names."""


class Place(Protocol):
    """Where kernels of one kind are kept."""

    kind: str

    def names(self) -> Iterator[str]:
        """The names that a pack gives to what is kept here. What is no kernel of this version's is left out."""

    def read(self, name: str) -> tuple[Entry, bytes] | None:
        """An entry, whose size and hash are still to be worked out, and its content; ``None`` where it is not whole."""

    def obstacle(self, entry: Entry, manifest: Manifest, architectures: Sequence[str]) -> str:
        """Why an entry of a pack is of no use here; empty where it is.

        ``architectures`` are those of the GPUs that kernels are wanted for.
        """

    def check(self, entry: Entry, content: bytes) -> None:
        """Raise :class:`PackError` where the content is not of the kind that the entry says. It is not loaded."""

    def store(self, entries: Sequence[tuple[Entry, bytes]]) -> bool:
        """Write the files of one kernel; whether anything was to be written.

        Raises ``OSError`` and :class:`~tilewise.machine.trusted.Untrusted`.
        """

    def folder(self) -> Path:
        """The folder that they are in."""


class CodeFiles:
    """A folder of files that :mod:`tilewise.kernels.building.code_files` reads and writes."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def folder(self) -> Path:
        """The folder that they are in."""
        return cache.kernel_dir() / self.kind

    def names(self) -> Iterator[str]:
        """The names of files there, as a pack has them."""
        pattern = re.compile(NAMES[self.kind], re.ASCII)
        for path in sorted(self.folder().glob("*")):
            if pattern.fullmatch(name := f"{self.kind}/{path.name}"):
                yield name

    def read(self, name: str) -> tuple[Entry, bytes] | None:
        """As :meth:`Place.read`."""
        code = code_files.load(cache.kernel_dir() / name)
        target = "" if code is None else self._target(name, code)
        return None if code is None or not target else (Entry(self.kind, target, name, 0, ""), code)

    def _target(self, name: str, code: bytes) -> str:
        """What a file is for; empty for what is not of this machine and version."""
        if self.kind == "cuda":
            return here.architecture_of(code)
        target = here.cpu_target() if self.kind == "cpu" else here.native_target(_module(name))
        return target if f"-{target.partition(':')[2]}." in name else ""

    def obstacle(self, entry: Entry, manifest: Manifest, architectures: Sequence[str]) -> str:
        """As :meth:`Place.obstacle`."""
        if self.kind == "cpu":
            names: tuple[str, ...] = ("processor", "features", "numba", "llvmlite", "python")
            return _unlike("kernels for a CPU are", entry.target, here.cpu_target(), manifest, names)
        if self.kind == "native":
            module = here.native_modules()[_module(entry.path)]
            names = ("python", "torch") if module.uses_torch else ("python",)
            target = here.native_target(module.name)
            return _unlike(f"the module {module.name} is", entry.target, target, manifest, names)
        if entry.target not in architectures:
            return other_architecture(entry.target, architectures)
        if not here.nvrtc():
            return "kernels in CUDA C++ need cuda-core and NVRTC: pip install 'tilewise[gpu]' would do"
        return other_version("nvrtc", manifest)

    def check(self, entry: Entry, content: bytes) -> None:
        """As :meth:`Place.check`."""
        code = content.partition(b"\n")[2] if self.kind == "cpu" else content
        if not code.startswith(ELF):
            raise PackError(f"{entry.path}: holds no machine code")
        if self.kind == "cuda" and here.architecture_of(code) not in ("", entry.target):
            raise PackError(f"{entry.path}: is for {here.architecture_of(code)}, and says {entry.target}")
        if self.kind != "cuda" and f"-{entry.target.partition(':')[2]}." not in entry.path:
            raise PackError(f"{entry.path}: its name is not one for {entry.target}")

    def store(self, entries: Sequence[tuple[Entry, bytes]]) -> bool:
        """As :meth:`Place.store`."""
        written = False
        for entry, content in entries:
            path = cache.kernel_dir() / entry.path
            if not _is_kept(path, content):
                code_files.write(path, content)
                written = True
        return written


def _is_kept(path: Path, content: bytes) -> bool:
    """Whether a file has this content already. One that cannot be trusted has not."""
    try:
        return trusted.read(path) == code_files.CHECK(content).digest() + content
    except (OSError, trusted.Untrusted):
        return False


@functools.cache
def code_places() -> tuple[CodeFiles, ...]:
    """The places of files with checksums."""
    return tuple(CodeFiles(kind) for kind in ("cpu", "cuda", "native"))


def _unlike(what: str, target: str, target_here: str, manifest: Manifest, names: Sequence[str]) -> str:
    """Why what was compiled for ``target`` is of no use here: the versions of ``names`` that differ, if they tell."""
    if target == target_here:
        return ""
    own = here.versions()
    pairs = {n: (manifest.versions.get(n, "unknown"), own.get(n, "none")) for n in names}
    told = [
        _features_unlike(*pair) if n == "features" else f"{n} {pair[0]}, here {pair[1]}"
        for n, pair in pairs.items()
        if pair[0] != pair[1] and (n != "features" or (n in manifest.versions and n in own))
    ]
    return f"{what} for another machine ({'; '.join(told) or 'another C library or setting'})"


def _features_unlike(theirs: str, own: str) -> str:
    """Which features of a processor are there and not here, or else here and not there: a few of them by name."""
    there, here_ = set(theirs.split()), set(own.split())
    missing = sorted(there - here_)
    named = missing or sorted(here_ - there)
    text = ", ".join(named[:MOST_FEATURES]) + f" and {len(named) - MOST_FEATURES} more" * (len(named) > MOST_FEATURES)
    return f"its processor has {text}, this one has not" if missing else f"this processor has {text}, its has not"


def _module(name: str) -> str:
    """The name of the native module in a file called ``name``, such as ``native/program_call-0123.so``."""
    return name.rpartition("/")[2].rpartition("-")[0]


def other_architecture(target: str, architectures: Sequence[str]) -> str:
    """Why kernels for the GPU ``target`` are of no use here."""
    if architectures:
        return f"kernels are for {target}, the GPU here is {', '.join(architectures)}"
    return f"kernels are for {target}, and torch sees no GPU here; --arch {target} would take them nevertheless"


def other_version(name: str, manifest: Manifest) -> str:
    """Why what the package ``name`` compiled is of no use here; empty where it is the same version."""
    theirs, own = manifest.versions.get(name, "unknown"), here.versions().get(name)
    if own is None:
        return f"needs the package {name}: pip install 'tilewise[gpu]' would do"
    return "" if theirs == own else f"compiled by {name} {theirs}, here is {own}, which would not look for it"
