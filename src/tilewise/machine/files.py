"""Text files that are written as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

__all__ = ["whole_file"]


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A file to write UTF-8 text to, which takes the place of ``path`` at the end.

    If the body fails, as on a full disk, ``path`` holds what it held before, and nothing of the new text stays behind.
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
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".tilewise.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        with partial.open("x", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
