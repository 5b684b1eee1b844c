"""Triton's cache on disk: entries that others may have written are compiled anew. For 9.0, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from triton import knobs
from triton.runtime.cache import FileCacheManager, get_cache_manager

from tilewise.kernels.triton import own_cache
from tilewise.machine import trusted

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    own_cache._told.clear()
    return tmp_path / "cache"


def entry() -> own_cache.OwnCache:
    return own_cache.OwnCache("KEY")


def keep(what: Any) -> None:
    path = what.put(b"code", "name.cubin")
    what.put_group("name.json", {"name.cubin": path})


def test_entries_are_those_of_triton(folder: Path) -> None:
    keep(entry())
    theirs = FileCacheManager("KEY")
    assert (
        theirs.get_group("name.json")
        == entry().get_group("name.json")
        == {"name.cubin": str(folder / "KEY/name.cubin")}
    )
    keep(FileCacheManager("OTHER"))
    assert own_cache.OwnCache("OTHER").get_group("name.json") == FileCacheManager("OTHER").get_group("name.json")
    assert entry().get_file("absent") is None
    assert entry().get_group("absent") is None


def test_kernels_go_by_it_within_and_the_users_do_not_outside(folder: Path) -> None:
    assert type(get_cache_manager("00")) is FileCacheManager
    before = dict(os.environ)
    with own_cache.own_cache(), own_cache.own_cache():
        assert type(get_cache_manager("00")) is own_cache.OwnCache
    assert type(get_cache_manager("00")) is FileCacheManager
    assert dict(os.environ) == before

    class Theirs(FileCacheManager):
        pass

    knobs.cache.__dict__["manager_class"] = Theirs
    try:
        with own_cache.own_cache():
            assert type(get_cache_manager("00")) is Theirs
        assert knobs.cache.manager_class is Theirs
    finally:
        del knobs.cache.__dict__["manager_class"]


@pytest.mark.parametrize("plant", ["file", "group", "entry", "pipe"])
def test_what_others_may_write_is_not_there(folder: Path, plant: str) -> None:
    keep(entry())
    place = {"file": "name.cubin", "group": "__grp__name.json", "entry": "", "pipe": "name.cubin"}[plant]
    if plant == "pipe":
        (folder / "KEY" / place).unlink()
        os.mkfifo(folder / "KEY" / place)
    else:
        (folder / "KEY" / place).chmod(0o777)
    with pytest.warns(RuntimeWarning, match="compiled anew"):
        refused = entry().get_group("name.json")
    assert refused is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keep(entry())
    found = entry().get_group("name.json")
    assert found is not None
    assert trusted.read(Path(found["name.cubin"])) == b"code"
    assert entry().get_file("name.cubin") == found["name.cubin"]


def test_a_group_that_names_files_elsewhere(folder: Path, tmp_path: Path) -> None:
    planted = tmp_path / "planted" / "file"
    trusted.write(planted, b"planted")
    planted.parent.chmod(0o777)
    entry().put_group("name.json", {"name.cubin": str(planted)})
    with pytest.warns(RuntimeWarning, match="compiled anew"):
        assert entry().get_group("name.json") is None


@pytest.mark.parametrize("spoil", ["writable", "no folder", "home"])
def test_a_folder_that_cannot_be_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    """The process keeps entries in one of its own, which workers are told of."""
    if spoil == "writable":
        folder.mkdir()
        folder.chmod(0o777)
    elif spoil == "no folder":
        folder.touch()
    else:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("TRITON_CACHE_DIR", "~/.triton/cache")
    with pytest.warns(RuntimeWarning, match="TRITON_CACHE_DIR"):
        keep(entry())
    found = entry().get_group("name.json")
    assert found is not None
    (path,) = found.values()
    assert not Path(path).is_relative_to(tmp_path)
    assert own_cache.settings() == {"TRITON_CACHE_DIR": str(Path(path).parents[1])}
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == ([folder] if spoil == "no folder" else [])


COMPILE = """
import json, os, sys, warnings
from tests.kernels.test_compile_workers import H100, peak_launch
import triton
from triton.runtime import driver
driver.set_active(H100())
hits = []
triton.knobs.compilation.listener = lambda **what: hits.append(what["cache_hit"])
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    peak_launch(256).compile((256,) * 4)
print(json.dumps({"hits": hits, "said": [str(each.message) for each in said]}))
"""


def compiled(folder: Path) -> dict[str, Any]:
    """What a process of its own compiles, under a careless umask."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=variables, capture_output=True, text=True, check=True, umask=0
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_a_kernel_is_loaded_where_nobody_else_may_write(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert compiled(folder) == {"hits": [False], "said": []}
    assert compiled(folder) == {"hits": [True], "said": []}
    assert not [path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077]
    (cubin,) = folder.rglob("*.cubin")
    cubin.chmod(0o666)
    found = compiled(folder)
    assert found["hits"] == [False]
    assert len(found["said"]) == 1
    assert str(cubin) in found["said"][0]
    assert compiled(folder) == {"hits": [True], "said": []}
