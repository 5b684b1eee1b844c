"""Where wisdom can be kept and how: journals, network file systems, directories that cannot be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.wisdom_workers import (
    CONSTRAINTS,
    ENVIRONMENT,
    PROBLEMS,
    fill,
    filled,
    integrity,
    journal_of,
    some_measurements,
    some_plan,
)

from tilewise.wisdom import Wisdom, WisdomWarning, database, paths


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store that holds what ``fill`` keeps."""
    return filled(tmp_path / "wisdom.sqlite3")


def test_no_directory_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "cache" / "wisdom.sqlite3"
    check_in_memory(Wisdom(path), str(path))


def test_the_path_is_a_directory(tmp_path: Path) -> None:
    check_in_memory(Wisdom(tmp_path), str(tmp_path))
    assert tmp_path.is_dir()


def test_no_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wisdom = Wisdom()
    # What platformdirs gives a user without one.
    wisdom._database.path = Path("~/.cache/tilewise/wisdom.sqlite3")
    check_in_memory(wisdom, "TILEWISE_CACHE_DIR")
    assert list(tmp_path.iterdir()) == []


def check_in_memory(wisdom: Wisdom, text: str) -> None:
    with pytest.warns(WisdomWarning, match="in memory") as caught:
        fill(wisdom)
    assert len(caught) == 1
    assert text in str(caught[0].message)
    assert wisdom.in_memory
    assert wisdom.measurements(ENVIRONMENT, PROBLEMS[0]) == some_measurements()
    assert wisdom.plan(ENVIRONMENT, PROBLEMS[0], CONSTRAINTS) == some_plan(PROBLEMS[0])


def loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("spoil", [loop, Path.mkdir])
def test_rollback_journal_where_wal_cannot_work(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """SQLite cannot open, or not write, its shared memory, as on file systems that have none."""
    path = tmp_path / "wisdom.sqlite3"
    spoil(Path(f"{path}-shm"))
    wisdom = Wisdom(path)
    fill(wisdom)
    assert journal_of(path) == "delete"
    assert not wisdom.in_memory
    assert Wisdom(path).measurements(ENVIRONMENT, PROBLEMS[0]) == some_measurements()
    assert integrity(path) == "ok"


@pytest.mark.parametrize("spoil", [loop, Path.mkdir])
def test_a_store_in_wal_where_that_stopped_working(path: Path, spoil: Callable[[Path], None]) -> None:
    assert journal_of(path) == "wal"
    spoil(Path(f"{path}-shm"))
    wisdom = Wisdom(path)
    assert wisdom.measurements(ENVIRONMENT, PROBLEMS[0]) == some_measurements()
    wisdom.record(ENVIRONMENT, "new", some_measurements())
    assert journal_of(path) == "delete"
    assert Wisdom(path).measurements(ENVIRONMENT, "new") == some_measurements()
    assert not wisdom.in_memory


def test_a_store_in_wal_that_came_to_a_network_file_system(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "on_network", lambda _: True)
    wisdom = Wisdom(path)
    assert wisdom.measurements(ENVIRONMENT, PROBLEMS[0]) == some_measurements()
    assert journal_of(path) == "delete"
    fill(wisdom)
    assert journal_of(path) == "delete"


MOUNTS = r"""
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:26 / /home rw,relatime shared:1 - nfs4 server:/home rw,vers=4.2
31 30 0:27 / /home/local rw,relatime - xfs /dev/sdb rw
32 22 0:28 / /with\040space rw - fuse.sshfs host: rw
33 22 0:29 / /over rw - ext4 /dev/sdc rw
34 22 0:30 / /over rw master:7 - lustre scratch rw
damaged line
"""


@pytest.mark.parametrize(
    ("directory", "filesystem", "network"),
    [
        ("/", "ext4", False),
        ("/var/cache", "ext4", False),
        ("/home/me/.cache/tilewise", "nfs4", True),
        ("/homeless", "ext4", False),
        ("/home/local/x", "xfs", False),
        ("/with space/x", "fuse.sshfs", True),
        ("/over", "lustre", True),
    ],
)
def test_file_systems_by_mount_point(directory: str, filesystem: str, network: bool) -> None:
    assert paths.filesystem_of(Path(directory), MOUNTS) == filesystem
    assert paths.is_network(filesystem) is network
    assert paths.filesystem_of(Path(directory), "") == ""


def test_this_machine_tells_its_file_systems(tmp_path: Path) -> None:
    assert isinstance(paths.on_network(tmp_path), bool)
    if Path("/proc/self/mountinfo").exists():
        assert paths.filesystem_of(Path("/proc"), Path("/proc/self/mountinfo").read_text()) == "proc"


def test_the_memory_copy_leaves_out_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "wisdom.sqlite3"
    path.write_bytes(b"no database" * 1000)
    assert database._memory_copy(path) is None
