"""The SQLite file under wisdom: opened and checked for each transaction, and never a reason to fail.

A connection lives for one transaction. None is carried over a fork or between threads, which SQLite forbids; a file
that another process moved away is noticed at once; and nothing is left to clean up when a process is killed. Opening
costs about 0.1 ms.

Do not open the database file with Python's ``open``: closing it would drop SQLite's own locks on it (POSIX). That is
why even the header is read through SQLite.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tilewise.machine import cache, trusted
from tilewise.wisdom.paths import VARIABLE, on_network
from tilewise.wisdom.schema import SCHEMA_VERSION, Damaged, create, identify, require_sound, roll_back

if TYPE_CHECKING:
    import sqlite3

__all__ = ["Database", "WisdomWarning"]

T = TypeVar("T")

WAIT_S = 10.0
"""Seconds to wait for other processes; a transaction takes milliseconds."""
# Held over every transaction and every fork: a child that was forked in the middle of one would
# inherit SQLite's record of locks it does not have.
_LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


class WisdomWarning(UserWarning):
    """A store, or a row of it, could not be used. The message names the file and what was done.

    >>> import warnings
    >>> from tilewise.wisdom import WisdomWarning
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", WisdomWarning)  # a store that cannot be used ends the program
    ...     wisdom = tilewise.Wisdom()
    """


class Unusable(Exception):
    """No store can be used here. ``curable`` says that :meth:`Database._prepare` may change that."""

    def __init__(self, reason: str, *, curable: bool = False) -> None:
        super().__init__(reason)
        self.curable = curable


class Database:
    """Runs transactions on the store at ``path``, or in memory where no store can be kept there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._memory: sqlite3.Connection | None = None

    @property
    def in_memory(self) -> bool:
        """Whether the file turned out unusable, so that all is lost with this object."""
        return self._memory is not None

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` on a snapshot of the store; without a file on an empty one, and none is made."""
        return self._run(work, write=False)

    def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` in one transaction: all of it is kept or nothing, even when the process is killed."""
        return self._run(work, write=True)

    def check(self) -> None:
        """Read the whole file, and move it aside where SQLite finds its structure damaged."""
        self.read(require_sound)

    def close(self) -> None:
        """Drop what is in memory because the file was unusable. The next use tries the file again."""
        with _LOCK:
            if self._memory is not None:
                self._memory.close()
                self._memory = None

    def _run(self, work: Callable[[sqlite3.Connection], T], *, write: bool) -> T:
        """Run ``work`` on the file, or in memory once the file was found unusable."""
        with _LOCK:
            if self._memory is None:
                try:
                    return self._on_disk(work, write=write)
                except Unusable as problem:
                    self._fall_back(str(problem))
            assert self._memory is not None
            return _transaction(self._memory, work, write=write)

    def _on_disk(self, work: Callable[[sqlite3.Connection], T], *, write: bool) -> T:
        """Run ``work`` on the file, which a few attempts may first make, repair or replace."""
        reason, prepare = "", False
        for _ in range(4):
            try:
                if prepare:
                    self._prepare()
                return self._once(work, write=write)
            except Damaged as damage:
                self._set_aside(damage)
                reason, prepare = str(damage), False
            except Unusable as problem:
                if not problem.curable:
                    raise
                reason, prepare = str(problem), True
        raise Unusable(reason)

    def _once(self, work: Callable[[sqlite3.Connection], T], *, write: bool) -> T:
        """Run ``work`` on the file as it is.

        Raises :class:`Damaged` for a file that is to be moved aside, and :class:`Unusable` for one that cannot be used.
        """
        if not write and not os.path.lexists(self.path):
            return _on_nothing(work)
        if not self.path.is_absolute():
            raise Unusable(cache.why_relative(self.path))
        if write:
            _make_directory(self.path.parent)
        with (
            _file_lock(self._lock, exclusive=False),
            _judged(self.path),
            contextlib.closing(_connect(self.path, "rwc" if write else "rw")) as db,
        ):
            version = identify(db)
            if version == SCHEMA_VERSION:
                _set_synchronous(db, network=on_network(self.path.parent))
                return _transaction(db, work, write=write)
        if version:
            raise Unusable("it is of an older tilewise and cannot be brought up to date", curable=True)
        if write:
            raise Unusable("it is empty", curable=True)
        return _on_nothing(work)

    def _prepare(self) -> None:
        """Choose the journal and make the tables, while nobody else uses the file."""
        with _file_lock(self._lock, exclusive=True), _judged(self.path):
            # An exclusive connection needs no shared memory, so it reads a file that is stuck in
            # WAL for want of it.
            with contextlib.closing(_connect(self.path, "rwc", exclusive=True)) as db:
                identify(db)
                _require_writable(db, self.path)
            if on_network(self.path.parent) or not _enable_wal(self.path):
                with contextlib.closing(_connect(self.path, "rw", exclusive=True)) as db:
                    db.execute("PRAGMA journal_mode = DELETE")
            with contextlib.closing(_connect(self.path, "rw")) as db:
                create(db)

    @property
    def _lock(self) -> Path:
        """The file whose lock all users of the database take."""
        return self._beside(".lock")

    def _beside(self, suffix: str) -> Path:
        """The path of a file beside the database, with ``suffix`` added to its name."""
        return self.path.with_name(self.path.name + suffix)

    def _set_aside(self, damage: Damaged) -> None:
        """Rename the damaged file, unless another process has done so meanwhile, and warn."""
        with _file_lock(self._lock, exclusive=True):
            if damage.identity is None or _identity(self.path) != damage.identity:
                return
            try:
                moved = self._rename(time.strftime(f".{damage.kind}-%Y%m%d-%H%M%S"))
            except OSError as error:
                raise Unusable(f"{damage}, and it could not be moved aside: {error}") from error
        warnings.warn(
            f"{self.path}: {damage}. It was renamed to {moved.name} and a fresh store is begun; "
            "nothing was deleted, and what it held will be measured again",
            WisdomWarning,
            stacklevel=7,
        )

    def _rename(self, suffix: str) -> Path:
        """Move the database and what SQLite keeps beside it to names that end in ``suffix``."""
        target, number = self._beside(suffix), 1
        while os.path.lexists(target):
            number += 1
            target = self._beside(f"{suffix}-{number}")
        # The database goes first: SQLite itself drops a log left beside a missing or empty one, so
        # that being killed between these lines cannot mix two stores.
        os.rename(self.path, target)
        for side in SIDES[1:]:
            if os.path.lexists(self._beside(side)):
                os.rename(self._beside(side), f"{target}{side}")
        return target

    def _fall_back(self, reason: str) -> None:
        """Use memory from now on, with a copy of what the file holds where it can be read, and warn."""
        copy = _memory_copy(self.path)
        self._memory = _blank() if copy is None else copy
        if self.path.parent == cache.cache_dir() and (why := cache.nowhere()):
            if not cache.first_to_tell():
                return
            text = f"{self.path.parent} cannot be used ({why}): what is measured and compiled from now on is"
        else:
            text = f"{self.path} cannot be used ({reason}): what is measured from now on is"
        held = "" if copy is None else " What the file holds is still used."
        text += f" kept in memory, for this process only.{held} {VARIABLE} names another directory"
        warnings.warn(text, WisdomWarning, stacklevel=6)


def _connect(database: Path | str, mode: str, *, exclusive: bool = False) -> sqlite3.Connection:
    """A connection to a file, or to memory. Raises :class:`Unusable` for what is no regular file."""
    import sqlite3

    if isinstance(database, Path):
        _require_files(database)
    uri = database if isinstance(database, str) else f"{database.as_uri()}?mode={mode}"
    db = sqlite3.connect(uri, uri=True, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
    db.text_factory = _decode
    # A schema from elsewhere may not run functions, and a file that shrinks under a memory map
    # would kill the process.
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute("PRAGMA mmap_size = 0")
    if exclusive:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
    return db


SIDES = ("", "-wal", "-shm", "-journal")
"""Suffixes of the database and of what SQLite keeps beside it."""


def _require_files(database: Path) -> None:
    """Raise :class:`Unusable` for a pipe, a device or the like in a file's place, which SQLite would wait for."""
    for side in SIDES:
        path = f"{database}{side}"
        with contextlib.suppress(OSError):
            mode = os.stat(path).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # of a folder SQLite says what is wrong
                raise Unusable(f"{path} is no regular file")


def _decode(raw: bytes) -> str | bytes:
    """Text of a column; bytes that are not UTF-8 stay bytes, for the row's validator to refuse."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _blank() -> sqlite3.Connection:
    """A new store in memory."""
    db = _connect(":memory:", "memory")
    create(db)
    return db


def _on_nothing(work: Callable[[sqlite3.Connection], T]) -> T:
    """Run ``work`` on an empty store: what reading gives where there is no file."""
    with contextlib.closing(_blank()) as blank:
        return work(blank)


def _enable_wal(path: Path) -> bool:
    """Whether the file now keeps a write-ahead log (WAL) and works with it, which SQLite finds only in use."""
    import sqlite3

    try:
        with contextlib.closing(_connect(path, "rw")) as db:
            mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            _try_writing(db)
    except sqlite3.OperationalError:
        # Why does not matter: the file goes back to a rollback journal, and its use says whether
        # that works.
        return False
    return bool(mode == "wal")


def _try_writing(db: sqlite3.Connection) -> None:
    """Write a value that is there already, and take it back: ``BEGIN IMMEDIATE`` alone succeeds on a read-only file."""
    db.execute("BEGIN IMMEDIATE")
    try:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        db.execute(f"PRAGMA user_version = {version}")
    finally:
        roll_back(db)


def _require_writable(db: sqlite3.Connection, path: Path) -> None:
    """Raise :class:`Damaged` when the file itself says that it is read-only and the system does not."""
    import sqlite3

    try:
        _try_writing(db)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_READONLY and os.access(path, os.W_OK):
            raise Damaged("damaged", "damaged (its header forbids writing)") from error
        raise


def _set_synchronous(db: sqlite3.Connection, *, network: bool) -> None:
    """Sync as often as the journal needs to survive a power cut: with WAL only at checkpoints."""
    wal = db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    if wal and network:
        raise Unusable("it keeps a write-ahead log, which cannot work on a network file system", curable=True)
    db.execute(f"PRAGMA synchronous = {'NORMAL' if wal else 'FULL'}")


def _transaction(db: sqlite3.Connection, work: Callable[[sqlite3.Connection], T], *, write: bool) -> T:
    """Run ``work`` in a transaction of ``db``, which is rolled back where anything is raised."""
    db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
    try:
        result = work(db)
        db.execute("COMMIT")
    except BaseException:
        roll_back(db)
        raise
    return result


@contextlib.contextmanager
def _judged(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into what they mean for the file: :class:`Damaged` or :class:`Unusable`."""
    import sqlite3

    try:
        yield
    except Damaged as damage:
        raise Damaged(damage.kind, str(damage), _identity(path)) from damage
    except UnicodeDecodeError as error:
        # SQLite quotes the damaged schema in its message, and Python reads that as UTF-8.
        raise Damaged("damaged", "damaged (its tables have no names)", _identity(path)) from error
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        damaged = code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
        if damaged or "unsupported file format" in str(error):
            raise Damaged("damaged", f"damaged ({error})", _identity(path)) from error
        if isinstance(error, sqlite3.OperationalError) and code != sqlite3.SQLITE_ERROR:
            raise Unusable(str(error), curable=code in _curable()) from error
        raise


def _curable() -> tuple[int, ...]:
    """Error codes of a file in WAL mode where that cannot work. With another cause the attempt to cure them fails."""
    import sqlite3

    return (
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_PROTOCOL,
    )


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; ``None`` where there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _make_directory(path: Path) -> None:
    """Make the folder of the store. Raises :class:`Unusable`."""
    try:
        trusted.make_folders(path)  # compiled kernels, kept in the same folder, are loaded where others cannot write
    except OSError as error:
        raise Unusable(str(error)) from error


@contextlib.contextmanager
def _file_lock(path: Path, *, exclusive: bool) -> Iterator[None]:
    """Hold the lock file: shared to use the database, exclusive to make it or move it.

    A process that dies drops its lock. Raises :class:`Unusable` where files cannot be locked or the lock is not free in
    time.
    """
    try:
        import fcntl
    except ImportError:
        # Windows refuses to rename a file that is open, which is what the lock is for.
        yield
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise Unusable(str(error)) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Unusable(f"{path} is no regular file")
        _wait_for(lambda: fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB))
        try:
            yield
        finally:
            # Closing is not enough: a child forked by native code would still hold it.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _wait_for(lock: Callable[[], None]) -> None:
    """Call ``lock`` until it succeeds. Raises :class:`Unusable` after :data:`WAIT_S` seconds."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return lock()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise Unusable(f"files cannot be locked there: {error}") from error
            if time.monotonic() > deadline:
                raise Unusable(f"another process has kept it locked for {WAIT_S:g} s") from error
        time.sleep(0.01)


def _memory_copy(path: Path) -> sqlite3.Connection | None:
    """A copy in memory of a file that cannot be written; ``None`` where it is no sound store."""
    import sqlite3

    if not path.is_absolute() or not os.path.isfile(path):
        return None
    # A log that cannot be opened for want of write permission is left out by immutable=1.
    for mode in ("ro", "ro&immutable=1"):
        copy = _connect(":memory:", "memory")
        try:
            with contextlib.closing(_connect(path, mode)) as source:
                source.execute("PRAGMA busy_timeout = 1000")
                source.backup(copy)
            if identify(copy):
                require_sound(copy)
                create(copy)
                _try_writing(copy)
                return copy
        except (sqlite3.Error, UnicodeDecodeError, Damaged, Unusable):
            # Already on the way out of an unusable file, with a warning: this only salvages.
            pass
        copy.close()
    return None
