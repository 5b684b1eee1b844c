"""Where wisdom is kept, and on what kind of file system."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from tilewise.machine.cache import VARIABLE, cache_dir

__all__ = ["VARIABLE", "cache_dir", "default_path", "filesystem_of", "is_network", "on_network"]

NETWORK_FILESYSTEMS = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "drvfs",
        "fuse",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
        "smbfs",
        "vboxsf",
        "virtiofs",
        "wekafs",
    ]
)
"""Types of file systems that several machines may share."""


def default_path() -> Path:
    """The user's own store: ``wisdom.sqlite3`` in :func:`cache_dir`."""
    return cache_dir() / "wisdom.sqlite3"


@functools.lru_cache(maxsize=64)
def on_network(directory: Path) -> bool:
    """Whether ``directory`` may be shared with other machines, where SQLite's WAL cannot work.

    WAL keeps its index in memory that all users of the file share, which two machines do not have.
    Only Linux tells; elsewhere the answer is no, and SQLite's own check is all there is.
    """
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return False
    return is_network(filesystem_of(directory, mounts))


def is_network(filesystem: str) -> bool:
    """Whether file systems of this type are shared between machines; any FUSE one may be."""
    return filesystem.split(".", 1)[0] in NETWORK_FILESYSTEMS


def filesystem_of(directory: Path, mounts: str) -> str:
    """Type of the file system under ``directory`` in the text of ``/proc/self/mountinfo``."""
    real = os.path.realpath(directory)
    best, kind = -1, ""
    for line in mounts.splitlines():
        mount, separator, source = line.partition(" - ")
        fields = mount.split()
        if not separator or len(fields) < 5:
            continue
        point = _unescape(fields[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # The last of equally long mount points lies on top of the others.
        if inside and len(point) >= best:
            best, kind = len(point), source.split()[0]
    return kind


def _unescape(field: str) -> str:
    """A path as ``/proc/self/mountinfo`` writes it, with its escapes resolved."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field
