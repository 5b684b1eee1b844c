"""Files that may be believed, by real modes, owners, links and pipes."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.machine import trusted

OTHER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "inner" / "file"
    trusted.write(path, b"content")
    return path


def test_what_is_written_is_read(file: Path) -> None:
    assert trusted.read(file) == b"content"
    trusted.write(file, b"more")
    assert trusted.read(file) == b"more"
    assert list(file.parent.iterdir()) == [file]
    trusted.require(file.parent)
    trusted.require_file(file)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_modes_are_the_same_under_every_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        trusted.write(tmp_path / "a" / "b" / "file", b"content")
        trusted.make_folders(tmp_path / "c" / "d")
    finally:
        os.umask(before)
    assert (tmp_path / "a" / "b" / "file").stat().st_mode & 0o7777 == 0o600
    assert {path.stat().st_mode & 0o7777 for path in (tmp_path / "a", tmp_path / "a" / "b")} == {0o700}
    assert not (tmp_path / "c").stat().st_mode & 0o077


def refused(path: Path, *reasons: str) -> None:
    """By everything that reads; the message names what is at fault and what would do."""
    for ask in (trusted.read, trusted.require_file):
        with pytest.raises(trusted.Untrusted) as caught:
            ask(path)
        assert all(reason in str(caught.value) for reason in (*reasons, "would do"))


@given(st.integers(0, 0o777))
def test_modes_of_files_and_folders(tmp_path_factory: pytest.TempPathFactory, mode: int) -> None:
    """A file is read where neither it nor any folder on the way may be written by the group or by all."""
    base = tmp_path_factory.mktemp("modes")
    path = base / "folder" / "inner" / "file"
    trusted.write(path, b"content")
    for place in (path, path.parent, path.parent.parent):
        before = place.stat().st_mode
        place.chmod(mode | 0o700)
        if mode & 0o022:
            refused(path, str(place), "chmod go-w")
        else:
            assert trusted.read(path) == b"content"
        place.chmod(before)


def test_a_sticky_folder_is_passed_and_not_a_home(file: Path) -> None:
    """As /tmp on the way; directly in it anybody may put a file first."""
    file.parent.parent.chmod(0o1777)
    assert trusted.read(file) == b"content"
    trusted.write(file, b"again")
    file.parent.parent.chmod(0o700)
    file.parent.chmod(0o1777)
    refused(file, str(file.parent))
    with pytest.raises(trusted.Untrusted):
        trusted.write(file, b"again")


@as_root
@pytest.mark.parametrize("up", [0, 1, 2])
def test_what_belongs_to_others_is_refused(file: Path, up: int) -> None:
    """Also by root, and whatever the modes are."""
    place = (file, file.parent, file.parent.parent)[up]
    os.chown(place, OTHER, OTHER)
    refused(file, str(place), str(OTHER))
    if up:
        with pytest.raises(trusted.Untrusted):
            trusted.write(file, b"again")
    else:
        trusted.write(file, b"again")
        assert trusted.read(file) == b"again"


@as_root
def test_a_user_reads_what_root_wrote_and_nobody_else(tmp_path: Path) -> None:
    # As many as there are with and without workers, and none above what pytest made.
    made = itertools.takewhile(lambda folder: folder.name.startswith(("pytest-", "popen-")), tmp_path.parents)
    for folder in (tmp_path, *made):
        folder.chmod(0o755)
    program = f"""
import os, sys
sys.path.insert(0, {str(Path(trusted.__file__).parents[1])!r})
from pathlib import Path
from tilewise.machine import trusted
os.setgid({OTHER}), os.setuid({OTHER})
for name in ("root", "own", "third"):
    try:
        print(trusted.read(Path({str(tmp_path)!r}) / name / "file").decode())
    except trusted.Untrusted as error:
        print(type(error).__name__)
"""
    for name, owner in (("root", 0), ("own", OTHER), ("third", OTHER + 1)):
        trusted.write(tmp_path / name / "file", name.encode())
        for place in (tmp_path / name, tmp_path / name / "file"):
            place.chmod(0o755)
            os.chown(place, owner, owner)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["root", "own", "Untrusted"]


def fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def connection(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)
    path.chmod(0o600)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [fifo, connection, device, Path.mkdir])
def test_only_regular_files_are_read(file: Path, make: Callable[[Path], None]) -> None:
    """None of them is waited for."""
    file.unlink()
    make(file)
    with pytest.raises((trusted.Untrusted, OSError)):
        trusted.read(file)
    with pytest.raises(trusted.Untrusted):
        trusted.require_file(file)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A file in a folder that others may write."""
    path = tmp_path / "elsewhere" / "file"
    trusted.write(path, b"planted")
    path.parent.chmod(0o777)
    yield path
    path.parent.chmod(0o700)


def test_links_lead_where_the_same_is_asked(file: Path, elsewhere: Path, tmp_path: Path) -> None:
    for name, target in {"absolute": file, "relative": "inner/../inner/file", "folder": "./inner"}.items():
        (tmp_path / "folder" / name).symlink_to(target)
    for way in ("absolute", "relative", "folder/file"):
        assert trusted.read(tmp_path / "folder" / way) == b"content"
    trusted.write(tmp_path / "folder" / "folder" / "more", b"more")
    assert trusted.read(file.with_name("more")) == b"more"
    for name, target in {"file": elsewhere, "there": elsewhere.parent, "up": "../elsewhere"}.items():
        (tmp_path / "folder" / name).symlink_to(target)
    for way in ("file", "there/file", "up/file"):
        refused(tmp_path / "folder" / way, str(elsewhere.parent))


def test_links_in_circles_and_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "nothing").symlink_to("absent")
    with pytest.raises(OSError, match="symbolic links"):
        trusted.read(tmp_path / "circle" / "file")
    with pytest.raises(FileNotFoundError):
        trusted.read(tmp_path / "nothing")
    trusted.write(tmp_path / "nothing" / "file", b"content")
    assert trusted.read(tmp_path / "absent" / "file") == b"content"


@as_root
def test_a_link_of_somebody_else_is_not_followed(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    assert trusted.read(link) == b"content"
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    refused(link, str(link))


def test_a_path_that_is_not_absolute_is_nowhere() -> None:
    with pytest.raises(FileNotFoundError):
        trusted.read(Path("~/file"))
    with pytest.raises(FileNotFoundError):
        trusted.write(Path("~/file"), b"")


def test_nothing_stays_open(file: Path, elsewhere: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else []
    for _ in range(3):
        trusted.read(file)
        refused(elsewhere)
        with pytest.raises(FileNotFoundError):
            trusted.read(file.with_name("absent"))
    if before:
        assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_folder_in_a_files_place_is_named_and_stays_open_nowhere(tmp_path: Path) -> None:
    (tmp_path / "kernel").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(trusted.Untrusted, match="kernel is no regular file; removing it would do"):
            trusted.read(tmp_path / "kernel")
    assert len(os.listdir("/proc/self/fd")) == before
