"""Compiled kernels on disk: found again, by one key only, and never used where a byte is wrong."""

from __future__ import annotations

import concurrent.futures
import warnings
from pathlib import Path

import pytest

from tilewise.kernels.building import cubins
from tilewise.kernels.building.kept import NotKept, kept_only
from tilewise.kernels.cuda import launch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(
        "tilewise.machine.cache.kernel_dir", lambda: tmp_path / "kernels"
    )  # not the one that tests share
    return tmp_path


def test_what_is_kept_is_found_again(folder: Path) -> None:
    path = cubins.path_of("source", "sm_90", "13.0")
    assert cubins.load(path) is None
    cubins.store(path, b"code")
    assert cubins.load(path) == b"code"
    assert [p for p in folder.rglob("*") if p.is_file()] == [path]


def test_text_architecture_and_compiler_tell_apart(folder: Path) -> None:
    keys = [("a", "b", "c"), ("a", "b", "d"), ("a", "x", "c"), ("x", "b", "c"), ("ab", "", "c"), ("a", "", "bc")]
    assert len({cubins.path_of(*key) for key in keys}) == len(keys)


@pytest.mark.parametrize("place", [0, 31, 32, -1])
def test_a_wrong_byte_is_noticed(folder: Path, place: int) -> None:
    path = cubins.path_of("source", "sm_90", "13.0")
    cubins.store(path, b"some code")
    kept = bytearray(path.read_bytes())
    kept[place] ^= 1
    path.write_bytes(kept)
    assert cubins.load(path) is None
    path.write_bytes(bytes(kept[:20]))
    assert cubins.load(path) is None
    cubins.store(path, b"again")
    assert cubins.load(path) == b"again"


def test_a_folder_that_cannot_be_made_keeps_nothing(folder: Path) -> None:
    (folder / "kernels").write_text("a file")
    path = cubins.path_of("source", "sm_90", "13.0")
    with pytest.warns(RuntimeWarning, match="TILEWISE_CACHE_DIR"):
        cubins.store(path, b"code")
    assert cubins.load(path) is None


def test_code_that_others_may_have_written_is_not_loaded_and_said_once(folder: Path) -> None:
    path = cubins.path_of("source", "sm_90", "13.0")
    cubins.store(path, b"code")
    path.parent.chmod(0o777)
    with pytest.warns(RuntimeWarning, match=f"chmod go-w {path.parent}"):
        assert cubins.load(path) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cubins.store(path, b"mine")
        assert cubins.load(path) is None
    path.parent.chmod(0o700)
    assert cubins.load(path) == b"code"


def test_many_writers_of_one_kernel(folder: Path) -> None:
    path = cubins.path_of("source", "sm_90", "13.0")
    code = bytes(range(256)) * 400

    def work(_: int) -> bool:
        cubins.store(path, code)
        return cubins.load(path) == code

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))
    assert list(path.parent.iterdir()) == [path]


def test_a_kernel_is_compiled_once(folder: Path) -> None:
    if launch.unavailable():
        pytest.skip(launch.unavailable())
    source = 'extern "C" __global__ void nothing(float* p) { p[0] = 1.f; }'
    with pytest.raises(NotKept), kept_only():
        launch.compile_cubin(source, "sm_90")
    try:
        first = launch.compile_cubin(source, "sm_90")
    except Exception as error:
        if "nvrtc" in str(error) and "NotFound" in type(error).__name__:
            pytest.skip("no NVRTC library")
        raise
    (path,) = (p for p in folder.rglob("*.cubin"))
    assert cubins.load(path) == bytes(first.code)
    written = path.stat().st_mtime_ns
    with kept_only():
        assert bytes(launch.compile_cubin(source, "sm_90").code) == bytes(first.code)
    assert path.stat().st_mtime_ns == written
