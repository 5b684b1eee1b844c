"""Files are written as a whole or not at all."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.files import SavedSolver, read_weights, write_mean, write_solverstate, write_weights
from tilewise.machine.files import replacing, whole_file


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Let no file of this process grow beyond 64 KiB, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


LARGE = np.ones((10, 100, 100), np.float32)
WRITERS: dict[str, Callable[[Path], None]] = {
    "net.caffemodel": lambda path: write_weights(path, {"a": [LARGE]}),
    "net.h5": lambda path: write_weights(path, {"a": [LARGE]}),
    "net.solverstate": lambda path: write_solverstate(path, SavedSolver(1, "", 0, [LARGE])),
    "net.solverstate.h5": lambda path: write_solverstate(path, SavedSolver(1, "", 0, [LARGE])),
    "net.binaryproto": lambda path: write_mean(path, LARGE),
}


@pytest.mark.usefixtures("small_disk")
@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"old")
    with pytest.raises(OSError, match=r"File too large|cannot be written"):
        WRITERS[name](path)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == [name]


@pytest.mark.parametrize("room", [0, 2048, 1 << 16, 300_000])
def test_a_disk_that_is_full_somewhere_in_an_hdf5_file_is_an_error_and_no_crash(tmp_path: Path, room: int) -> None:
    """HDF5's own library ended the process where several blobs were left in memory."""
    path = tmp_path / "net.h5"
    path.write_bytes(b"old")
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        try:
            write_weights(path, {f"layer{index}": [np.ones(3000 * index, np.float32)] for index in range(20)})
        except OSError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["net.h5"]


def test_the_new_file_takes_the_place_of_the_old_one_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as partial:
        partial.write_bytes(b"first")
        assert not path.exists()
        assert partial.parent == path.parent
    with replacing(path) as partial:
        partial.write_bytes(b"second")
        assert path.read_bytes() == b"first"
    assert path.read_bytes() == b"second"
    stopped = replacing(path)
    stopped.__enter__().write_bytes(b"third")
    assert not stopped.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert path.read_bytes() == b"second"
    assert names(tmp_path) == ["file"]


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    mask = os.umask(0o027)
    try:
        with replacing(path) as partial:
            partial.write_bytes(b"first")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    mask = os.umask(0o027)
    try:
        with replacing(path) as partial:
            partial.unlink()
            partial.touch(0o600)  # as writers do that put a file of their own there
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    link.symlink_to("file")
    with replacing(link) as partial:
        partial.write_bytes(b"second")
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    assert link.is_symlink()
    assert path.read_bytes() == b"second"


def test_what_is_no_file_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for place in (tmp_path, pipe):
        with pytest.raises(OSError, match="is no file; a new path or that of a file would do"), replacing(place):
            pass
        with pytest.raises(CaffeError, match="is no file; a new path"), replacing(place, CaffeError):
            pass
    with pytest.raises(CaffeError, match="is no file; a new path"):
        write_mean(pipe, LARGE)
    with pytest.raises(CaffeError, match="pipe is no file"):
        read_weights(pipe)
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "none" / "file"):
        pass
    assert names(tmp_path) == ["pipe"]


def test_a_name_as_long_as_names_may_be_and_an_ending_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / ("🧠" * 60)
    with replacing(path, ending=".json.gz") as partial:
        assert partial.name.endswith(".json.gz")
        partial.write_bytes(b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == [path.name]


def test_a_failure_that_takes_the_new_file_along_is_the_one_that_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    stopped = replacing(path)
    stopped.__enter__().unlink()
    assert not stopped.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_text_goes_into_a_pipe_and_leaves_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with whole_file(pipe) as file:
        file.write("text")
    assert os.read(reader, 100) == b"text"
    closed = whole_file(pipe)
    closed.__enter__().write("nobody reads")
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        closed.__exit__(None, None, None)
    assert names(tmp_path) == ["pipe"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_whole_text_files(tmp_path: Path) -> None:
    path = tmp_path / ("🧠" * 60)
    with whole_file(path) as file:
        file.write("new\n")
        assert not path.exists()
    assert path.read_bytes() == b"new\n"
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(ZeroDivisionError), whole_file(link) as file:
        print("half", 1 // 0, file=file)
    assert path.read_text() == "new\n"
    with whole_file(link) as file:
        file.write("newer")
    assert link.is_symlink()
    assert path.read_text() == "newer"
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, "link"}


def test_weights_that_are_in_use_stay_readable_while_their_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "net.caffemodel"
    write_weights(path, {"a": [np.full(100_000, 1, np.float32)]})
    old = read_weights(path)
    write_weights(path, {"a": [old["a"][0][:5] + 1]})
    assert (old["a"][0] == 1).all()
    assert (read_weights(path)["a"][0] == 2).all()
