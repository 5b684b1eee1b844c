"""Nothing waits for torch where nothing is computed: help, completion, and input that is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.report.schedules import schedule
from tests.report.test_advice import HEAD, advice

from tilewise import solvers
from tilewise.declared import names_at_once, solver_names
from tilewise.frontends.names import BUILTIN
from tilewise.frontends.zoo import BUILDERS
from tilewise.problems.recurrent.tensors import CELLS
from tilewise.problems.texts import recurrent
from tilewise.report.advice import advise_document

LAYER = "mb4ic3ih12oc8oh12kh3ph1"
PROGRAM = """
import json, sys
from tilewise.cli import cli
told = []
for words in json.loads(sys.stdin.read()):
    try:
        cli.main(words, prog_name="tilewise")
    except SystemExit as end:
        told.append([end.code, sorted({"torch", "numba", "scipy"} & set(sys.modules))])
print(json.dumps(told), file=sys.stderr)
"""
HELP = [
    [],
    ["--help"],
    ["--version"],
    ["plan", "--help"],
    ["time", "--help"],
    ["explain", "--help"],
    ["advise", "conv", "--help"],
    ["run", "--help"],
    ["report", "--help"],
    ["wisdom", "show", "--help"],
    ["kernels", "build", "--help"],
    ["info", "--help"],
    ["caffe", "train", "--help"],
]
WRONG = [
    ["frobnicate"],
    ["plan"],
    ["plan", "alexnot"],
    ["plan", "nothere.txt"],
    ["plan", "no_such_module:net"],
    ["plan", "mb4ic3ih12oc8kh"],
    ["plan", "16x32:33x8"],
    ["plan", "lstm:t8n2i3"],
    ["plan", "max_pool:n1c3k2"],
    ["plan", "lrn:n1c3"],
    ["plan", LAYER, "--frobnicate"],
    ["plan", LAYER, "--pass", "nn"],
    ["plan", LAYER, "--workspace", "64"],
    ["plan", LAYER, "--workspace", "64M"],
    ["plan", LAYER, "--workspace", "64 MB?"],
    ["plan", LAYER, "--device", "tpu"],
    ["plan", LAYER, "--exclude", "ftt"],
    ["plan", LAYER, "--rigor", "hard"],
    ["plan", LAYER, "-o", "no_such_folder/plan.json"],
    ["plan", "alexnet", "--max-batch"],
    ["time", LAYER, "--policy", "arena"],
    ["time", LAYER, "--schedule", "nothere.json"],
    ["explain", "alexnet"],
    ["explain", LAYER, "--solver", "ftt"],
    ["advise", "gemm", "16x32"],
    ["report", "nothere.json"],
    ["run", "nothere.py"],
    ["wisdom", "import", "nothere.json"],
    ["wisdom", "forget"],
]


def ends(commands: list[list[str]], folder: Path) -> list[list[object]]:
    """The exit status of each command in one process, and which heavy packages were imported by then."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    told: list[list[object]] = json.loads(done.stderr.splitlines()[-1])
    return told


def test_help_imports_no_torch(tmp_path: Path) -> None:
    for words, (status, packages) in zip(HELP, ends(HELP, tmp_path), strict=True):
        assert packages == [], words
        assert status == (2 if not words else 0), words  # click's status of a group without a command


def test_usual_mistakes_import_no_torch(tmp_path: Path) -> None:
    for words, (status, packages) in zip(WRONG, ends(WRONG, tmp_path), strict=True):
        assert (status, packages) == (2, []), words


def test_documents_that_are_none_and_wisdom_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"schema": "tilewise/pl')
    commands = [["report", "half.json"], ["wisdom", "show"], ["wisdom", "forget", "--solver", "fft"]]
    assert ends(commands, tmp_path) == [[2, []], [0, []], [0, []]]


def test_pages_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "net.json").write_text(json.dumps(schedule(3)), "utf-8")
    (tmp_path / "advice.json").write_text(json.dumps(advise_document(HEAD, advice())), "utf-8")
    commands = [["report", "net.json"], ["report", "advice.json", "-o", "-"]]
    assert ends(commands, tmp_path) == [[0, []], [0, []]]
    assert "alexnet" in (tmp_path / "net.html").read_text("utf-8")


def test_names_that_are_read_without_torch_are_those_there_are() -> None:
    assert solver_names() == tuple(solver.name for solver in solvers.all_solvers())
    assert (
        names_at_once()
        == {solver.name for solver in solvers.all_solvers() if getattr(solver, "at_once", False)}
        != set()
    )
    assert tuple(BUILDERS) == BUILTIN
    assert recurrent.CELLS == CELLS


@pytest.mark.parametrize(
    ("words", "place", "offered"),
    [
        ("tilewise pl", 1, "plan"),
        ("tilewise plan alexnet --rig", 3, "--rigor"),
        ("tilewise plan alexnet --rigor pa", 4, "patient"),
    ],
)
def test_shells_complete_commands_options_and_choices(words: str, place: int, offered: str) -> None:
    variables = {"_TILEWISE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(place)}
    done = subprocess.run(
        [sys.executable, "-c", "from tilewise.cli import main; main()"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **variables},
    )
    assert f"plain,{offered}" in done.stdout.splitlines()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_are_told_how_to_complete(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from tilewise.cli import main; main()"],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "_TILEWISE_COMPLETE": f"{shell}_source",
        },
    )
    assert "tilewise" in done.stdout
    assert "_TILEWISE_COMPLETE" in done.stdout
