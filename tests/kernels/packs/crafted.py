"""Packs of crafted kernels: small, and whole as far as anything looks before code is loaded."""

from __future__ import annotations

import base64
import hashlib
import json
import stat
import struct
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilewise.kernels.building import code_files
from tilewise.kernels.packs import here
from tilewise.kernels.packs.archive import write
from tilewise.kernels.packs.manifest import Entry, Manifest

__all__ = ["Caches", "cubin", "group", "linked", "pack_of", "raw_pack", "triton_files"]


def cubin(capability: int = 90, body: bytes = b"code") -> bytes:
    """As much of a cubin as tells its architecture."""
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<H", header, 18, 190)
    struct.pack_into("<I", header, 48, capability)
    return bytes(header) + body


def triton_files(name: str = "kernel", capability: int = 90, body: bytes = b"code") -> list[tuple[Entry, bytes]]:
    """The two files of an entry of Triton's cache."""
    key = hashlib.sha256(name.encode()).hexdigest()
    folder = base64.b32encode(bytes.fromhex(key)).decode().rstrip("=")
    target = {"backend": "cuda", "arch": capability, "warp_size": 32}
    metadata = json.dumps({"hash": key, "name": name, "target": target, "shared": 0}).encode()
    files = {"cubin": cubin(capability, body), "json": metadata}
    named = ((f"triton/{folder}/{name}.{part}", content) for part, content in files.items())
    return [(Entry("triton", f"sm_{capability}", path, 0, ""), content) for path, content in named]


def cpu_file(name: str = "moves_8", body: bytes = b"code") -> tuple[Entry, bytes]:
    """The content of a CPU kernel's file."""
    target = here.cpu_target()
    path = f"cpu/{name}-{target.partition(':')[2]}.o"
    return Entry("cpu", target, path, 0, ""), b'["entry", []]\n\x7fELF' + body


def native_file(body: bytes = b"code", name: str = "launches") -> tuple[Entry, bytes]:
    """The content of the file of a native module."""
    target = here.native_target(name)
    return Entry("native", target, f"native/{name}-{target.partition(':')[2]}.so", 0, ""), b"\x7fELF" + body


def contents() -> list[tuple[Entry, bytes]]:
    """Kernels of three kinds."""
    return [cpu_file(), cpu_file("rows_8", b"more"), native_file(), *triton_files()]


def pack_of(path: Path, files: Iterable[tuple[Entry, bytes]] | None = None, **changed: Any) -> Manifest:
    """Write a pack, of :func:`contents` if nothing else, with what its manifest says of its maker ``changed``."""
    return write(path, replace(here.head(), **changed), contents() if files is None else files)


def raw_pack(
    path: Path, members: Iterable[tuple[str | zipfile.ZipInfo, bytes]], manifest: bytes | None = None, **options: Any
) -> None:
    """An archive of any members, with a manifest that is right of them unless another is given."""
    members = list(members)
    if manifest is None:
        entries = []
        for name, content in members:
            text = name if isinstance(name, str) else name.filename
            kind = text.partition("/")[0]
            target = {"cpu": here.cpu_target(), "native": here.native_target("launches")}.get(kind, "sm_90")
            digest = hashlib.sha256(content).hexdigest()
            entries.append(Entry(kind, target, text, len(content), digest))
        manifest = replace(here.head(), entries=tuple(entries)).to_bytes()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, **options) as archive:
        for name, content in members:
            archive.writestr(name, content)
        archive.writestr("manifest.json", manifest)


def linked(name: str) -> zipfile.ZipInfo:
    """A member that says it is a symbolic link."""
    member = zipfile.ZipInfo(name)
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    return member


class Caches:
    """Empty caches of this process's own, below ``folder``, on a machine without a GPU."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.kernels, self.triton = folder, folder / "kernels", folder / "triton"
        patch.setattr("tilewise.machine.cache.kernel_dir", lambda: self.kernels)
        patch.setattr("tilewise.kernels.packs.here.architectures", lambda: ())
        patch.setenv("TRITON_CACHE_DIR", str(self.triton))

    def files(self) -> dict[str, bytes]:
        """All files by name as a pack has them, with the content that a pack has; Triton's lists are left out."""
        found = {}
        for top, prefix in ((self.kernels, ""), (self.triton, "triton/")):
            for path in top.rglob("*"):
                if path.is_file() and not path.name.startswith("__grp__"):
                    name = prefix + path.relative_to(top).as_posix()
                    content = path.read_bytes() if prefix else code_files.load(path)
                    found[name] = b"" if content is None else content
        return found


def group(caches: Caches, name: str = "kernel") -> dict[str, str] | None:
    """What Triton finds of an entry."""
    from tilewise.kernels.triton.own_cache import OwnCache

    (cubin_file, _) = triton_files(name)
    return OwnCache(cubin_file[0].path.split("/")[1]).get_group(f"{name}.json")
