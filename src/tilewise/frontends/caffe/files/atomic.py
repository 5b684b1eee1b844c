"""Writes a file as a whole or not at all: what was there stays until the new file is complete on the disk."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from tilewise.frontends.caffe.errors import CaffeError

__all__ = ["replacing"]


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to, in the same folder, that takes the place of ``path`` at the end.

    If the body fails, as on a full disk, the path that was written to is removed, and a file that was there before is
    left as it was. A symbolic link stays, and its target is replaced. The new file has the permissions of the old one.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` where ``path`` is something else than a file.

        >>> import tempfile
        >>> with replacing(tempfile.mkdtemp() + "/net.caffemodel") as partial:
        ...     written = partial.write_bytes(b"weights")
    """
    target = Path(os.path.realpath(path))
    old_mode = None
    with contextlib.suppress(FileNotFoundError):
        old_mode = target.stat().st_mode
    if old_mode is not None and not stat.S_ISREG(old_mode):
        raise CaffeError(f"{os.fspath(path)} is no file; a new path or that of a file would do")
    partial = target.parent / f".{target.name[:100]}.{secrets.token_hex(8)}.partial"
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield partial
        if old_mode is not None:
            partial.chmod(stat.S_IMODE(old_mode))
        _sync(partial, os.O_RDWR)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):
        # Some file systems do not sync folders. The name may then be lost in a crash, but no file is half written.
        _sync(target.parent, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
