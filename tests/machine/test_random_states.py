"""No random number of the program's is drawn by the library: of Python's random, NumPy's and torch's."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import share_kernels
from tests.distributed.ranks import run
from tests.sampling import EVERY
from torch import nn

from tilewise.distributed import SpatialParallel
from tilewise.machine import random_states

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "tilewise").rglob("*.py"))


def states() -> list[Any]:
    """All three, comparable."""
    return [random.getstate(), repr(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()]


def draw() -> None:
    random.random()
    np.random.normal()
    torch.rand(3)


class Noise(nn.Module):
    """Draws from everything that there is, its own generators among them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(2, 4, 3), nn.Dropout(0.5)
        self.numbers, self.python = torch.Generator(), random.Random(1)
        self.numpy, self.old = np.random.default_rng(1), np.random.RandomState(1)
        self.system = random.SystemRandom()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draw()
        own = self.python.random() + self.numpy.normal() + self.old.normal() + self.system.random()
        return self.drop(self.conv(x)) + own * torch.rand(1, generator=self.numbers)

    def states(self) -> list[Any]:
        found = [self.python.getstate(), repr(self.numpy.bit_generator.state), repr(self.old.get_state(legacy=False))]
        return [*found, self.numbers.get_state().tolist()]


def test_what_is_drawn_within_is_not_drawn() -> None:
    module = Noise()
    draw()
    np.random.normal()  # of two numbers NumPy keeps one
    before, own = states(), module.states()
    with contextlib.suppress(ZeroDivisionError), random_states.kept(module.modules()):
        module(torch.rand(1, 2, 5, 5))
        random_states.seed(3, torch.device("cpu"))
        assert states() != before
        raise ZeroDivisionError
    assert states() == before
    assert module.states() == own


def test_what_nothing_drew_from_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads may be drawing: a state is written only where it moved."""
    written: list[object] = []
    monkeypatch.setattr(random, "setstate", written.append)
    monkeypatch.setattr(np.random, "set_state", written.append)
    with random_states.kept():
        torch.rand(1)
    assert not written


def test_seeds_give_the_same_numbers() -> None:
    with random_states.kept():
        found = []
        for _ in range(2):
            random_states.seed(5, torch.device("cpu"))
            found.append((random.random(), np.random.normal(), float(torch.rand(1))))
    assert found[0] == found[1]


DRAWING = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"}
DRAWING |= {f"{name}_" for name in ("random", "normal", "uniform", "bernoulli", "exponential", "cauchy", "geometric")}
LAYERS = {"elementwise.py"}
"""Whose drawing is the caller's: dropout."""
STATES = {"random_states.py", "python_random.py", "sidecar.py"}
"""What sets states: the sidecar of a snapshot puts back those of the run that it goes on with."""
SEEDING = {"manual_seed", "manual_seed_all", "seed", "set_rng_state", "set_state", "setstate", "fork_rng"}


def test_every_draw_names_a_generator() -> None:
    """``generator=`` at every call that draws; states are set in one module alone."""
    calls = [(path, node) for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    for path, call in calls:
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        name, where = call.func.attr, f"{path}:{call.lineno}"
        if name in DRAWING and path.name not in LAYERS:
            assert any(k.arg == "generator" for k in call.keywords), where
        if name in SEEDING and path.name not in STATES:
            assert ast.unparse(call.func).startswith(("torch.Generator(", "random_states.")), where


PROGRAM = """
import importlib, json, os, pkgutil, sys
from tests.machine.test_random_states import Noise, draw, states
import numpy as np
import torch
draw()
before, moved = states(), []

def check(what):
    global before
    if states() != before:
        moved.append(what)
        before = states()

def imported(name):
    try:
        importlib.import_module(name)
    except ImportError:
        return  # a package that is not installed
    check(name)

import tilewise
{body}
print(json.dumps(moved))
"""
IMPORTS = """
for name in {first}:
    imported(name)
for found in pkgutil.walk_packages(tilewise.__path__, "tilewise."):
    if not found.name.endswith(("__main__", "worker")):
        imported(found.name)
"""
OPTIMIZE = """
from tilewise.nn import progress
progress.LATE_S = 0.0  # a bar from the beginning
module, x = Noise(), torch.zeros(2, 2, 9, 9)  # whose weights are drawn
before, own = states(), module.states()
for rigor in {rigors}:
    tilewise.optimize(module, x, rigor=rigor)
    check(rigor)
str(tilewise.optimize(module, x, memory_limit="64MiB", rigor="estimate"))
check("memory_limit and report")
tilewise.restore(module)
if module.states() != own:
    moved.append("the module's own")
with tilewise.enabled(wait=True, rigor="estimate"):
    torch.nn.functional.conv2d(x, module.conv.weight)
check("enabled")
tilewise.fft.rfft2(x, (16, 16))
check("fft")
from tilewise.report.network_time import time_training_steps
time_training_steps(module, module, x, lambda y: y.sum(), iterations=1)
check("steps")
from tilewise.frontends.layers import convolution_layers
convolution_layers(module, x)
check("layers")
from tilewise.planner.search.estimate import measure_profile
measure_profile("cpu")
check("profile")
"""


def moved(body: str, cache: Path) -> list[str]:
    """What moved a state in a process of its own, whose stderr counts as a terminal."""
    variables = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TILEWISE_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        env={**variables, "FORCE_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


FIRST = [[], ["tilewise.report.console"], ["tilewise.report.page"], ["tilewise.cli.report"]]


@pytest.mark.slow
@pytest.mark.parametrize("first", FIRST if EVERY else FIRST[:1])
def test_imports_draw_nothing(tmp_path: Path, first: list[str]) -> None:
    """Whichever module of ours comes first, and brings what it needs."""
    assert moved(IMPORTS.format(first=first), tmp_path) == []


@pytest.mark.slow
def test_planning_draws_nothing(tmp_path: Path, kernels: Path) -> None:
    share_kernels(tmp_path, kernels)
    rigors = ("estimate", "measure", "patient", "wisdom_only") if EVERY else ("estimate", "wisdom_only")
    assert moved(OPTIMIZE.format(rigors=rigors), tmp_path) == []


def spatial() -> bool:
    """Made and run on a rank."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3, stride=2))
    x = torch.zeros(2, 2, 16, 16)
    before = states()
    parallel = SpatialParallel(model, torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("h",)))
    same = states() == before
    parallel(x)
    return same and states() == before


def test_ranks_draw_nothing() -> None:
    assert run(2, spatial) == [True, True]
