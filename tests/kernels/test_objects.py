"""Machine code of CPU kernels on disk: loaded without Numba, and not used where anything about it is in doubt."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)

import tilewise
from tilewise.kernels.building import code_files, objects
from tilewise.kernels.cpu import compiling
from tilewise.machine import cache, trusted

LOAD = """
import ctypes, sys
from tilewise.machine import cache
from tilewise.machine import trusted
cache.kernel_dir = lambda: __import__("pathlib").Path(sys.argv[1])
from tilewise.kernels.cpu import compiling
places = compiling.load(4)
assert all(places) and len(set(places)) == 3
assert "numba" not in sys.modules
"""


@pytest.fixture
def object_file() -> Path:
    """That of one of the kernels for 4 lanes, compiled before."""
    compiling.load(4)
    return Path(cache.kernel_dir()) / "cpu" / f"moves_4-{objects.machine_key()}.o"


def test_a_second_process_loads_kernels_without_numba(object_file: Path) -> None:
    kernels = object_file.parent.parent
    done = subprocess.run([sys.executable, "-c", LOAD, str(kernels)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


def test_names_that_an_object_wants_are_read_from_it(object_file: Path) -> None:
    kept = code_files.load(object_file)
    assert kept is not None
    found = objects._unpacked(kept)
    names = objects.undefined(found.code)
    assert names is not None
    assert names == found.wanted
    assert all(name in ("memcpy", "memset") or name.startswith(("Py", *objects.RUNTIME)) for name in names)
    assert found.entry not in names
    assert objects.undefined(b"\xcf\xfa\xed\xfe" + found.code[4:]) is None


def test_what_is_in_doubt_is_compiled_again(object_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is cut short is no file; an object that wants what nobody has, or lacks its function, is told."""
    kept = code_files.load(object_file)
    assert kept is not None
    good = objects._unpacked(kept)
    monkeypatch.setattr("tilewise.machine.cache.kernel_dir", lambda: tmp_path)
    made: list[str] = []

    def make() -> objects.Code:
        made.append("made")
        return good

    assert objects.address("first", make)
    assert made == ["made"]
    assert objects.address("first", make)
    assert made == ["made"]
    (path,) = (tmp_path / "cpu").glob("first-*.o")
    path.write_bytes(path.read_bytes()[:-100])
    assert objects.address("first", make)
    assert len(made) == 2
    for bad in (good._replace(wanted=("no_such_name",)), good._replace(entry="no_such_function")):
        code_files.store(path, objects._packed(bad))
        with pytest.warns(RuntimeWarning, match="a compiled kernel cannot be read"):
            assert objects.address("first", make)
    assert len(made) == 4


def test_a_directory_that_cannot_be_written_is_told(
    object_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = code_files.load(object_file)
    assert kept is not None
    (tmp_path / "file").touch()
    monkeypatch.setattr("tilewise.machine.cache.kernel_dir", lambda: tmp_path / "file" / "kernels")
    with pytest.warns(RuntimeWarning, match="TILEWISE_CACHE_DIR"):
        assert objects.address("any", lambda: objects._unpacked(kept))


@pytest.mark.parametrize("plant", ["mode", "owner", "pipe", "link"])
def test_an_object_of_somebody_else_never_runs(
    object_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: str
) -> None:
    """It is compiled anew, said once, and kept in the place of what was there."""
    kept = code_files.load(object_file)
    assert kept is not None
    good = objects._unpacked(kept)
    monkeypatch.setattr("tilewise.machine.cache.kernel_dir", lambda: tmp_path / "kernels")
    made: list[str] = []

    def make() -> objects.Code:
        made.append("made")
        return good

    objects.address("first", make)
    (path,) = (tmp_path / "kernels" / "cpu").glob("first-*.o")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == path.parent.parent.stat().st_mode & 0o777 == 0o700
    if plant == "mode":
        path.chmod(0o666)
    elif plant == "owner":
        if os.geteuid():
            pytest.skip("only root gives files away")
        os.chown(path, 54321, 54321)
    elif plant == "pipe":
        path.unlink()
        os.mkfifo(path, 0o600)
    else:
        elsewhere = tmp_path / "elsewhere" / "file"
        trusted.write(elsewhere, path.read_bytes())
        elsewhere.parent.chmod(0o777)
        path.unlink()
        path.symlink_to(elsewhere)
    with pytest.warns(RuntimeWarning, match="compiled anew") as said:
        assert objects.address("first", make)
    assert len(said) == 1
    assert len(made) == 2
    assert objects.address("first", make)
    assert len(made) == 2


def test_numba_loads_nothing_of_a_kernel() -> None:
    from numba.core import types
    from numba.core.registry import cpu_target

    from tilewise.kernels.cpu.depthwise import sums
    from tilewise.kernels.cpu.emitting import emitted

    code, entry = emitted(sums.sums(4), (types.int64,) * sums.WORDS)
    known = cpu_target.target_context.codegen()._engine._defined_symbols
    assert not [name for name in known if "sums" in name]
    assert all(name in ("memcpy", "memset") or name.startswith("Py") for name in objects.undefined(code) or ())
    assert objects._load(objects.Code(code, entry, objects.undefined(code)))


def test_kernels_are_told_apart_by_all_that_they_are_made_of() -> None:
    """What their makers import is part of the key, or cannot change a kernel."""
    package = Path(tilewise.__file__).parent
    made_of = {path.relative_to(package).as_posix() for path in objects.made_of()}
    used = set()
    for path in (package / "kernels" / "cpu").rglob("*.py"):
        for module in re.findall(r"^\s*from tilewise\.(\S+) import", path.read_text("utf-8"), re.MULTILINE):
            used.add(f"{module.replace('.', '/')}.py")
    callers = {"kernels/building/elsewhere.py", "kernels/building/objects.py", "machine/device.py"}
    arguments = {"problems/activations.py", "problems/conv/axis.py"}  # a kernel's name tells what they give
    found = {name for name in used - made_of if not name.startswith("kernels/cpu")}
    assert found == callers | arguments
