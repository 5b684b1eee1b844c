"""Memory that stays: what the allocator is told shows in page faults and in what a process holds, in real processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tilewise import cpu
from tilewise.cpu import keep_memory

SRC = Path(cpu.__file__).parents[1]
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")

PRELUDE = """
import json, resource, torch
import tilewise.machine.resident
from tilewise.cpu import keep_memory

def faults(mib=64):
    for _ in range(10):  # until the cache of seven is full that takes what alignment leaves, blocks do not fit again
        torch.empty(mib << 20, dtype=torch.uint8).fill_(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(mib << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return tilewise.machine.resident.resident()["VmRSS"] >> 20
"""


def run(text: str, **environment: str) -> Any:
    """What the program prints last, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + text], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(SRC), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@linux
def test_memory_that_is_kept_is_not_faulted_in_again() -> None:
    installed, kept, undone, again, text = run(
        "found = [faults()]\n"
        "with keep_memory() as kept: found.append(faults())\n"
        "found.append(resident()); keep_memory(); print(json.dumps([*found, faults(), str(kept)]))"
    )
    pages = (64 << 20) // os.sysconf("SC_PAGESIZE")
    assert installed > pages // 32, "huge pages are counted once each"
    assert kept < pages // 1000
    assert undone < 500, "of ten blocks nothing is held"
    assert again < pages // 1000
    assert "M_TRIM_THRESHOLD=-1" in text
    assert "M_MMAP_MAX=0" in text


@linux
def test_free_memory_can_be_handed_back() -> None:
    before, kept, released, again = run(
        "setting = keep_memory(); faults(8); found = [resident()]; x = torch.ones(256 << 18); del x\n"
        "found.append(resident()); setting.release(); found.append(resident()); x = torch.ones(256 << 18); del x\n"
        "print(json.dumps([*found, resident()]))"
    )
    assert kept - before > 150
    assert released - before < 50
    assert again - before > 150


@linux
def test_undoing_gives_back_what_was_set_before() -> None:
    text = "first = keep_memory(); second = keep_memory(); print(json.dumps([first.before, second.before]))"
    first, second = run(
        text, MALLOC_TOP_PAD_="12345", GLIBC_TUNABLES="glibc.malloc.trim_threshold=777:glibc.rtld.nns=4"
    )
    assert first["M_TOP_PAD"] == 12345
    assert first["M_TRIM_THRESHOLD"] == 777
    assert first["M_MMAP_MAX"] == 65536
    assert second["M_TRIM_THRESHOLD"] == -1
    assert second["M_MMAP_MAX"] == 0


def another_allocator(directory: Path) -> str:
    """A library to preload whose ``malloc`` is its own."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = directory / "other.c", directory / "libother.so"
    source.write_text("void *__libc_malloc(unsigned long); void *malloc(unsigned long n) { return __libc_malloc(n); }")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return str(library)


@linux
def test_another_allocator_is_named(tmp_path: Path) -> None:
    library = another_allocator(tmp_path)
    text = "try: keep_memory()\nexcept RuntimeError as error: print(json.dumps(str(error)))"
    assert library in run(text, LD_PRELOAD=library)


def test_other_systems_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match="darwin"):
        keep_memory()
