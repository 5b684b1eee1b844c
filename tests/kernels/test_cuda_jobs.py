"""Programs in CUDA C++ that workers compile: who is asked, and what is collected."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tilewise.kernels.building import workers
from tilewise.kernels.building.jobs import CUDA_FIELDS, compile_job
from tilewise.kernels.building.kept import NotKept, kept_only, refuse
from tilewise.kernels.cuda import nvrtc


def test_missing_programs_are_collected() -> None:
    with workers.collecting() as found:
        workers.compile_cuda("some text", "sm_90a")
    (job,) = map(json.loads, found)
    assert job.keys() == CUDA_FIELDS
    assert (job["cuda"], job["architecture"]) == ("some text", "sm_90a")


def test_of_several_all_that_are_missing_are_collected() -> None:
    reached: list[str] = []
    with workers.collecting() as found:
        workers.all_of([lambda: workers.compile_cuda("one", ""), lambda: True, lambda: workers.compile_cuda("two", "")])
        reached.append("the end")
    assert [json.loads(job)["cuda"] for job in found] == ["one", "two"]
    assert not reached
    assert workers.all_of([lambda: 1, lambda: 2]) == [1, 2]


def test_where_nothing_is_collected_the_first_ends_it() -> None:
    tried: list[str] = []

    def load(name: str) -> None:
        tried.append(name)
        refuse(name)

    with kept_only(), pytest.raises(NotKept):
        workers.all_of([lambda: load("one"), lambda: load("two")])
    assert tried == ["one"]


def test_without_a_pool_this_process_compiles() -> None:
    assert not workers.compile_cuda("some text", "sm_90a")


def test_a_job_is_compiled_by_the_same_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is missing, a worker says so, and this process meets the same reason."""
    if not nvrtc.unavailable():
        pytest.skip("cuda.core is installed")
    with pytest.raises(RuntimeError, match="cuda-core is not installed"):
        compile_job({"cuda": "some text", "architecture": "sm_90a", "environment": dict(os.environ)})
    monkeypatch.setenv(workers.VARIABLE, "1")
    with workers.opened(1) as pool, pool.serving(), pytest.raises(workers.CompileFailed, match="cuda-core"):
        workers.compile_cuda("some text", "sm_90a")


def test_a_worker_needs_no_torch_for_it() -> None:
    program = "import sys, tilewise.kernels.cuda.nvrtc; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
