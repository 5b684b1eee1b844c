"""Where wisdom can be kept and how: journals, network file systems, directories that cannot be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.wisdom.wisdom_workers import (
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

from tilewise.kernels.building import cubins
from tilewise.wisdom import Wisdom, WisdomWarning, database, paths

ROOT = Path(__file__).parents[2]


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


HOMES = {
    "none": {"HOME": None},
    "relative": {"HOME": "some/place"},
    "missing": {"HOME": "/nowhere/home"},
    "not writable": {"HOME": "/"},
    "a file": {"HOME": "/etc/passwd"},
    "a variable": {"HOME": None, "TILEWISE_CACHE_DIR": "~/cache"},
    "no file system": {"TILEWISE_CACHE_DIR": "/proc/tilewise"},
    "a folder that is gone": {"TILEWISE_CACHE_DIR": "cache"},
}
"""Variables of a user without an entry, who may write nowhere but in the working directory."""

HOMELESS = """
import copy, json, os, pickle, sys, warnings
from pathlib import Path
import platformdirs, sqlite3
from tests.other_user import become
from tests.wisdom.wisdom_workers import ENVIRONMENT, PROBLEMS, fill, some_measurements
from tilewise.machine import cache
from tilewise.kernels.building import cubins
from tilewise.wisdom import Wisdom
if os.environ.get("TILEWISE_CACHE_DIR") == "cache":
    os.mkdir("gone"), os.chdir("gone"), os.rmdir("../gone")
if os.geteuid() == 0:
    become()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    if sys.argv[1] == "code":
        cubins.store(cubins.path_of("a", "b", "c"), b"code")
        assert cubins.load(cubins.path_of("a", "b", "c")) is None
    for wisdom in (Wisdom(), pickle.loads(pickle.dumps(Wisdom()))):
        assert wisdom.measurements(ENVIRONMENT, PROBLEMS[0]) == []
        fill(wisdom)
        assert wisdom.in_memory
        assert wisdom.measurements(ENVIRONMENT, PROBLEMS[0]) == some_measurements()
    cubins.store(cubins.path_of("a", "b", "c"), b"code")
print(json.dumps([str(one.message) for one in said]))
"""


@pytest.mark.parametrize("first", ["wisdom", "code"])
@pytest.mark.parametrize("home", HOMES)
def test_no_home_directory(tmp_path: Path, home: str, first: str) -> None:
    """One warning, whichever is kept first, and nothing on disk."""
    if os.geteuid() and HOMES[home].get("HOME", "~") is None:
        pytest.skip("this user has an entry, and so a home directory")
    tmp_path.chmod(0o777)
    variables = {
        name: value for name, value in os.environ.items() if name not in ("TILEWISE_CACHE_DIR", "XDG_CACHE_HOME")
    }
    variables |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    for name, value in HOMES[home].items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value
    done = subprocess.run(
        [sys.executable, "-c", HOMELESS, first],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (text,) = json.loads(done.stdout)
    assert "in memory" in text
    assert "TILEWISE_CACHE_DIR" in text
    assert list(tmp_path.iterdir()) == []


SHARED = """
import json, os, sys, warnings
import sqlite3
from tests.other_user import become
from tests.wisdom.wisdom_workers import ENVIRONMENT, PROBLEMS, some_measurements
from tilewise.kernels.building import cubins
from tilewise.wisdom import Wisdom
become()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    assert cubins.load(cubins.path_of("a", "b", "c")) == b"code"
    assert Wisdom().measurements(ENVIRONMENT, PROBLEMS[0]) == some_measurements()
    cubins.store(cubins.path_of("another", "b", "c"), b"code")
print(json.dumps([str(one.message) for one in said]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is another user")
def test_a_shared_cache_that_root_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the manual says it is made: others load from it, and are told once that nothing is added."""
    shared = tmp_path / "shared"
    monkeypatch.setattr("tilewise.machine.cache.kernel_dir", lambda: shared / "kernels")
    cubins.store(cubins.path_of("a", "b", "c"), b"code")
    filled(shared / "wisdom.sqlite3")
    for place in (shared, *shared.rglob("*")):
        place.chmod(0o755 if place.is_dir() else 0o644)
    variables = {**os.environ, "TILEWISE_CACHE_DIR": str(shared), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", SHARED], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (text,) = json.loads(done.stdout)
    assert f"{shared} cannot be written" in text


FULL = """
import json, resource, sys, warnings
from pathlib import Path
from tests.wisdom.wisdom_workers import ENVIRONMENT, PROBLEMS, fill, some_measurements
from tilewise.kernels.building import cubins
from tilewise.wisdom import Wisdom
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file grows, as where no room is left
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    wisdom = Wisdom()
    fill(wisdom)
    assert wisdom.measurements(ENVIRONMENT, PROBLEMS[0]) == some_measurements()
    path = cubins.path_of("a", "b", "c")
    for _ in range(2):
        cubins.store(path, b"code")
        assert cubins.load(path) is None
    assert list(path.parent.iterdir()) == []
print(json.dumps([str(one.message) for one in said]))
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """What is measured is kept in memory, what is compiled is compiled anew; each says so once."""
    variables = {**os.environ, "TILEWISE_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    # The limit counts for pipes' other ends and stdout's files, too: they are pipes.
    done = subprocess.run([sys.executable, "-c", FULL], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wisdom, code = json.loads(done.stdout)
    assert "in memory" in wisdom
    assert "compiled anew" in code


@pytest.mark.parametrize("side", ["", "-wal", "-shm", "-journal", ".lock"])
@pytest.mark.parametrize("store", [False, True], ids=["fresh", "filled"])
def test_a_pipe_in_the_place_of_a_file(tmp_path: Path, side: str, store: bool) -> None:
    """Nobody waits for its other end; what the store holds is still used where it can be read."""
    path = tmp_path / "wisdom.sqlite3"
    if store:
        filled(path)
    place = Path(f"{path}{side}")
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    wisdom = Wisdom(path)
    with pytest.warns(WisdomWarning, match="no regular file"):
        fill(wisdom)
    assert wisdom.in_memory
    assert wisdom.measurements(ENVIRONMENT, PROBLEMS[0]) == some_measurements()
    assert place.is_fifo()


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
