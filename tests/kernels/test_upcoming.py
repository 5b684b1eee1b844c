"""Kernels that workers compile ahead of their need, for compute capability 9.0 and without a GPU."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.kernels.test_compile_workers import peak_launch, start

from tilewise.kernels.building import workers

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run(program: Callable[[], None], cache: Path, **variables: str) -> Any:
    """What a function of this file prints as JSON in a process of its own, where kernels are compiled."""
    with start(program, cache, module=__name__, **variables) as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return json.loads(out)


def ahead() -> None:
    """Names with kernels, some in common; one that fails; and one that needs two programs, one after the other."""
    import triton

    from tilewise.kernels.building.target import Architecture, compiling_for
    from tilewise.kernels.building.upcoming import upcoming
    from tilewise.kernels.building.workers import all_of

    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **what: hits.append(what["cache_hit"])

    def load(*blocks: int) -> None:
        all_of([functools.partial(peak_launch(block).compile, (256,) * 4) for block in blocks])

    def two() -> None:
        load(256)
        load(64)

    def fails() -> None:
        raise ValueError("cannot be bound")

    with upcoming(Architecture(9, 0)) as kernels:
        assert kernels is not None
        kernels.add("first", [functools.partial(load, 128, 256), fails])
        kernels.add("second", [two])
        kernels.add("none", [fails])
        ready_at_once = [name for name in ("first", "second", "none") if kernels.is_ready(name)]
        names = ["first", "second"]
        while not all(kernels.is_ready(name) for name in names):
            kernels.wait()
        busy = kernels.has_enough
    with compiling_for(Architecture(9, 0)):
        load(64, 128, 256)
    json.dump({"at once": ready_at_once, "busy": busy, "hits": hits}, sys.stdout)


def jobs() -> None:
    """Jobs that were collected elsewhere, known by a name."""
    from tilewise.kernels.building.target import Architecture, compiling_for
    from tilewise.kernels.building.upcoming import upcoming

    with compiling_for(Architecture(9, 0)), workers.collecting() as collected:
        peak_launch(128).compile((256,) * 4)
    with upcoming(Architecture(9, 0)) as kernels:
        assert kernels is not None
        lacks = kernels.add_jobs("first", collected), kernels.is_ready("first"), kernels.count_done
        while not kernels.is_ready("first"):
            kernels.wait()
        lacks_more = kernels.add_jobs("again", collected), kernels.is_ready("again"), kernels.count_done
    json.dump([len(collected), lacks, lacks_more], sys.stdout)


def test_jobs_are_done_once(tmp_path: Path) -> None:
    assert run(jobs, tmp_path) == [1, [True, False, 0], [False, True, 1]]


def test_kernels_are_there_when_a_name_is_ready(tmp_path: Path) -> None:
    found = run(ahead, tmp_path)
    assert found["at once"] == ["none"]
    assert not found["busy"]
    assert found["hits"] == [True] * 3, "this process compiles none"


def given_up() -> None:
    """An exception ends what is being compiled."""
    from tilewise.kernels.building import workers
    from tilewise.kernels.building.target import Architecture
    from tilewise.kernels.building.upcoming import upcoming

    start = time.monotonic()
    try:
        with upcoming(Architecture(9, 0)) as kernels:
            assert kernels is not None
            kernels.add("many", [functools.partial(peak_launch(16 << n).compile, (256,) * 4) for n in range(7)])
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        took = time.monotonic() - start
    json.dump({"took": took, "pool": workers._pool is not None and not workers._pool.stopped}, sys.stdout)


def test_an_interruption_ends_it(tmp_path: Path) -> None:
    assert not run(given_up, tmp_path)["pool"]


def none() -> None:
    """Without workers there is nothing ahead."""
    from tilewise.kernels.building.target import Architecture
    from tilewise.kernels.building.upcoming import upcoming

    with upcoming(Architecture(9, 0)) as kernels:
        json.dump(kernels is None, sys.stdout)


def test_without_workers_there_is_none(tmp_path: Path) -> None:
    assert run(none, tmp_path, **{workers.VARIABLE: "0"}) is True


def needed() -> None:
    """The order in which one worker does jobs: three that wait, and one that is needed while the first is done."""
    import threading

    from tilewise.kernels.building.target import Architecture, compiling_for

    jobs: dict[int, str] = {}
    with compiling_for(Architecture(9, 0)):
        for block in (32, 64, 128, 256):
            with workers.collecting() as found:
                peak_launch(block).compile((256,) * 4)
            (jobs[block],) = found
    done: list[int] = []

    def ask(pool: workers.Pool, block: int, *, waits: bool) -> None:
        pool.try_to_ask(jobs[block], waits=waits)
        done.append(block)

    with workers.opened(1) as pool:
        threads = [threading.Thread(target=ask, args=(pool, block), kwargs={"waits": True}) for block in (32, 64, 128)]
        for thread in threads:
            thread.start()
        while not pool.processes():
            time.sleep(0.001)
        ask(pool, 256, waits=False)
        for thread in threads:
            thread.join()
    print(json.dumps(done))


@pytest.mark.slow
def test_what_is_needed_at_once_comes_before_what_waits(tmp_path: Path) -> None:
    done = run(needed, tmp_path, **{workers.VARIABLE: "1"})
    assert sorted(done) == [32, 64, 128, 256]
    assert done.index(256) <= 1
