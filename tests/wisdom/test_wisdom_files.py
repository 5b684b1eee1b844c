"""Files that are not as wisdom left them: damaged, foreign, newer or tampered with."""

from __future__ import annotations

import random
import sqlite3
import warnings
from contextlib import closing
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
from tests.wisdom.wisdom_workers import (
    BATCH,
    CONSTRAINTS,
    ENVIRONMENT,
    PROBLEMS,
    aside,
    fill,
    filled,
    integrity,
    some_measurements,
    some_plan,
)

from tilewise.wisdom import Wisdom, WisdomWarning, rows, schema, tables


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store that holds what ``fill`` keeps."""
    return filled(tmp_path / "wisdom.sqlite3")


class Image(bytes):
    """Bytes that hypothesis need not print."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes>"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The bytes of such a store."""
    path = tmp_path_factory.mktemp("image") / "wisdom.sqlite3"
    fill(Wisdom(path))
    return Image(path.read_bytes())


def check_fresh(path: Path, kind: str, old: bytes, wisdom: Wisdom) -> None:
    """Reading finds nothing; one message names the file and where it went; it is there unchanged; writing works."""
    with pytest.warns(WisdomWarning) as caught:
        assert wisdom.measurements(ENVIRONMENT, PROBLEMS[0]) == []
    assert len(caught) == 1
    assert wisdom.plan(ENVIRONMENT, PROBLEMS[0], CONSTRAINTS) is None
    fill(wisdom)
    (moved,) = moved_aside(path, kind)
    assert str(path) in str(caught[0].message)
    assert moved.name in str(caught[0].message)
    assert moved.read_bytes() == old
    assert wisdom.measurements(ENVIRONMENT, PROBLEMS[0]) == some_measurements()
    assert integrity(path) == "ok"
    assert not wisdom.in_memory


def moved_aside(path: Path, kind: str) -> list[Path]:
    """Databases moved aside, without their logs."""
    found = path.parent.glob(f"{path.name}.{kind}-*")
    return [p for p in found if not p.name.endswith(("-wal", "-shm", "-journal"))]


@pytest.mark.parametrize(
    "content",
    [
        b"xy",
        b"\0" * 4096,
        b"wisdom = 1\n" * 100,
        random.Random(0).randbytes(50_000),
        b"SQLite format 3\0" + b"\xff" * 9000,
    ],
    ids=["two bytes", "zeros", "text", "random", "header"],
)
def test_bytes_that_are_no_database(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "wisdom.sqlite3"
    path.write_bytes(content)
    check_fresh(path, "damaged", content, Wisdom(path))


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9])
def test_a_truncated_store(path: Path, share: float) -> None:
    whole = path.read_bytes()
    old = whole[: int(len(whole) * share)]
    path.write_bytes(old)
    check_fresh(path, "damaged", old, Wisdom(path))


def test_an_empty_file_is_a_new_store(tmp_path: Path) -> None:
    path = tmp_path / "wisdom.sqlite3"
    path.touch()
    wisdom = Wisdom(path)
    assert wisdom.summary() == []
    fill(wisdom)
    assert Wisdom(path).summary()[0].measurements == len(PROBLEMS) * BATCH
    assert aside(path) == []


@pytest.mark.parametrize("application", [0, 0x0F055112])
def test_a_foreign_database(tmp_path: Path, application: int) -> None:
    path = tmp_path / "wisdom.sqlite3"
    change(path, f"PRAGMA application_id = {application}", "CREATE TABLE measurement (id INTEGER PRIMARY KEY)")
    check_fresh(path, "foreign", path.read_bytes(), Wisdom(path))


def test_a_newer_schema(path: Path) -> None:
    change(path, f"PRAGMA user_version = {schema.SCHEMA_VERSION + 1}")
    check_fresh(path, "newer", path.read_bytes(), Wisdom(path))


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE plan",
        "ALTER TABLE measurement ADD COLUMN x",
        "CREATE TRIGGER t AFTER INSERT ON measurement BEGIN DELETE FROM plan; END",
        "CREATE VIEW v AS SELECT * FROM plan",
        "PRAGMA user_version = 0",
    ],
)
def test_other_tables(path: Path, statement: str) -> None:
    change(path, statement)
    check_fresh(path, "damaged", path.read_bytes(), Wisdom(path))


def test_statistics_that_a_user_made_do_no_harm(path: Path) -> None:
    change(path, "ANALYZE")
    assert Wisdom(path).measurements(ENVIRONMENT, PROBLEMS[0]) == some_measurements()


def change(path: Path, *statements: str, values: tuple[object, ...] = ()) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement, values)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def test_damage_found_while_in_use(path: Path) -> None:
    wisdom = Wisdom(path)
    assert wisdom.measurements(ENVIRONMENT, PROBLEMS[0]) == some_measurements()
    old = path.read_bytes()[:4096] + b"\xa5" * 20_000
    path.write_bytes(old)
    check_fresh(path, "damaged", old, wisdom)


def test_a_second_damaged_file_gets_a_name_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "wisdom.sqlite3"
    for _ in range(3):
        path.write_bytes(b"no database")
        with pytest.warns(WisdomWarning, match="renamed"):
            assert Wisdom(path).summary() == []
    assert len(aside(path)) == 3


def test_a_log_moves_with_its_database(path: Path) -> None:
    change(path, "PRAGMA application_id = 1")
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("CREATE TABLE precious AS SELECT 42 AS answer")
        assert Path(f"{path}-wal").stat().st_size > 0
        with pytest.warns(WisdomWarning, match="another program's"):
            fill(Wisdom(path))
        db.execute("INSERT INTO precious VALUES (43)")
    (moved,) = moved_aside(path, "foreign")
    with closing(sqlite3.connect(moved)) as db:
        assert db.execute("SELECT answer FROM precious").fetchall() == [(42,), (43,)]
    assert Wisdom(path).measurements(ENVIRONMENT, PROBLEMS[0]) == some_measurements()


def test_a_link_is_moved_and_not_its_target(path: Path, tmp_path: Path) -> None:
    target, link = tmp_path / "important.txt", tmp_path / "link.sqlite3"
    target.write_text("important")
    link.symlink_to(target)
    with pytest.warns(WisdomWarning, match="renamed"):
        fill(Wisdom(link))
    assert target.read_text() == "important"


@pytest.mark.parametrize("place", [18, 19])
def test_a_header_that_forbids_writing_or_reading(path: Path, place: int) -> None:
    old = bytearray(path.read_bytes())
    old[place] = 7
    path.write_bytes(old)
    with pytest.warns(WisdomWarning, match="damaged") as caught:
        fill(Wisdom(path))
    assert len(caught) == len(moved_aside(path, "damaged")) == 1
    assert Wisdom(path).measurements(ENVIRONMENT, PROBLEMS[0]) == some_measurements()


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=12)
def test_flipped_bytes_never_give_another_value(
    data: st.DataObject, image: Image, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What is read from a damaged file is what was written, or nothing."""
    path = tmp_path_factory.mktemp("flipped") / "wisdom.sqlite3"
    damaged = bytearray(image)
    places = st.one_of(st.integers(0, len(image) - 1), st.integers(0, 127))
    for place in data.draw(st.lists(places, min_size=1, max_size=20)):
        damaged[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    wisdom = Wisdom(path)
    with warnings.catch_warnings():
        # Some flips meet free space and change nothing; those that matter must warn, as other tests hold.
        warnings.simplefilter("ignore", WisdomWarning)
        check_subset(wisdom)
        wisdom.forget(solver="fft", stale={"fft": 2})
        check_subset(wisdom)
        # Damage may be met as late as here; then what was just written is moved aside with it.
        check_refilled(wisdom)
    assert not wisdom.in_memory


@hypothesis.given(length=st.integers(1, 10**6))
@hypothesis.settings(max_examples=8)
def test_a_store_cut_anywhere_gives_no_other_value(
    length: int, image: Image, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "wisdom.sqlite3"
    path.write_bytes(image[: 1 + length % len(image)])
    wisdom = Wisdom(path)
    with warnings.catch_warnings():
        # A cut through free space or into the last page's end changes nothing that is read.
        warnings.simplefilter("ignore", WisdomWarning)
        check_subset(wisdom)
        check_refilled(wisdom)
    assert not wisdom.in_memory


def check_refilled(wisdom: Wisdom) -> None:
    """Damage may be met as late as the third time; nothing that is read is ever another value."""
    for _ in range(3):
        fill(wisdom)
        check_subset(wisdom)
    check_complete(wisdom)


def check_complete(wisdom: Wisdom) -> None:
    found = wisdom.measurements_many(ENVIRONMENT, PROBLEMS)
    assert found == {problem: some_measurements() for problem in PROBLEMS}
    plans = wisdom.plans_many(ENVIRONMENT, PROBLEMS, CONSTRAINTS)
    assert plans == {problem: some_plan(problem) for problem in PROBLEMS}
    assert wisdom.profile(ENVIRONMENT) == {"bandwidth": 3e12}


def check_subset(wisdom: Wisdom) -> None:
    written = {(m.solver, m.version, m.config): m for m in some_measurements()}
    for measurements in wisdom.measurements_many(ENVIRONMENT, PROBLEMS).values():
        assert all(written[m.solver, m.version, m.config] == m for m in measurements)
    for problem, plan in wisdom.plans_many(ENVIRONMENT, PROBLEMS, CONSTRAINTS).items():
        assert plan == some_plan(problem)
    assert wisdom.profile(ENVIRONMENT) in (None, {"bandwidth": 3e12})
    wisdom.summary()
    wisdom.to_json()


def test_a_changed_value_is_noticed(path: Path) -> None:
    change(path, "UPDATE measurement SET time_ms = 0.001 WHERE config LIKE '%105%'")
    wisdom = Wisdom(path)
    with pytest.warns(WisdomWarning, match=f"{len(PROBLEMS)} rows.*checksum") as caught:
        found = wisdom.measurements_many(ENVIRONMENT, PROBLEMS)
    assert len(caught) == 1
    # It is said once.
    assert wisdom.measurements_many(ENVIRONMENT, PROBLEMS) == found
    assert found[PROBLEMS[0]] == [m for m in some_measurements() if m.config["tile"] != 105]


def test_a_plan_moved_to_another_problem_is_refused(path: Path) -> None:
    change(
        path,
        f"DELETE FROM plan WHERE problem = {tables.key_id('problem 0')}",
        f"UPDATE plan SET problem = {tables.key_id('problem 0')} WHERE problem = {tables.key_id('problem 1')}",
    )
    with pytest.warns(WisdomWarning, match="problem"):
        assert Wisdom(path).plan(ENVIRONMENT, "problem 0", CONSTRAINTS) is None


def forge(path: Path, table: str, **values: object) -> None:
    """Change the rows of the first problem and make their checksums right again, as an attacker would."""
    columns = {"measurement": rows.MEASUREMENT, "plan": rows.PLAN}[table]
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        (problem,) = db.execute("SELECT id FROM name WHERE text = ?", (PROBLEMS[0],)).fetchone()
        for name, value in values.items():
            db.execute(f"UPDATE {table} SET {name} = ? WHERE problem = ? ", (value, problem))
        selected = f"SELECT {', '.join(columns)} FROM {table} WHERE problem = ?"
        for row in db.execute(selected, (problem,)).fetchall():
            try:
                crc = rows.checksum(ENVIRONMENT, PROBLEMS[0], *rows.as_told(table, row))
            except TypeError:
                crc = 0
            key = row[2] if table == "measurement" else row[0]
            where = "config" if table == "measurement" else "constraints"
            db.execute(f"UPDATE {table} SET crc = ? WHERE problem = ? AND {where} = ?", (crc, problem, key))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("time_ms", -1.0),
        ("time_ms", float("inf")),
        ("time_ms", "fast"),
        ("time_ms", b"\xff"),
        ("time_ms", None),
        ("workspace", -1),
        ("workspace", 1.5),
        ("workspace", "none"),
        ("version", "one"),
        ("version", -1),
        ("solver", ""),
        ("solver", b"fft"),
        ("l2", 1e-6),
        ("spread", float("inf")),
        ("reason", b"\xff\xfe"),
        ("recorded", "yesterday"),
        ("recorded", 1e300),
        ("baseline_ms", -0.5),
        ("host_ms", -0.5),
        ("baseline_host_ms", "fast"),
        ("dispersion", float("inf")),
        ("runs", 1.5),
        ("runs", -1),
        ("load", 1.5),
        ("load", b"\x00"),
    ],
)
def test_measurements_that_were_tampered_with(path: Path, column: str, value: object) -> None:
    forge(path, "measurement", **{column: value})
    check_dropped(path, BATCH)


@pytest.mark.parametrize(
    "config",
    [
        "",
        "{",
        "[]",
        "null",
        '{"a":NaN}',
        '{"a":Infinity}',
        '{"a":1e999}',
        '{"a":null}',
        '{"a":{"b":1}}',
        '{"a": 1}',
        '{"b":1,"a":1}',
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"a":' + "9" * 10_000 + "}",
        b"\xc3\x28",
    ],
    ids=lambda config: ascii(config)[:20],
)
def test_configs_that_were_tampered_with(path: Path, config: str | bytes) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        (problem,) = db.execute("SELECT id FROM name WHERE text = ?", (PROBLEMS[0],)).fetchone()
        db.execute("DELETE FROM measurement WHERE problem = ? AND workspace > 0", (problem,))
    forge(path, "measurement", config=config)
    check_dropped(path, 1)


def check_dropped(path: Path, count: int) -> None:
    """The first problem's rows are dropped with one warning that counts them; the others' are as they were."""
    wisdom = Wisdom(path)
    with pytest.warns(WisdomWarning, match=rf"{count} rows? not valid and ignored; the first: measurement: ") as caught:
        found = wisdom.measurements_many(ENVIRONMENT, PROBLEMS)
    assert len(caught) == 1
    assert found == {problem: some_measurements() if problem != PROBLEMS[0] else [] for problem in PROBLEMS}
    assert wisdom.summary()
    wisdom.record(ENVIRONMENT, PROBLEMS[0], some_measurements())
    kept = {m.config: m for m in wisdom.measurements(ENVIRONMENT, PROBLEMS[0])}
    assert [kept[m.config] for m in some_measurements()] == some_measurements()


def nested_plan(levels: int) -> str:
    text = '{"format":1,"problem":"problem 0","solver":"s","version":1,"config":{},"children":['
    end = '],"counts":[%s],"time_ms":null,"workspace":0,"constant":0,"error":null,"label":""}'
    return text * levels + end % "" + (end % "1") * (levels - 1)


@pytest.mark.parametrize(
    "plan",
    [
        "",
        "{}",
        "not json",
        b"\xff",
        '{"children":' * 5000,
        nested_plan(60),
        nested_plan(1).replace('"workspace":0', '"workspace":-1'),
        nested_plan(1).replace('"workspace":0', '"workspace":' + "9" * 400),
        nested_plan(1).replace('"time_ms":null', '"time_ms":NaN'),
        nested_plan(1).replace('"time_ms":null', '"time_ms":' + "9" * 400),
        nested_plan(1).replace('"error":null', '"error":[-1,0]'),
        nested_plan(1).replace('"version":1', '"version":-1'),
        nested_plan(1).replace('"format":1', '"format":2'),
        nested_plan(1).replace('"solver":"s"', '"solver":""'),
        nested_plan(1).replace('"config":{}', '"config":{"a":1e999}'),
        nested_plan(1).replace("problem 0", "problem 1"),
        nested_plan(2).replace('"counts":[1]', '"counts":[0]'),
    ],
    ids=lambda plan: ascii(plan)[-40:],
)
def test_plans_that_were_tampered_with(path: Path, plan: str | bytes) -> None:
    forge(path, "plan", plan=plan)
    wisdom = Wisdom(path)
    with pytest.warns(WisdomWarning, match="1 row not valid and ignored; the first: plan"):
        found = wisdom.plans_many(ENVIRONMENT, PROBLEMS, CONSTRAINTS)
    assert found == {problem: some_plan(problem) for problem in PROBLEMS[1:]}
    assert wisdom.forget(problem_contains=PROBLEMS[0], stale={"fft": 1, "micro_batch": 1}) == 1


def test_the_plans_that_are_tampered_with_are_otherwise_good(path: Path) -> None:
    forge(path, "plan", plan=nested_plan(1))
    plan = Wisdom(path).plan(ENVIRONMENT, PROBLEMS[0], CONSTRAINTS)
    assert plan is not None
    assert plan.solver == "s"
