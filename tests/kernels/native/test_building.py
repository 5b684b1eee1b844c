"""The C module for launches: compiled once, kept, made anew where its file is broken, done without where it must be."""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.kernels.native.standin import COMPILER, Standin

from tilewise.kernels.building import code_files
from tilewise.kernels.native import building, extension
from tilewise.kernels.native.extension import Extension, Unavailable

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of kernels."""
    found = tmp_path / "kernels"
    monkeypatch.setattr("tilewise.machine.cache.kernel_dir", lambda: found)
    return found


def kept(folder: Path) -> Path:
    (found,) = (folder / "native").iterdir()
    return found


def no_compiler(wanted: Extension) -> list[str]:
    raise AssertionError("compiled again")


def test_it_is_compiled_once_without_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strict = replace(building.EXTENSION, flags=(*building.EXTENSION.flags, "-Wall", "-Wextra", "-Werror"))
    monkeypatch.setattr(building, "EXTENSION", strict)
    assert building.load().LaunchList
    assert kept(folder).stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(extension, "_compiler", no_compiler)
    assert building.load().LaunchList


@pytest.mark.parametrize("whole", [True, False])
def test_a_broken_file_is_made_anew(folder: Path, whole: bool) -> None:
    """Cut short, or whole by its checksum but nothing that can be loaded."""
    building.load()
    path = kept(folder)
    if whole:
        code_files.store(path, b"no library")
    else:
        path.write_bytes(path.read_bytes()[:-1000])
    broken = path.read_bytes()
    assert building.load().LaunchList
    assert path.read_bytes() != broken
    assert code_files.load(path)


def test_a_file_that_others_may_write_is_not_loaded(folder: Path) -> None:
    building.load()
    path = kept(folder)
    path.chmod(0o666)
    with pytest.warns(RuntimeWarning, match="may be written by other users"):
        assert building.load().LaunchList
    assert path.stat().st_mode & 0o777 in (0o600, 0o666)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_processes_may_compile_at_the_same_time(folder: Path, standin: Standin) -> None:
    """Each has the module in the end, and what is kept is whole."""
    children = []
    for _ in range(3):
        child = os.fork()
        if not child:
            try:
                building.load().Driver(str(standin.path))
            except BaseException:
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert code_files.load(kept(folder))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not asked yet, of a torch for CUDA."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in ("_loading", "_native", "start"):
        monkeypatch.setattr(building, name, functools.cache(getattr(building, name).__wrapped__))


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("CC", "/no/such/compiler", "/no/such/compiler cannot be run"),
        ("CC", "false", "false ended with 1: it says nothing"),
        ("CC", f"{COMPILER} --no-such-option", "no-such-option"),
        ("CC", "true", "true ended with 0"),
        ("TILEWISE_NATIVE", "0", "TILEWISE_NATIVE is 0"),
    ],
)
def test_where_it_cannot_be_compiled_launches_stay_in_python(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(variable, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        building.start()
        assert building.native() is None
    assert reason in building.why_not()
    assert not folder.exists()


@pytest.mark.usefixtures("fresh")
def test_where_there_are_no_header_files_or_no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(folder))
    assert building.native() is None
    assert "no C compiler: one named cc, gcc, clang or by CC would do" in building.why_not()
    monkeypatch.setattr(extension.sysconfig, "get_paths", lambda scheme: {"include": str(folder)})
    with pytest.raises(Unavailable, match=r"has no Python\.h"):
        extension.headers()


@pytest.mark.usefixtures("fresh")
def test_without_a_driver_launches_stay_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "DRIVER", "no_such_driver.so")
    assert building.native() is None
    assert "no_such_driver.so" in building.why_not()


@pytest.mark.usefixtures("fresh")
def test_the_switch_takes_1_and_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_NATIVE", "maybe")
    with pytest.raises(ValueError, match="TILEWISE_NATIVE='maybe': 1 or 0 would do"):
        building.start()


@pytest.mark.usefixtures("fresh")
def test_a_torch_without_cuda_compiles_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    building.start()
    assert building.why_not() == "this torch has no CUDA"
    assert not folder.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.usefixtures("fresh")
def test_a_forked_process_that_inherits_an_attempt_goes_on(folder: Path) -> None:
    """The thread that waits for the compiler is not there: launches stay in Python."""
    building.start()
    child = os.fork()
    if not child:
        os._exit(0 if building.native() is None or building.why_not() == "" else 1)
    assert os.waitpid(child, 0)[1] == 0
    building.why_not()
