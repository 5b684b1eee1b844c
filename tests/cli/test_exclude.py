"""``--exclude``: on every command that plans, and passed on to programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from tests.forked import run_script

from tilewise import Schedule, solvers

LAYER = "mb2ic3ih8oc4oh6kh3"
FAST = ("--device", "cpu", "--batch-sizes", "undivided", "--rigor", "estimate")
Run = Callable[..., Result]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan", "time", "explain"])
def test_commands_leave_solvers_out(run: Run, check_document: Callable[[str], dict[str, Any]], command: str) -> None:
    result = run(command, LAYER, *FAST, "--exclude", "fft", "--exclude", "aten", "--json")
    assert result.exit_code == 0, result.stderr
    document = check_document(result.stdout)
    assert document["options"]["exclude"] == ["aten", "fft"]
    passes = [document] if command == "explain" else [one for layer in document["layers"] for one in layer["passes"]]
    assert passes
    for one in passes:
        assert one["plan"]["solver"] not in ("aten", "fft")
    if command == "explain":
        reasons = {m["solver"]: m["reason"] for m in document["candidates"]}
        assert reasons["aten"] == reasons["fft"] == "left out by exclude"


def test_no_plan_without_them_is_exit_1(run: Run) -> None:
    result = run("info", "--json")
    names = [found["name"] for found in json.loads(result.stdout)["solvers"]]
    result = run("plan", LAYER, *FAST, *(word for name in names for word in ("--exclude", name)))
    assert result.exit_code == 1
    assert "left out by exclude" in result.stdout


@pytest.mark.parametrize("command", ["plan", "time", "explain", "run"])
def test_unknown_names_are_bad_input(run: Run, command: str) -> None:
    result = run(command, "--exclude", "atem", __file__ if command == "run" else LAYER)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    for word in ("--exclude", "'atem'", "did you mean 'aten'", "tilewise info"):
        assert word in line


@pytest.mark.slow
def test_a_schedule_has_its_own(run: Run, tmp_path: Path) -> None:
    file = str(tmp_path / "made.json")
    assert run("plan", LAYER, *FAST, "--exclude", "aten", "-o", file).exit_code == 0
    assert Schedule.load(file).options.exclude == ("aten",)
    result = run("time", LAYER, "--schedule", file, "--exclude", "fft")
    assert result.exit_code == 2
    assert "--exclude: the schedule has its own" in result.stderr
    result = run("report", file, "-o", "-")
    assert "solvers left out" in result.stdout


@pytest.mark.slow
def test_programs_are_run_without_them(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import torch\n"
        "x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)\n"
        "for _ in range(3):\n"
        "    torch.nn.functional.conv2d(x, w)\n"
    )
    others = [solver.name for solver in solvers.all_solvers() if solver.name != "lowering_type1"]
    options = [word for name in others for word in ("--exclude", name)]
    words = ["-m", "tilewise", "run", "--wait", "--report", "--rigor", "estimate", *options, str(script)]
    result = run_script(*words, cwd=tmp_path, environment={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if " forward " in line]
    assert "lowering_type1" in line
