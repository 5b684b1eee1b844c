"""Records of an LMDB database, read in the order of their keys."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilewise.frontends.caffe.errors import CaffeError

__all__ = ["Records", "close_all", "opened"]


class Records:
    """The records of an LMDB database by number, in the order of their keys, for reading.

    Reading on from the last record is quick. The database is opened when it is first read, anew in each process, since
    LMDB does not allow to carry an open one into a child. Readers of one process share one opening, since LMDB does not
    allow two.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` that names the path for a database that is missing,
    empty, locked or no database.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._environment: Any = None
        self._cursor: Any = None
        self._at = 0
        self._count = 0

    def __len__(self) -> int:
        self._open()
        return self._count

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: the path alone."""
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]

    def get(self, number: int) -> tuple[str, bytes]:
        """Key and content of a record, 0 for the first. Raises ``CaffeError`` where it cannot be read."""
        import lmdb

        self._open()
        try:
            if number < self._at:
                self._first()
            while self._at < number:
                if not self._cursor.next():
                    self._environment = None  # the cursor is behind the end
                    raise CaffeError(f"{self.path}: ends after {self._at + 1} records; {number + 1} were promised")
                self._at += 1
            key, value = self._cursor.item()
        except lmdb.Error as error:
            raise CaffeError(f"{self.path}: record {number} cannot be read: {error}") from error
        return key.decode("utf-8", "backslashreplace"), value

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        for number in range(len(self)):
            yield self.get(number)

    def _open(self) -> None:
        """Open the database in this process, unless it is open."""
        import lmdb

        environment = _shared(self.path)
        if environment is self._environment:
            return
        try:
            self._cursor = environment.begin(buffers=False).cursor()
            self._count = int(environment.stat()["entries"])
            self._environment = environment
            self._first()
        except lmdb.Error as error:
            self._environment = None
            raise CaffeError(f"{self.path}: cannot be read as an LMDB database: {error}") from error

    def _first(self) -> None:
        """Go to the first record."""
        if not self._cursor.first():
            self._environment = None
            raise CaffeError(f"{self.path}: the database is empty; one with at least one record would do")
        self._at = 0


_environments: dict[str, Any] = {}
"""What is open in this process, by its real path."""
_process = -1
"""The process that opened them."""


def _shared(path: str) -> Any:
    """The environment of a database, opened in this process unless it is."""
    global _process
    if _process != os.getpid():
        _environments.clear()
        _process = os.getpid()
    name = os.path.realpath(path)
    if name not in _environments:
        _environments[name] = opened(path)
    return _environments[name]


def close_all() -> None:
    """Close every database that this process has open, before it is forked: a child may not inherit one.

    Readers open theirs again when they are next asked.
    """
    if _process == os.getpid():
        for environment in _environments.values():
            environment.close()
    _environments.clear()


def opened(path: str) -> Any:
    """An open LMDB environment for reading. Raises ``CaffeError`` where there is none."""
    import lmdb

    place = Path(path)
    if not place.exists():
        raise CaffeError(f"{path}: no such database; a folder that convert-imageset has written would do")
    if place.is_dir() and not (place / "data.mdb").is_file():
        if (place / "CURRENT").exists():
            raise CaffeError(
                f"{path}: looks like LevelDB, which is not read; an LMDB database would do: tilewise caffe "
                "convert-imageset makes one of the images, as Caffe's convert_imageset -backend lmdb does"
            )
        raise CaffeError(f"{path}: has no data.mdb; an LMDB database would do")
    options: dict[str, Any] = {"subdir": place.is_dir(), "readonly": True, "readahead": True, "max_spare_txns": 1}
    try:
        return lmdb.open(path, **options)
    except (lmdb.ReadonlyError, lmdb.LockError, PermissionError) as error:
        return _without_lock(path, options, error)
    except lmdb.Error as error:
        if "Permission denied" in str(error) or "Read-only file system" in str(error):
            return _without_lock(path, options, error)
        raise CaffeError(f"{path}: {_reason(error)}") from error


def _without_lock(path: str, options: dict[str, Any], refused: Exception) -> Any:
    """Open a database whose folder cannot be written: nobody of this user writes there, so no lock is needed."""
    import lmdb

    folder = path if options["subdir"] else os.path.dirname(path) or "."
    if os.access(folder, os.W_OK):
        raise CaffeError(f"{path}: is locked: {refused}; waiting for its writer to end would do") from refused
    try:
        return lmdb.open(path, lock=False, **options)
    except lmdb.Error as error:
        raise CaffeError(f"{path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What LMDB says, and what would do."""
    text = str(error)
    if "Resource temporarily unavailable" in text or "already open" in text:
        return f"is locked: {text}; closing the other reader or writer would do"
    return f"cannot be opened as an LMDB database: {text}; one that Caffe's or tilewise's tools have written would do"
