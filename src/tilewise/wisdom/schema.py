"""The tables of a store, and how to tell its file from others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

__all__ = ["APPLICATION_ID", "SCHEMA_VERSION", "TABLES", "Damaged", "create", "identify", "require_sound", "roll_back"]

APPLICATION_ID = 0x74776973
"""``twis``: marks the file as this program's in SQLite's header."""
SCHEMA_VERSION = 3
"""The version of the tables that is written."""

NAME = """CREATE TABLE name (
    id INTEGER PRIMARY KEY,
    text TEXT NOT NULL
)"""
MEASUREMENT = """CREATE TABLE measurement (
    environment INTEGER NOT NULL,
    problem INTEGER NOT NULL,
    solver TEXT NOT NULL,
    version INTEGER NOT NULL,
    config TEXT NOT NULL,
    time_ms REAL,
    workspace INTEGER,
    l2 REAL,
    spread REAL,
    reason TEXT NOT NULL,
    baseline_ms REAL,
    recorded REAL NOT NULL,
    crc INTEGER NOT NULL,
    seal BLOB,
    host_ms REAL,
    baseline_host_ms REAL,
    dispersion REAL,
    runs INTEGER,
    load REAL,
    PRIMARY KEY (environment, problem, solver, version, config)
) WITHOUT ROWID"""
PLAN = """CREATE TABLE plan (
    environment INTEGER NOT NULL,
    problem INTEGER NOT NULL,
    constraints TEXT NOT NULL,
    plan TEXT NOT NULL,
    recorded REAL NOT NULL,
    crc INTEGER NOT NULL,
    seal BLOB,
    PRIMARY KEY (environment, problem, constraints)
) WITHOUT ROWID"""
PROFILE = """CREATE TABLE profile (
    environment INTEGER PRIMARY KEY,
    profile TEXT NOT NULL,
    recorded REAL NOT NULL,
    crc INTEGER NOT NULL
)"""
TOLD = """    host_ms REAL,
    baseline_host_ms REAL,
    dispersion REAL,
    runs INTEGER,
    load REAL,
"""
TABLES = (NAME, MEASUREMENT, PLAN, PROFILE)
"""Environment and problem keys are long and repeat, so rows hold their ids in ``name``. An id is a
hash of the text (``tables.key_id``): there is no index that damage could set against its table.
Changing any of this text makes another schema: raise the version and upgrade files of the old."""
UNTOLD = 2
"""The version whose measurements do not tell the host's time, nor how sure the times are."""
UNTOLD_TABLES = tuple(table.replace(TOLD, "") for table in TABLES)
UNSEALED = 1
"""The version whose rows have no seals either."""
UNSEALED_TABLES = tuple(table.replace("    seal BLOB,\n", "") for table in UNTOLD_TABLES)
EARLIER = {UNTOLD: UNTOLD_TABLES, UNSEALED: UNSEALED_TABLES}
"""Tables of the versions that are brought up to date."""


class Damaged(Exception):
    """The file is not a store that this version can use, and is to be moved aside.

    ``kind`` is ``damaged``, ``foreign`` or ``newer``. ``identity`` is the file's device and inode, once they are known.
    """

    def __init__(self, kind: str, reason: str, identity: tuple[int, int] | None = None) -> None:
        super().__init__(reason)
        self.kind = kind
        self.identity = identity


def identify(db: sqlite3.Connection) -> int:
    """The version of a store's schema, 0 for a new file. Raises :class:`Damaged` for anything else.

    The schema must be that version's to the letter: a trigger or view from elsewhere would run inside our queries.
    """
    application = db.execute("PRAGMA application_id").fetchone()[0]
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    # SQLite makes tables of its own for indices without SQL and, when somebody runs ANALYZE, for
    # statistics.
    statements = db.execute(
        "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND NOT (type = 'table' AND name LIKE 'sqlite_stat%')"
    ).fetchall()
    if not statements and application == version == 0:
        return 0
    if application != APPLICATION_ID:
        raise Damaged("foreign", f"another program's SQLite database (application_id {application:#x})")
    if version > SCHEMA_VERSION:
        raise Damaged(
            "newer",
            f"written by a newer tilewise (schema {version}; this one reads {SCHEMA_VERSION})",
        )
    expected = {SCHEMA_VERSION: TABLES, **EARLIER}.get(version, ())
    if not expected or {sql for (sql,) in statements} != set(expected):
        raise Damaged("damaged", "damaged (its tables are not the ones tilewise makes)")
    return version


def require_sound(db: sqlite3.Connection) -> None:
    """Raise :class:`Damaged` where SQLite's integrity check finds a fault in pages, rows or types."""
    ((verdict, *_), *_) = db.execute("PRAGMA integrity_check(1)").fetchall()
    if verdict != "ok":
        raise Damaged("damaged", f"damaged ({verdict})")


def create(db: sqlite3.Connection) -> None:
    """Make the tables of a new file, or bring those of an older one up to date.

    It is one transaction, and does nothing where another process has been first.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        version = identify(db)
        if version in EARLIER:
            _add_columns(db)
        elif not version:
            for table in TABLES:
                db.execute(table)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")
    except BaseException:
        roll_back(db)
        raise


def _add_columns(db: sqlite3.Connection) -> None:
    """Give the rows of an older file the columns that they lack, with nothing in them.

    Checksums and seals stay valid, as they do not cover such columns (``rows.as_told``). Rows without a seal are
    checked when they are first used.
    """
    for name, table in (("measurement", MEASUREMENT), ("plan", PLAN)):
        columns = ", ".join(column[1] for column in db.execute(f"PRAGMA table_info({name})"))
        db.execute(f"ALTER TABLE {name} RENAME TO earlier_{name}")
        db.execute(table)
        db.execute(f"INSERT INTO {name} ({columns}) SELECT {columns} FROM earlier_{name}")
        db.execute(f"DROP TABLE earlier_{name}")


def roll_back(db: sqlite3.Connection) -> None:
    """Leave the open transaction, unless the error that led here has already done so."""
    if db.in_transaction:
        db.execute("ROLLBACK")
