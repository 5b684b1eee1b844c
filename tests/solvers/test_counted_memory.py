"""What solvers take in a run, every allocation counted: no more than they declare, or than the planner measures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.sampling import EVERY

from tilewise.planner.measuring.times import NOISE

HERE = Path(__file__).parent
OBJECTS = 8 << 10
"""Bytes of tensors' own objects and of Python's."""
HIDDEN = 256 << 20

Counts = list[dict[str, Any]]


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux") or os.confstr("CS_GNU_LIBC_VERSION") is None:
        pytest.skip("counting allocations needs glibc and a C compiler")
    library = tmp_path_factory.mktemp("counter") / "counted.so"
    source = [] if not compiler.endswith("++") else ["-x", "c"]
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", *source, HERE / "counted.c", "-o", library, "-ldl"], check=True
    )
    return library


def counts(counter: Path, *arguments: str, module: str = "tests.solvers.counted_runs") -> Counts:
    command = [sys.executable, "-m", module, *arguments]
    surroundings = {**os.environ, "LD_PRELOAD": str(counter)}
    ended = subprocess.run(
        command, cwd=HERE.parents[1], env=surroundings, capture_output=True, text=True, check=False, timeout=900
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.fixture(scope="module", params=["1", "2"] if EVERY else ["1"], ids="{} threads".format)
def honest(counter: Path, request: pytest.FixtureRequest) -> Counts:
    found = counts(counter, request.param)
    assert len({count["solver"] for count in found}) > 5
    assert {count["exact"] for count in found} == {True, False}
    return found


def over_promised(found: Counts) -> list[str]:
    """Solvers other than torch's choice, which declares nothing and is measured."""
    return [
        f"{c['solver']} {c['config']} on {c['problem']}: took {c['taken']}, declares {c['promised']}"
        for c in found
        if c["solver"] != "aten" and c["taken"] > c["promised"] + OBJECTS
    ]


def over_measured(found: Counts) -> list[str]:
    return [
        f"{c['solver']} {c['config']} on {c['problem']}: took {c['taken']}, measured {c['measured']}"
        for c in found
        if c["taken"] > c["measured"] + OBJECTS * c["exact"]
    ]


@pytest.mark.slow
def test_no_solver_takes_more_than_it_declares(honest: Counts) -> None:
    assert not over_promised(honest)


@pytest.mark.slow
def test_the_measure_sees_what_is_taken(honest: Counts) -> None:
    assert not over_measured(honest)


@pytest.mark.slow
def test_an_allocation_that_is_hidden_is_found(counter: Path) -> None:
    """Else the two above could not fail."""
    found = counts(counter, "1", "hide")
    assert len({count["solver"] for count in found}) > 5
    assert len(over_promised(found)) == sum(c["solver"] != "aten" for c in found)
    assert all(c["measured"] >= HIDDEN - 4 * NOISE for c in found)  # the system counts pages late on a busy machine


@pytest.mark.skipif(not EVERY, reason="plans whole steps for half a minute: in make test-all")
def test_a_step_takes_no_more_than_its_limit(counter: Path) -> None:
    """Everything that operators of torch take included, which no allocator of torch's hands out."""
    found = counts(counter, module="tests.nn.counted_step")
    kept = [one for one in found if "taken" in one]
    assert len(kept) >= 2, found
    for one in kept:
        assert one["taken"] <= one["peak"] <= one["limit"], found
