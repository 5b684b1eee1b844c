"""Files that a process runs: read and written only where nobody but their owner may change them.

What is read here is run as machine code, so it must come from this user or from root. A file is accepted when it is a
regular file that belongs to either and that nobody else may write, and all folders on the way to it are accepted in the
same way. Write permission for the group counts as permission for everybody, whoever is in the group; an access control
list shows as that too. A folder in which everybody may write but only owners may rename (sticky, as ``/tmp``) is
accepted on the way. Symbolic links are followed, and their targets' folders are checked likewise.

Every name is looked up in the open folder that was checked before it, and a file is checked once it is open, so that
nothing can be put in its place in between.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Untrusted", "make_folders", "read", "require", "require_file", "write"]

FOLDER, FILE = 0o700, 0o600
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
MOST_LINKS = 40
"""Symbolic links that are followed at most."""
PASS = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
"""How folders are opened on the way: without asking for permission to list them."""
CLOSED = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
WAITING = getattr(os, "O_NONBLOCK", 0)
"""Keeps the opening of a pipe from waiting for its other end."""


class Untrusted(Exception):
    """Somebody else may have written a file, or may yet. The message says which one and what would help.

    ``place`` is the file or folder at fault.
    """

    def __init__(self, place: str, reason: str, remedy: str) -> None:
        super().__init__(f"{place} {reason}; {remedy} would do")
        self.place = place


def read(path: Path) -> bytes:
    """The content of a file. Raises ``FileNotFoundError``, other kinds of ``OSError``, and :class:`Untrusted`."""
    with _looked_up(path) as (folder, name):
        descriptor = os.open(name, os.O_RDONLY | WAITING | CLOSED, dir_fd=folder)
        try:
            _check_file(os.fstat(descriptor), str(path))
            with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
                return file.readall()
        finally:
            os.close(descriptor)


def require_file(path: Path) -> None:
    """Check a file as :func:`read` does and raise the same, without reading it."""
    with _looked_up(path) as (folder, name):
        _check_file(os.stat(name, dir_fd=folder, follow_symlinks=False), str(path))


def write(path: Path, content: bytes) -> None:
    """Write a file in one piece, with mode 0600, in folders made with mode 0700, whatever the umask is.

    Raises ``OSError`` where it cannot be written, and :class:`Untrusted` where others may change the folder.
    """
    with _folder(path.parent, make=True) as folder:
        partial = f".{path.name[:32]}.{secrets.token_hex(8)}"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | CLOSED, FILE, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, FILE)
                file.write(content)
            os.replace(partial, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial, dir_fd=folder)
            raise


def require(path: Path, *, make: bool = False) -> None:
    """Raise :class:`Untrusted` for a folder that others may write or rename, ``OSError`` where there is none.

    With ``make`` it is made where there is none.
    """
    with _folder(path, make=make):
        pass


def make_folders(path: Path) -> None:
    """Make a folder and those above it, each with mode 0700 where there is none. Raises ``OSError``."""
    if not path.is_dir():
        if path.parent != path:
            make_folders(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(FOLDER)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "is no folder", str(path))


@contextlib.contextmanager
def _folder(path: Path, *, make: bool) -> Iterator[int]:
    """The folder at ``path``, checked and open, as a file descriptor."""
    with _looked_up(path, ".", make=make) as (folder, _):
        yield folder


@contextlib.contextmanager
def _looked_up(path: Path, *more: str, make: bool = False) -> Iterator[tuple[int, str]]:
    """The open folder in which ``path`` lies once links are followed, and the file's name there."""
    if not path.is_absolute():
        raise FileNotFoundError(errno.ENOENT, "no absolute path", str(path))
    if not hasattr(os, "geteuid") or os.open not in os.supports_dir_fd:
        raise Untrusted(str(path), "cannot be asked on this system whose it is", "Linux")
    walk = _Walk(make)
    try:
        name = walk.follow([*path.parts[1:], *more])
        yield walk.open, name
    finally:
        walk.close()


class _Walk:
    """Goes down a path folder by folder, checking each, with the last one open."""

    def __init__(self, make: bool) -> None:
        self._make, self._links = make, 0
        self.open, self._place = -1, ""

    def follow(self, parts: list[str]) -> str:
        """Open the folder that the path ``parts``, from the root, leads to, and return the last name in it."""
        self._enter("/", None)
        rest = parts[::-1]
        while True:
            name = rest.pop()
            target = None if name in (".", "..") else self._link(name)
            if target is not None:
                if target.startswith("/"):
                    self._enter("/", None)
                rest += [part for part in reversed(target.split("/")) if part not in ("", ".")]
                rest = rest or ["."]
            elif rest or name == "..":
                self._enter(name, self.open)
                rest = rest or ["."]
            else:
                _check(os.fstat(self.open), self._place)
                return name

    def _link(self, name: str) -> str | None:
        """The target of the symbolic link ``name``; ``None`` where it is no link or is not there."""
        try:
            status = os.stat(name, dir_fd=self.open, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISLNK(status.st_mode):
            return None
        self._links += 1
        if self._links > MOST_LINKS:
            raise OSError(errno.ELOOP, "too many symbolic links", self._below(name))
        _check_owner(status, self._below(name))
        return os.readlink(name, dir_fd=self.open)

    def _enter(self, name: str, above: int | None) -> None:
        """Open folder ``name`` in the open folder ``above`` (``None``: the root) and check it."""
        place = name if above is None else self._below(name)
        try:
            opened = os.open(name, PASS | CLOSED, dir_fd=above)
        except FileNotFoundError:
            if not self._make or above is None:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, FOLDER, dir_fd=above)
                os.chmod(name, FOLDER, dir_fd=above)  # the umask may have taken of it
            opened = os.open(name, PASS | CLOSED, dir_fd=above)
        self.close()
        self.open, self._place = opened, place
        _check(os.fstat(opened), place, sticky=True)

    def _below(self, name: str) -> str:
        """The path of ``name`` in the open folder."""
        return os.path.normpath(os.path.join(self._place, name))

    def close(self) -> None:
        """Close the open folder."""
        if self.open >= 0:
            os.close(self.open)
            self.open = -1


def _check(status: os.stat_result, place: str, *, sticky: bool = False) -> None:
    """Raise :class:`Untrusted` where another user may write ``place``. A ``sticky`` folder may be writable."""
    _check_owner(status, place)
    if status.st_mode & OTHERS_WRITE and not (sticky and status.st_mode & stat.S_ISVTX):
        reason = f"may be written by other users (mode {stat.S_IMODE(status.st_mode):04o})"
        raise Untrusted(place, reason, f"chmod go-w {place}")


def _check_file(status: os.stat_result, place: str) -> None:
    """Raise :class:`Untrusted` where ``place`` is no regular file or another user may write it."""
    if not stat.S_ISREG(status.st_mode):
        raise Untrusted(place, "is no regular file", "removing it")
    _check(status, place)


def _check_owner(status: os.stat_result, place: str) -> None:
    """Raise :class:`Untrusted` where ``place`` belongs to neither this user nor root."""
    user = os.geteuid()
    if status.st_uid not in (0, user):
        reason = f"belongs to user {status.st_uid}, neither to this one ({user}) nor to root"
        raise Untrusted(place, reason, "a folder of one's own")
