"""Whose a row is: sealed by a process of this user, or from elsewhere; and files of the schema that had no seals."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.wisdom.wisdom_workers import CONSTRAINTS, ENVIRONMENT, PROBLEMS, fill, some_measurements, some_plan

from tilewise.machine.cache import cache_dir
from tilewise.plan import PlanFormatError
from tilewise.wisdom import Wisdom, WisdomWarning, document, rows, schema, secret, tables
from tilewise.wisdom.database import Database

PROBLEM = PROBLEMS[0]


@pytest.fixture
def wisdom(tmp_path: Path) -> Wisdom:
    return Wisdom(tmp_path / "wisdom.sqlite3")


@pytest.fixture
def another_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget what this process knows of secrets, as one that begins does."""

    def begin() -> None:
        monkeypatch.setattr(secret, "_found", {})
        secret._own.cache_clear()

    return begin


def keep(wisdom: Wisdom, own: bool = True) -> None:
    wisdom.record_many(ENVIRONMENT, {PROBLEM: some_measurements(3)}, own=own)
    wisdom.remember(ENVIRONMENT, PROBLEM, CONSTRAINTS, some_plan(PROBLEM), own=own)


def owned(wisdom: Wisdom) -> set[bool]:
    """Whether rows are this user's, of measurements and plans."""
    found = {entry.own for entry in wisdom.kept_measurements(ENVIRONMENT, [PROBLEM])[PROBLEM]}
    kept = wisdom.kept_plans(ENVIRONMENT, [PROBLEM], CONSTRAINTS)
    assert found
    assert kept[PROBLEM].value == some_plan(PROBLEM)
    return found | {kept[PROBLEM].own}


def test_what_a_process_of_this_user_made_is_known_by_another(
    wisdom: Wisdom, another_process: Callable[[], None]
) -> None:
    keep(wisdom)
    assert owned(wisdom) == {True}
    another_process()
    assert owned(Wisdom(wisdom.path)) == {True}
    path = cache_dir() / "wisdom.secret"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == 32


def test_what_is_only_said_to_be_kept_is_not(wisdom: Wisdom) -> None:
    keep(wisdom, own=False)
    assert owned(wisdom) == {False}
    assert not (cache_dir() / "wisdom.secret").exists()


def test_an_import_brings_no_seal_and_leaves_those_there_are(wisdom: Wisdom, tmp_path: Path) -> None:
    keep(wisdom)
    wisdom.export(tmp_path / "w.json")
    other = Wisdom(tmp_path / "other.sqlite3")
    other.import_(tmp_path / "w.json")
    assert owned(other) == {False}
    assert wisdom.import_(tmp_path / "w.json") == 0
    assert owned(wisdom) == {True}


def without(path: Path) -> None:
    path.unlink()


def another(path: Path) -> None:
    path.write_bytes(b"y" * 32)
    path.chmod(0o600)


def readable(path: Path) -> None:
    path.chmod(0o644)


def short(path: Path) -> None:
    path.write_bytes(b"short")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def link(path: Path) -> None:
    moved = path.with_name("elsewhere")
    path.rename(moved)
    path.symlink_to(moved)


def copied(path: Path) -> None:
    """The same bytes, in another file."""
    moved = path.with_name("first")
    path.rename(moved)
    path.write_bytes(moved.read_bytes())
    path.chmod(0o600)


@pytest.mark.parametrize("change", [without, another, readable, short, pipe, link, copied])
def test_without_the_secret_nothing_is_own(
    wisdom: Wisdom, another_process: Callable[[], None], change: Callable[[Path], None]
) -> None:
    keep(wisdom)
    path = cache_dir() / "wisdom.secret"
    change(path)
    another_process()
    assert owned(wisdom) == {False}
    keep(wisdom)  # no error, whatever lies there
    assert owned(wisdom) == {True}
    another_process()
    assert owned(wisdom) == {change in (without, another, copied)}


def test_folders_of_the_secret_are_nobody_elses(
    wisdom: Wisdom, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "cache"
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(folder))
    before = os.umask(0o002)  # with which a folder is the group's to write, and no kernel in it is loaded
    try:
        keep(wisdom)
    finally:
        os.umask(before)
    assert (folder / "wisdom.secret").is_file()
    assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder)] == [0o700, 0o700]


def test_where_no_file_can_be_made_seals_last_as_long_as_the_process(
    wisdom: Wisdom, another_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "file" / "below"))
    keep(wisdom)
    assert owned(wisdom) == {True}
    another_process()
    assert owned(wisdom) == {False}


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE plan SET seal = NULL",
        "UPDATE plan SET seal = zeroblob(16)",
        "UPDATE plan SET seal = x'00'",
        "UPDATE plan SET seal = 'text'",
        "UPDATE plan SET seal = (SELECT seal FROM measurement LIMIT 1)",
        f"UPDATE plan SET seal = (SELECT seal FROM plan WHERE problem = {tables.key_id(PROBLEMS[1])})",
    ],
)
def test_a_seal_that_is_not_the_rows_own(wisdom: Wisdom, statement: str) -> None:
    keep(wisdom)
    wisdom.remember(ENVIRONMENT, PROBLEMS[1], CONSTRAINTS, some_plan(PROBLEMS[1]), own=True)
    with closing(sqlite3.connect(wisdom.path, isolation_level=None)) as db:
        db.execute(statement)
    assert wisdom.kept_plans(ENVIRONMENT, [PROBLEM], CONSTRAINTS)[PROBLEM].own is False


def test_processes_that_make_the_secret_at_once_have_one(wisdom: Wisdom, monkeypatch: pytest.MonkeyPatch) -> None:
    path, found = cache_dir() / "wisdom.secret", []
    start = threading.Barrier(8)

    def make() -> None:
        start.wait()
        found.append(secret._make(path))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert found[0] is not None
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def of_yesterday(path: Path, version: int) -> None:
    """Make ``path``, whose measurements tell nothing that came later, what an earlier ``version`` wrote."""
    without = {1: {"seal", *rows.MEASUREMENT[-rows.ADDED :]}, 2: set(rows.MEASUREMENT[-rows.ADDED :])}[version]
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        kept = {name: db.execute(f"SELECT * FROM {name}").fetchall() for name in ("measurement", "plan")}
        columns = {
            name: [column[1] for column in db.execute(f"PRAGMA table_info({name})")] for name in ("measurement", "plan")
        }
        for name, found in kept.items():
            db.execute(f"DROP TABLE {name}")
            (table,) = (t for t in schema.EARLIER[version] if t.startswith(f"CREATE TABLE {name} "))
            db.execute(table)
            for row in found:
                values = [value for column, value in zip(columns[name], row, strict=True) if column not in without]
                db.execute(f"INSERT INTO {name} VALUES ({', '.join('?' * len(values))})", values)
        db.execute(f"PRAGMA user_version = {version}")
    assert not any(column in "".join(schema.EARLIER[version]) for column in without)


EARLIER = {
    1: """CREATE TABLE measurement (
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
    PRIMARY KEY (environment, problem, solver, version, config)
) WITHOUT ROWID""",
    2: """CREATE TABLE measurement (
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
    PRIMARY KEY (environment, problem, solver, version, config)
) WITHOUT ROWID""",
}
"""The tables of measurements that earlier versions made, to the letter."""


@pytest.mark.parametrize("version", EARLIER)
def test_earlier_tables_stay_as_they_were_written(version: int) -> None:
    assert schema.EARLIER[version][1] == EARLIER[version]


def test_checksums_and_seals_of_earlier_rows_stay_as_they_were_written() -> None:
    """As version 2 computed them: over the columns that it had."""
    old = ("fft", 1, '{"tile":4}', 2.5, 4096, 1e-6, 2e-6, "", 3.5, 1.7e9)
    row = tables.Row(ENVIRONMENT, PROBLEM, (*old, *[None] * rows.ADDED))
    assert tables.checksum("measurement", row) == rows.checksum(ENVIRONMENT, PROBLEM, *old)
    sealed = json.dumps([tables.CHECK_VERSION, "measurement", ENVIRONMENT, PROBLEM, *old])
    assert tables.sealed_text("measurement", row) == sealed
    for index in range(rows.ADDED):  # each of the columns that came later is covered where it says something
        told = [None] * rows.ADDED
        told[index] = 0  # type: ignore[call-overload]
        other = row._replace(values=(*old, *told))
        assert tables.checksum("measurement", other) != tables.checksum("measurement", row)
        assert tables.sealed_text("measurement", other) != sealed


@pytest.mark.parametrize("first", ["read", "write"])
def test_rows_of_the_version_before_stay_this_users_own(tmp_path: Path, first: str) -> None:
    wisdom = Wisdom(tmp_path / "wisdom.sqlite3")
    fill(wisdom, told=False, own=True)
    of_yesterday(wisdom.path, 2)
    again = Wisdom(wisdom.path)
    if first == "write":
        again.record_many(ENVIRONMENT, {"new": some_measurements(3)}, own=True)
        assert again.measurements(ENVIRONMENT, "new") == some_measurements(3)
    assert owned(again) == {True}
    assert again.measurements_many(ENVIRONMENT, PROBLEMS) == {p: some_measurements(told=False) for p in PROBLEMS}
    assert again.profile(ENVIRONMENT) == {"bandwidth": 3e12}
    assert [p.name for p in tmp_path.iterdir() if "damaged" in p.name] == []
    with closing(sqlite3.connect(wisdom.path)) as db:
        assert schema.identify(db) == schema.SCHEMA_VERSION
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_row_of_the_version_before_that_was_changed_is_no_ones(tmp_path: Path) -> None:
    """Bringing a file up to date makes no checksum right, nor any seal."""
    wisdom = Wisdom(tmp_path / "wisdom.sqlite3")
    fill(wisdom, told=False, own=True)
    of_yesterday(wisdom.path, 2)
    with closing(sqlite3.connect(wisdom.path, isolation_level=None)) as db:
        db.execute("UPDATE measurement SET time_ms = 0.001 WHERE config LIKE '%105%'")
        db.execute("UPDATE measurement SET seal = zeroblob(16) WHERE config LIKE '%106%'")
    again = Wisdom(wisdom.path)
    with pytest.warns(WisdomWarning, match="checksum"):
        kept = again.kept_measurements(ENVIRONMENT, [PROBLEM])[PROBLEM]
    assert {entry.value.config["tile"] for entry in kept} == {100 + i for i in range(20) if i != 5}
    assert {entry.value.config["tile"] for entry in kept if not entry.own} == {106}


@pytest.mark.parametrize("first", ["read", "write"])
def test_a_file_without_seals_is_read_as_unchecked(tmp_path: Path, first: str) -> None:
    wisdom = Wisdom(tmp_path / "wisdom.sqlite3")
    fill(wisdom, told=False)
    of_yesterday(wisdom.path, 1)
    again = Wisdom(wisdom.path)
    if first == "write":
        again.record(ENVIRONMENT, "new", some_measurements(1))
    assert owned(again) == {False}
    assert all(len(found) == 20 for found in again.measurements_many(ENVIRONMENT, PROBLEMS).values())
    assert set(again.plans_many(ENVIRONMENT, PROBLEMS, CONSTRAINTS)) == set(PROBLEMS)
    assert again.profile(ENVIRONMENT) == {"bandwidth": 3e12}
    keep(again)
    assert owned(again) == {True, False}  # three measurements of twenty, and the plan
    assert again.kept_plans(ENVIRONMENT, [PROBLEM], CONSTRAINTS)[PROBLEM].own
    assert [p.name for p in tmp_path.iterdir() if "damaged" in p.name] == []
    with closing(sqlite3.connect(wisdom.path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (schema.SCHEMA_VERSION,)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert schema.identify(db) == schema.SCHEMA_VERSION


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_of_yesterday_that_cannot_be_written_is_read(tmp_path: Path, version: int) -> None:
    wisdom = Wisdom(tmp_path / "wisdom.sqlite3")
    fill(wisdom, told=False)
    of_yesterday(wisdom.path, version)
    from tilewise.wisdom.database import _memory_copy

    copy = _memory_copy(wisdom.path)
    assert copy is not None
    assert schema.identify(copy) == schema.SCHEMA_VERSION
    assert len(list(tables.select(copy, "plan", ENVIRONMENT, PROBLEMS))) == len(PROBLEMS)


@pytest.mark.parametrize("version", [1, 2])
def test_many_threads_bring_a_file_of_yesterday_up_to_date(tmp_path: Path, version: int) -> None:
    wisdom = Wisdom(tmp_path / "wisdom.sqlite3")
    fill(wisdom, told=False)
    of_yesterday(wisdom.path, version)
    found: list[int] = []

    def read() -> None:
        found.append(len(Wisdom(wisdom.path).plans_many(ENVIRONMENT, PROBLEMS, CONSTRAINTS)))

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [len(PROBLEMS)] * 6


def test_a_document_of_any_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MOST_BYTES", 1000)
    (tmp_path / "w.json").write_text(" " * 1001)
    with pytest.raises(PlanFormatError, match="has more than 1000 bytes"):
        document.read(tmp_path / "w.json")


def test_a_seal_is_of_where_the_row_stands(wisdom: Wisdom) -> None:
    """A row moved to another problem or environment with its seal is not this user's word on that."""
    keep(wisdom)
    (row,) = Database(wisdom.path).read(lambda db: list(tables.select(db, "plan", ENVIRONMENT, [PROBLEM])))
    assert tables.is_own(row)
    assert not tables.is_own(row._replace(environment="elsewhere"))
    assert not tables.is_own(row._replace(problem=PROBLEMS[1]))
    assert not tables.is_own(row._replace(table="measurement"))


@pytest.mark.parametrize("version", [tables.CHECK_VERSION - 1, tables.CHECK_VERSION + 1])
def test_what_other_checks_passed_is_not_own(wisdom: Wisdom, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """An earlier check compared less, so that what it let pass is checked again, and sealed anew."""
    with monkeypatch.context() as other:
        other.setattr(tables, "CHECK_VERSION", version)
        keep(wisdom)
        assert owned(wisdom) == {True}
    assert owned(wisdom) == {False}
    keep(wisdom)
    assert owned(wisdom) == {True}
