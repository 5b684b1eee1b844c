"""Planning in the background in processes of their own: they end, fork and are interrupted in the middle of it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.conftest import share_kernels
from tests.forked import ForkedScript

from tilewise.wisdom import Wisdom

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, sys, threading, warnings
import torch
from torch import nn
import tilewise
from tilewise.nn import report
from tilewise.nn.background.service import service
from tilewise.solvers import all_solvers

FEW = ("aten", "gemm", "micro_batch", "lowering_type1", "lowering_type2")  # nothing is compiled
OTHERS = tuple(solver.name for solver in all_solvers() if solver.name not in FEW)
x = torch.randn(4, 8, 20, 20)
model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 5))

def step():
    model(x).square().mean().backward()
    model.zero_grad()

def begin(share=0.5):
    tilewise.optimize(model, x, wait=False, background_share=share, exclude=OTHERS)
    assert report(model).pending == 5, report(model)

def in_the_middle():
    # A search is under way: the thread has stopped at a pause, and is to go on.
    while report(model).pending == 5:
        step()
    for _ in range(5):
        step()
    assert report(model).pending
    assert any(thread.name == "tilewise planning" for thread in threading.enumerate())
"""


def run(program: str, tmp_path: Path, kernels: Path) -> ForkedScript:
    cache = tmp_path / "cache"
    share_kernels(cache, kernels)
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = {**os.environ, "TILEWISE_CACHE_DIR": str(cache), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return ForkedScript("-c", PROGRAM + program, environment=environment, cwd=tmp_path)


def test_exit_in_the_middle_leaves_nothing_hanging_and_keeps_what_was_measured(tmp_path: Path, kernels: Path) -> None:
    done = run("begin(); in_the_middle(); print('over', flush=True)", tmp_path, kernels).finished(60)
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
    assert "terminate" not in done.stderr
    assert sum(kept.measurements for kept in Wisdom(tmp_path / "cache" / "wisdom.sqlite3").summary()) > 0


def test_a_forked_child_trains_and_ends_and_the_parent_goes_on(tmp_path: Path, kernels: Path) -> None:
    program = """
begin(); in_the_middle()
child = os.fork()
if not child:
    try:
        for _ in range(5): step()
        assert not service().works()
        assert report(model).pending
        try:
            tilewise.wait(model)
        except RuntimeError as error:
            assert "another process plans this model" in str(error)
        else:
            raise AssertionError("waited")
        other = nn.Sequential(nn.Conv2d(2, 2, 3))
        tilewise.optimize(other, torch.randn(1, 2, 6, 6), rigor="estimate", wait=False)
        tilewise.wait(other)
        os._exit(0)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
tilewise.wait(model)
assert report(model).pending == 0
print("over", flush=True)
"""
    done = run(program, tmp_path, kernels).finished(100)
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr


@pytest.mark.parametrize("where", ["step", "wait"])
def test_control_c_is_the_programs(where: str, tmp_path: Path, kernels: Path) -> None:
    program = f"""
begin(0.9); in_the_middle()
print("ready", flush=True)
try:
    if {where!r} == "wait":
        model[0].weight.data += 0
        tilewise.wait(model)
        print("done before", flush=True)
    while True:
        step()
except KeyboardInterrupt:
    pass
step()
assert torch.backends.cudnn.benchmark is False
tilewise.wait(model)
assert report(model).pending == 0
print("over", flush=True)
"""
    script = run(program, tmp_path, kernels)
    deadline = time.monotonic() + 60
    out = Path(script._files[0].name)
    while "ready" not in out.read_text() and script.poll() is None:
        assert time.monotonic() < deadline, script.aborted()
        time.sleep(0.02)
    time.sleep(0.1)
    assert script.process.pid is not None
    os.kill(script.process.pid, signal.SIGINT)
    done = script.finished(100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("over\n"), done.stderr
