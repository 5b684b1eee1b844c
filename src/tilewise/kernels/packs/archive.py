"""Packs as files: zip archives of known shape, read with bounds and checked before anything else sees their content."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

from tilewise.kernels.packs.manifest import (
    KERNELS,
    MANIFEST,
    MOST_BYTES,
    MOST_ENTRIES,
    MOST_MANIFEST,
    Entry,
    Manifest,
    PackError,
)
from tilewise.machine.files import replacing

__all__ = ["Pack", "has_kernels", "is_pack", "opened", "write"]

FIRST, END, LOCATOR = b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x07"
"""Signatures: of a zip's first file, its end, and what only archives of more than 4 GiB or 65535 files have."""
END_BYTES, LOCATOR_BYTES = 22, 20
MOST_DIRECTORY = (MOST_ENTRIES + 1) * 512
"""Most bytes of a directory: names are short."""
DATE = (1980, 1, 1, 0, 0, 0)
"""The date of every file in a pack, so that the same kernels make the same pack."""
DAMAGED = (
    zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OverflowError,
    struct.error, OSError,
)  # fmt: skip
"""What reading a damaged archive raises."""


def is_pack(path: Path) -> bool:
    """Whether a file begins as packs do. Raises ``OSError`` where it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(FIRST)) == FIRST


class Pack:
    """An open pack whose directory has been checked: it holds what :attr:`manifest` says, and nothing else."""

    def __init__(self, archive: zipfile.ZipFile, manifest: Manifest) -> None:
        self._archive, self.manifest = archive, manifest

    def content(self, entry: Entry) -> bytes:
        """The content of an entry, whose size and hash are as the manifest says. Raises :class:`PackError`."""
        data = _read(self._archive, entry.path, entry.size)
        if len(data) != entry.size or hashlib.sha256(data).hexdigest() != entry.sha256:
            raise PackError(f"{entry.path}: is not what the manifest says, it was damaged or changed on the way")
        return data


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Pack]:
    """The pack in a file. Raises :class:`PackError` naming the file, and ``OSError`` where it cannot be read."""
    with path.open("rb") as file:
        try:
            count = _count(file)
            with _archive(file) as archive:
                yield Pack(archive, _manifest(archive, count))
        except PackError as error:
            raise PackError(f"{path}: {error}") from error


@contextlib.contextmanager
def _archive(file: IO[bytes]) -> Iterator[zipfile.ZipFile]:
    """The archive in a file whose end was checked."""
    try:
        archive = zipfile.ZipFile(file)
    except DAMAGED as error:
        raise PackError(f"is no archive, or a damaged one ({error})") from error
    with archive:
        yield archive


def _count(file: IO[bytes]) -> int:
    """How many files the archive says it has, before a directory is read that may be of any length."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise PackError("is no regular file")
    if not END_BYTES < status.st_size <= MOST_BYTES:
        raise PackError(f"has {status.st_size} bytes; a pack has more than {END_BYTES} and at most {MOST_BYTES}")
    file.seek(max(0, status.st_size - END_BYTES - LOCATOR_BYTES))
    tail = file.read(LOCATOR_BYTES + END_BYTES)
    end = tail[-END_BYTES:]
    signature, disk, first, here, count, size, offset, comment = struct.unpack("<4s4H2LH", end)
    whole = (disk, first, comment) == (0, 0, 0) and here == count and offset + size == status.st_size - END_BYTES
    if signature != END or not whole:
        raise PackError("does not end as a pack does: it is none, or it was cut short")
    if tail.startswith(LOCATOR) or not 0 < count <= MOST_ENTRIES + 1 or size > MOST_DIRECTORY:
        raise PackError(f"has {count} files in a directory of {size} bytes; {MOST_ENTRIES} files would do")
    file.seek(0)
    return int(count)


def _manifest(archive: zipfile.ZipFile, count: int) -> Manifest:
    """The manifest, after everything in the directory was compared with it. Raises :class:`PackError`."""
    members = archive.infolist()
    names = {member.filename: member for member in members}
    if len(members) != count or len(names) != count:
        raise PackError("a name is there more than once")
    if MANIFEST not in names:
        raise PackError(f"has no {MANIFEST}; what 'tilewise kernels build' wrote would do")
    for member in members:
        _check_member(member)
    size = names[MANIFEST].file_size
    if size > MOST_MANIFEST:
        raise PackError(f"{MANIFEST}: has {size} bytes; at most {MOST_MANIFEST} would do")
    manifest = Manifest.from_bytes(_read(archive, MANIFEST, size))
    told = {entry.path: entry.size for entry in manifest.entries}
    for name, member in names.items():
        if name != MANIFEST and told.get(name) != member.file_size:
            raise PackError(f"{name!r:.200}: {member.file_size} bytes, of which the manifest says nothing or otherwise")
    if missing := sorted(told.keys() - names.keys()):
        raise PackError(f"{missing[0]!r:.200}: the manifest names it, and it is missing")
    return manifest


def _check_member(member: zipfile.ZipInfo) -> None:
    """Raise :class:`PackError` for anything but a plain file."""
    mode = member.external_attr >> 16
    if member.filename.endswith("/") or (stat.S_IFMT(mode) and not stat.S_ISREG(mode)):
        raise PackError(f"{member.filename!r:.200}: is no regular file")
    if member.flag_bits or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise PackError(f"{member.filename!r:.200}: is encrypted, or compressed in another way than packs are")


def _read(archive: zipfile.ZipFile, name: str, size: int) -> bytes:
    """At most ``size`` bytes of a member and one more, which tells that it has more. Raises :class:`PackError`."""
    try:
        with archive.open(name) as member:
            return member.read(size + 1)
    except DAMAGED as error:
        raise PackError(f"{name}: is damaged ({error})") from error


def write(path: Path, head: Manifest, contents: Iterable[tuple[Entry, bytes]]) -> Manifest:
    """Write a pack, whole or not at all, and return its manifest: ``head`` with all entries that it got.

    Sizes and hashes of entries are worked out here. Of two of one path the first is taken. Raises ``OSError`` where the
    file cannot be written, and :class:`PackError` where there are more entries or bytes than a pack may have, or where
    a device lies in its place.
    """
    entries: dict[str, Entry] = {}
    try:
        with (
            replacing(path, PackError) as partial,
            zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, allowZip64=False) as archive,
        ):
            for entry, content in contents:
                if entry.path not in entries:
                    whole = replace(entry, size=len(content), sha256=hashlib.sha256(content).hexdigest())
                    entries[entry.path] = whole
                    _add(archive, entry.path, content)
            manifest = replace(head, entries=tuple(sorted(entries.values())))
            data = manifest.to_bytes()
            Manifest.from_bytes(data)  # what cannot be read again is not worth writing
            _add(archive, MANIFEST, data)
    except zipfile.LargeZipFile as error:
        raise PackError(f"{path}: {error}; fewer networks in a pack would do") from error
    return manifest


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    """Add a file that says nothing of its writer."""
    member = zipfile.ZipInfo(name, DATE)
    member.compress_type = zipfile.ZIP_DEFLATED
    member.external_attr = (stat.S_IFREG | 0o600) << 16
    archive.writestr(member, content)


def has_kernels(manifest: Manifest) -> bool:
    """Whether a pack holds code, and not wisdom alone."""
    return any(entry.kind in (*KERNELS, "native") for entry in manifest.entries)
