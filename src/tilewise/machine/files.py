"""Files that are written as a whole or not at all: what was there stays until the new file is complete on the disk.

Files that the process runs as code are written by :mod:`tilewise.machine.trusted`, which also asks who may change them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

__all__ = ["TRACE", "TRACE_ENDINGS", "checked_path", "replacing", "whole_file"]

TRACE_ENDINGS, TRACE = (".json", ".json.gz"), "tilewise-trace.json"
"""How names of files of time lines end, and that of one where none is given."""
LONGEST = 100
"""Bytes of a file's name that are kept in the name beside it; file systems allow 255 with what is added."""


def checked_path(file: object, endings: tuple[str, ...], example: str) -> Path:
    """``file`` as the path of a file to write, whose name has one of ``endings``.

    Raises ``ValueError`` for something that is no path, which says that ``example`` would do, for another ending, and
    for a folder that is missing or not one.

    >>> checked_path("step.json", (".json", ".json.gz"), "tilewise-trace.json").name
    'step.json'
    """
    if not isinstance(file, str | os.PathLike) or not str(file):
        raise ValueError(f"file={file!r:.80}: a path such as {example!r} would do")
    path = Path(file)
    if not path.name.endswith(endings):
        raise ValueError(f"file={str(file)!r}: a name that ends in {' or '.join(endings)} would do")
    if not path.parent.is_dir():
        raise ValueError(f"file={str(file)!r}: there is no folder {str(path.parent)!r}; one that exists would do")
    return path


def _no_file(text: str) -> Exception:
    """What is raised where something else than a file lies in the place, and the caller has no error of its own."""
    return OSError(errno.EEXIST, text)


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], error: Callable[[str], Exception] = _no_file, ending: str = ".partial"
) -> Iterator[Path]:
    """The path of an empty file in the same folder, to write to, that takes the place of ``path`` at the end.

    If the body fails, as on a full disk, the file that was written to is removed, and one that was there before is left
    as it was. A symbolic link stays, and its target is replaced. The new file has the permissions of the old one; where
    there was none they follow the process's mask. ``ending`` is what the name to write to ends in, for writers that
    look at it.

    Raises ``OSError`` where the file cannot be written, and where ``path`` is something else than a file, such as a
    folder or a pipe. For the latter ``error`` may make another error of the message.

        >>> import tempfile
        >>> with replacing(tempfile.mkdtemp() + "/net.caffemodel") as partial:
        ...     written = partial.write_bytes(b"weights")
    """
    target = Path(os.path.realpath(path))
    old_mode = None
    with contextlib.suppress(FileNotFoundError):
        old_mode = target.stat().st_mode
    if old_mode is not None and not stat.S_ISREG(old_mode):
        raise error(f"{os.fspath(path)} is no file; a new path or that of a file would do")
    beginning = os.fsencode(target.name)[:LONGEST].decode("utf-8", "ignore")
    partial = target.parent / f".{beginning}.{secrets.token_hex(8)}{ending}"
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        mode = old_mode or partial.stat().st_mode
        yield partial
        # Some writers, such as safetensors, put a file of their own there, which others may not read.
        partial.chmod(stat.S_IMODE(mode))
        _sync(partial, os.O_RDWR)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):
        # Some file systems do not sync folders. The name may then be lost in a crash, but no file is half written.
        _sync(target.parent, os.O_RDONLY)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A file to write UTF-8 text to, which takes the place of ``path`` at the end, as :func:`replacing` says.

    A pipe or a device (``/dev/stdout``) is written to and stays what it is. Raises ``OSError``.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "page.html"
    >>> with whole_file(path) as file:
    ...     _ = file.write("text")
    >>> path.read_text()
    'text'
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        with path.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        return
    with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="\n") as file:
        yield file


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
