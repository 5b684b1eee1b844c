"""Triton's compiler in worker processes: for compute capability 9.0, without a GPU."""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.kernels.building import jobs, one_worker, workers

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
LAYOUT = f"{jobs.PACKAGE}.layout"
PATIENCE_S = 60


def run(program: Callable[[], None], cache: Path, **environment: str) -> Any:
    """What a function of this file prints as JSON in a process of its own, where kernels are compiled."""
    with start(program, cache, **environment) as process:
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    return json.loads(out)


def start(program: Callable[[], None], cache: Path, module: str = __name__, **more: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "src"), environment.get("PYTHONPATH", "")])
    environment |= {"TRITON_CACHE_DIR": str(cache), workers.VARIABLE: "2", **more}
    name = program.__name__
    command = [sys.executable, "-c", f"from {module} import {name}; {name}()"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)


class H100:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def peak_launch(block: int) -> Any:
    """A small kernel."""
    import torch

    from tilewise.kernels.triton import layout
    from tilewise.kernels.triton.launch import Launch, Pointer

    pointers = (Pointer(0, 0, torch.float32), Pointer(1, 4, torch.int32)) * 2
    scalars = (4, *(400, 1, 1, 10, 10, 400, 100, 0, 10, 1) * 2)
    constants = {"A_DENSE": True, "A_BLOCK": block, "B_DENSE": True, "B_BLOCK": 128}
    return Launch(layout.peaks, (4, 1, 1), pointers, scalars, constants, warps=2)


def real_launches() -> list[Any]:
    """Of solvers: tables in constants, scalars of one, pointers of every alignment."""
    import torch

    from tilewise.problems.conv.axis import Axis
    from tilewise.problems.conv.problem import ConvProblem, Pass
    from tilewise.solvers.common import split_products
    from tilewise.solvers.common.buffers import Slot
    from tilewise.solvers.fourier import _frequency_products
    from tilewise.solvers.products import _implicit as _implicit_gemm
    from tilewise.solvers.products import _patch as _patch_gemm

    p = ConvProblem(Pass.FPROP, 2, 32, 32, (Axis(8, 3, 1, 1, 1, 1),) * 2)
    a, b, out = (torch.empty(p.shape(role), device="meta") for role in "xwy")
    tile = split_products.Tile(32, 32, 32, 4, 2)
    layout = _implicit_gemm.Layout(p, _implicit_gemm.PRODUCTS["fp16x3"], tile, 2)
    found = _implicit_gemm.launches(layout, *map(_implicit_gemm.View.of, (a, b, out)))
    patches = ConvProblem(Pass.FPROP, 2, 3, 32, (Axis(16, 4, 4, 1, 0, 0),) * 2, dtype="fp16")
    a, b, out = (torch.empty(patches.shape(role), dtype=torch.float16, device="meta") for role in "xwy")
    found += _patch_gemm.launches(patches, _patch_gemm.Tile(32, 32, 32, 4, 2), 1, a, b, out)
    slots = {role: Slot((100000,), torch.complex64, 800256 * i) for i, role in enumerate("xwy")}
    spectra = _frequency_products.matrices(p, 4, slots, dict.fromkeys("xwy", 1))
    block = _frequency_products.Block(16, 16, 32, warps=4, stages=2)
    peaks, top = [(Slot((4,), torch.int32, 2400768), 4)] * 2, Slot((2,), torch.int32, 2401024)
    sources = dict.fromkeys("xwy", 3)
    found += _frequency_products.launches(p, 4, 40, spectra, "fp16x3", block, peaks, top, False, sources)
    return found


def watched() -> list[bool]:
    """Whether each compilation from now on was a hit in Triton's cache."""
    import triton
    from triton.runtime import driver

    if os.environ.get("DRIVER") != "own":
        driver.set_active(H100())
    found: list[bool] = []
    triton.knobs.compilation.listener = lambda **what: found.append(what["cache_hit"])
    return found


def filled() -> None:
    """Workers compile what this process then finds."""
    hits = watched()
    launches = [peak_launch(256), *real_launches()]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with workers.opened(4) as pool:

            def compile_one(launch: Any) -> None:
                with pool.serving():
                    launch.compile((256,) * 4)

            threads = [threading.Thread(target=compile_one, args=(each,)) for each in (*launches, peak_launch(256))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        cubins = [len(launch.compile((256,) * 4).asm["cubin"]) for launch in launches]
        launches[0].compile((4, 4, 4, 4))  # another version of the kernel, and nobody serves this thread
    json.dump({"hits": hits, "cubins": cubins, "said": [str(each.message) for each in said]}, sys.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["stand-in", pytest.param("own", marks=pytest.mark.gpu)])
def test_a_worker_fills_the_cache_that_is_looked_for(driver: str, tmp_path: Path) -> None:
    found = run(filled, tmp_path, DRIVER=driver)
    assert found["said"] == []
    assert len(found["cubins"]) >= 6
    assert min(found["cubins"]) > 0
    *hits, last = found["hits"]
    assert len(hits) >= len(found["cubins"])
    assert all(hits)
    assert not last


def refused() -> None:
    """Only compiled kernels are asked for, and then those that were refused are compiled."""
    from tilewise.kernels.building.kept import NotKept, kept_only

    hits, found = watched(), []
    launches = [peak_launch(256), peak_launch(128)]
    launches[1].compile((256, 256))
    for launch in (*launches, *launches):
        try:
            with kept_only():
                launch.compile((256, 256))
            found.append("kept")
        except NotKept as error:
            found.append(str(error))
            launch.compile((256, 256))
    json.dump({"hits": hits, "found": found}, sys.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["stand-in", pytest.param("own", marks=pytest.mark.gpu)])
def test_what_is_not_compiled_is_refused_where_that_is_asked_for(driver: str, tmp_path: Path) -> None:
    """Two kernels are compiled once each, and neither while only compiled ones were asked for."""
    assert run(refused, tmp_path, DRIVER=driver) == {"hits": [False] * 2, "found": ["peaks", "kept", "kept", "kept"]}
    # Another process finds both on disk.
    assert run(refused, tmp_path, DRIVER=driver) == {"hits": [True] * 2, "found": ["kept"] * 4}


def found_on_disk() -> None:
    """What is on disk is loaded though a pool serves the thread; how many workers it started."""
    hits = watched()
    with workers.opened(2) as pool, pool.serving():
        for launch in real_launches():
            launch.compile((256,) * 4)
        json.dump({"hits": hits, "workers": len(pool._workers)}, sys.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["stand-in", pytest.param("own", marks=pytest.mark.gpu)])
def test_no_worker_is_started_for_what_is_on_disk(driver: str, tmp_path: Path) -> None:
    first, again = (run(found_on_disk, tmp_path, DRIVER=driver) for _ in range(2))
    assert first["workers"] == 2
    assert again["workers"] == 0
    assert len(again["hits"]) == len(first["hits"]) > 4
    assert all(again["hits"])


def troubled() -> None:
    """Workers that fail, are killed and are stopped: kernels come out right all the same."""
    hits, found = watched(), {}
    with warnings.catch_warnings(record=True) as said, workers.opened(1) as pool:
        warnings.simplefilter("always")
        with pool.serving():
            try:
                peak_launch(100).compile((256, 256))
            except workers.CompileFailed as error:
                found["failed"] = str(error)
            found["after a failure"] = compiled_by(peak_launch(128), hits)
            pool._workers[0].process.kill()
            pool._workers[0].process.wait()
            found["after a kill"] = compiled_by(peak_launch(256), hits)
            worker = pool._workers[0].process
            worker.send_signal(signal.SIGSTOP)
            threading.Timer(0.3, worker.kill).start()
            found["killed meanwhile"] = compiled_by(peak_launch(512), hits)
            found["after that"] = compiled_by(peak_launch(1024), hits)
        found["processes"] = len(pool._workers)
        try:
            peak_launch(100).compile((256, 256))
        except Exception as error:
            found["own"] = type(error).__name__
    found["said"] = [str(each.message) for each in said]
    json.dump(found, sys.stdout)


def compiled_by(launch: Any, hits: list[bool]) -> str:
    assert launch.compile((256, 256)).asm["cubin"]
    return "worker" if hits[-1] else "this process"


@pytest.mark.slow
def test_failures_and_lost_workers_change_no_result(tmp_path: Path) -> None:
    found = run(troubled, tmp_path)
    assert found["failed"].startswith("CompilationError")
    assert found["own"] == "CompilationError"
    assert found["after a failure"] == found["after a kill"] == found["after that"] == "worker"
    assert found["killed meanwhile"] == "this process"
    assert found["processes"] == 1
    (said,) = found["said"]
    assert "a worker was lost" in said
    assert "-9" in said


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**one_worker.environment(), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-P", "-m", "tilewise.kernels.building.worker"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1
    ) as process:
        yield process
        process.kill()


def job(**changes: Any) -> str:
    numbers = ("elements", "chunks", "depth", "height", "width", "s_n", "s_c", "s_d", "s_h", "s_w")
    pointers = {"program": "i32", "source": "*fp32", "found": "*i32"}
    said = {
        "module": LAYOUT,
        "kernel": "_peak",
        "signature": {**pointers, **dict.fromkeys(numbers, "i32"), "DENSE": "constexpr", "BLOCK": "constexpr"},
        "constants": [[[13], True], [[14], 64]],
        "attributes": [],
        "options": {"num_warps": 1},
        "target": ["cuda", 90, 32],
        "environment": one_worker.environment(),
    }
    return json.dumps({**said, **changes}) + "\n"


BAD = {
    "no json": "{",
    "no object": "[]\n",
    "too little": "{}\n",
    "a module of another package": job(module="os", kernel="system"),
    "a module beside the package": job(module=f"{jobs.PACKAGE}x.layout"),
    "no module": job(module=f"{jobs.PACKAGE}.nothing"),
    "a path": job(module=f"{jobs.PACKAGE}...layout"),
    "another type": job(module=7),
    "no kernel": job(kernel="nothing"),
    "a name that is no kernel": job(kernel="tl"),
    "an attribute of a kernel": job(kernel="_peak.fn"),
    "constants": job(constants=[3]),
    "a tuple": job(options={"num_warps": {"set": []}}),
    "a target": job(target=["cuda"]),
    "an environment": job(environment=[]),
    "a program that is no text": json.dumps({"cuda": 7, "architecture": "sm_90a", "environment": {}}),
    "an environment of a program": json.dumps({"cuda": "", "architecture": "sm_90a", "environment": []}),
}  # fmt: skip


def test_a_worker_refuses_what_is_no_job_and_goes_on(worker: subprocess.Popen[str], tmp_path: Path) -> None:
    assert worker.stdin is not None
    assert worker.stdout is not None
    assert json.loads(worker.stdout.readline()) == {"ready": worker.pid}
    for what, line in BAD.items():
        worker.stdin.write(line if line.endswith("\n") else line + "\n")
        answer = json.loads(worker.stdout.readline())
        assert list(answer) == ["refused"], (what, answer)
    worker.stdin.write(job(constants=[[[13], True], [[14], 65]]))
    assert list(json.loads(worker.stdout.readline())) == ["failed"]
    worker.send_signal(signal.SIGINT)
    moved = tmp_path / "moved"
    worker.stdin.write(job(environment={**one_worker.environment(), "TRITON_CACHE_DIR": str(moved)}))
    assert list(json.loads(worker.stdout.readline())) == ["hash"]
    assert list(moved.rglob("_peak.cubin"))
    loaded = Path(f"/proc/{worker.pid}/maps")
    assert not loaded.exists() or not any(name in loaded.read_text() for name in ("libcuda.so", "libtorch"))
    worker.stdin.close()
    assert worker.wait(PATIENCE_S) == 0


def parent() -> None:
    """Starts workers, prints who they are and what else lives, and waits."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # programs in a shell's background ignore it
    faulthandler.dump_traceback_later(PATIENCE_S / 2, exit=False)  # where it waits, should it not end
    with workers.opened(2) as pool:
        answer = pool.ask("{}")
        child = os.fork()
        if child == 0:
            time.sleep(2 * PATIENCE_S)
            os._exit(0)
        print(json.dumps({"pids": [w.process.pid for w in pool._workers], "child": child, **answer}), flush=True)
        if os.environ["END"] == "exit":
            sys.exit(0)
        for _ in range(20 * PATIENCE_S):  # a signal just before one long sleep would be seen only after it
            time.sleep(0.05)


def lives(pid: int) -> bool:
    """Not as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc who lives")
@pytest.mark.parametrize("end", ["kill", "interrupt", "exit"])
def test_workers_end_with_their_parent(end: str, tmp_path: Path) -> None:
    """Also where a forked child of it lives on, which has copies of its pipes."""
    with start(parent, tmp_path, END=end) as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.readline())
        assert "refused" in found
        assert len(found["pids"]) == 2
        if end == "kill":
            process.kill()
        elif end == "interrupt":
            process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)
        try:
            assert lives(found["child"])
            until = time.monotonic() + PATIENCE_S / 2
            while any(map(lives, found["pids"])) and time.monotonic() < until:
                time.sleep(0.02)
            assert not any(map(lives, found["pids"]))
        finally:
            os.kill(found["child"], signal.SIGKILL)


def source(name: str = "some") -> Any:
    kernel = SimpleNamespace(fn=SimpleNamespace(__module__=LAYOUT, __qualname__="peak"))
    return SimpleNamespace(fn=kernel, name=name, signature={}, constants={}, attrs={})


TARGET = SimpleNamespace(backend="cuda", arch=90, warp_size=32)


@pytest.fixture
def _unsaid(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(workers, "_told", set())
    yield
    workers.close()


@pytest.mark.usefixtures("_unsaid")
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("echo nonsense; cat > /dev/null", "it answered b'nonsense'"),
        ("exit 7", "exit status 7"),
        ("yes | tr -d '\\n'", "more than"),
        ("echo '{\"ready\": 1}'; read line; echo '{\"hash\": 4}'; read line", "it answered {'hash': 4}"),
    ],
)
def test_a_worker_that_answers_garbage_is_done_without(
    program: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    monkeypatch.setattr(one_worker.sys, "executable", str(script))
    monkeypatch.setenv(workers.VARIABLE, "1")
    with workers.opened(3) as pool, pytest.warns(RuntimeWarning, match=reason):
        assert pool.fill(source(), TARGET, {}) is None
    assert not pool._workers


@pytest.mark.usefixtures("_unsaid")
def test_what_cannot_be_told_is_compiled_here() -> None:
    with workers.opened(1) as pool, pytest.warns(RuntimeWarning, match="hold 1j, a complex"):
        assert pool.fill(source(), TARGET, {"odd": 1j}) is None
    assert not pool._workers


@pytest.mark.usefixtures("_unsaid")
def test_processes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(workers.VARIABLE, "0")
    with workers.opened(5) as pool:
        assert pool.fill(source(), TARGET, {}) is None
        assert pool.size == 0
    monkeypatch.setenv(workers.VARIABLE, "3")
    with workers.opened(5) as pool, workers.opened(2) as same:
        assert pool is same
        assert pool.size == 3
    monkeypatch.delenv(workers.VARIABLE)
    with workers.opened(500) as pool:
        assert 1 <= pool.size <= workers.MOST_WORKERS
    monkeypatch.setenv(workers.VARIABLE, "many")
    with pytest.raises(ValueError, match="TILEWISE_COMPILE_WORKERS='many'"), workers.opened(1):
        pass


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


@settings(max_examples=30)
@given(st.recursive(plain, lambda inner: st.lists(inner) | st.lists(inner).map(tuple), max_leaves=9))
def test_values_come_back_as_they_were(value: Any) -> None:
    back = jobs._decoded(json.loads(json.dumps(jobs._encoded("constants", value))))
    assert repr(back) == repr(value)


@pytest.mark.parametrize("value", [{"a": 1}, {1}, b"x", (1, 2j), math])
def test_other_values_are_not_encoded(value: Any) -> None:
    with pytest.raises(TypeError, match="constants hold"):
        jobs._encoded("constants", value)
