"""``wisdom`` and ``info``, the start-up, and what an interrupted command leaves behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time

import pytest
from tests.conftest import share_kernels

from tilewise.cli import settings
from tilewise.wisdom import Wisdom

LAYER = "mb4ic3ih12oc8oh12kh3ph1"
FAST = ("--device", "cpu", "--batch-sizes", "undivided")


def test_wisdom_goes_round(run, check_document, tmp_path):
    file = tmp_path / "wisdom.json"
    assert "nothing yet" in run("wisdom", "show").stdout
    assert check_document(run("wisdom", "show", "--json").stdout)["environments"] == []
    run("plan", LAYER, *FAST)
    (kept,) = check_document(run("wisdom", "show", "--json").stdout)["environments"]
    assert kept["environment"].startswith("device=cpu ")
    assert kept["plans"] == 3
    assert kept["environment"] in run("wisdom", "show").stdout
    exported = run("wisdom", "export", str(file)).stdout
    assert f"rows written to {file}" in exported
    assert not run("wisdom", "forget", "--all").stdout.startswith("0 rows")
    assert check_document(run("wisdom", "show", "--json").stdout)["environments"] == []
    imported = run("wisdom", "import", str(file)).stdout
    assert re.findall(r"\d+", imported)[0] == re.findall(r"\d+", exported)[0]
    assert check_document(run("wisdom", "show", "--json").stdout)["environments"] == [kept]
    assert run("plan", LAYER, *FAST, "--rigor", "wisdom_only").exit_code == 0


def test_forget_takes_conditions(run):
    run("plan", LAYER, *FAST)
    assert run("wisdom", "forget", "--problem", "no such problem").stdout == "0 rows forgotten\n"
    assert run("wisdom", "forget", "--solver", "no such solver").stdout == "0 rows forgotten\n"
    assert run("wisdom", "forget", "--environment", "no such environment").stdout == "0 rows forgotten\n"
    assert run("wisdom", "forget", "--problem", "conv wgrad").stdout != "0 rows forgotten\n"
    assert run("plan", LAYER, *FAST, "--rigor", "wisdom_only", "--pass", "fprop").exit_code == 0
    assert run("plan", LAYER, *FAST, "--rigor", "wisdom_only", "--pass", "wgrad").exit_code == 1


def test_a_damaged_store_is_a_warning_of_one_line(start, tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "wisdom.sqlite3").write_bytes(b"no store at all" * 100)
    out, err = start("wisdom", "show").communicate(timeout=60)
    assert "nothing yet" in out
    (line,) = err.splitlines()
    assert line.startswith("tilewise: warning: ")
    assert "wisdom.sqlite3" in line


def test_info(run, check_document):
    from tilewise.solvers import all_solvers

    document = check_document(run("info", "--json").stdout)
    assert document["devices"][0]["torch"] == "cpu"
    solvers = {found["name"]: found for found in document["solvers"]}
    assert set(solvers) == {solver.name for solver in all_solvers()}
    assert solvers["aten"]["baseline"]
    assert solvers["micro_batch"]["split"] == "batch"
    assert all(found["what"] for found in document["solvers"])
    assert document["native"]["used"] == (not document["native"]["reason"])
    text = run("info").stdout
    for word in (*solvers, "torch", "wisdom:", "launches: from", "fprop"):
        assert word in text


def test_choices_are_the_libraries():
    from tilewise.problems.base import DTYPES, PRECISIONS
    from tilewise.problems.conv.problem import Pass

    assert tuple(DTYPES) == settings.DTYPES
    assert settings.PRECISIONS == PRECISIONS
    from tilewise.problems.gemm.layouts import OPS

    assert tuple(p.value for p in Pass) == settings.PASSES
    assert tuple(op.lower() for op in OPS) == settings.OPS


@pytest.mark.parametrize("command", [(), ("plan",), ("time",), ("explain",), ("advise",), ("wisdom",), ("info",)])
def test_help(run, command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage: tilewise" in result.stdout


def test_help_does_without_torch():
    program = (
        "import sys\nfrom click.testing import CliRunner\nfrom tilewise.cli import cli\n"
        "for words in (['--help'], ['time', '--help'], ['advise', 'rnn', '-h'], ['frobnicate'], ['plan', 'x', "
        "'--batch', '0']):\n"
        "    CliRunner().invoke(cli, words)\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_version(run):
    import tilewise

    assert tilewise.__version__ in run("--version").stdout


@pytest.mark.slow
def test_interrupted_planning_keeps_what_was_measured(start, tmp_path, kernels):
    share_kernels(tmp_path / "cache", kernels)
    wisdom = Wisdom(tmp_path / "cache" / "wisdom.sqlite3")
    long = ("--batch", "64", "--batch-sizes", "all", "--rigor", "patient")
    process = start("plan", "mb64ic16ih14oc16oh14kh3ph1", "--device", "cpu", *long)
    deadline = time.monotonic() + 300
    while not any(found.measurements for found in wisdom.summary()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    *progress, line = err.splitlines()
    assert line == "tilewise: interrupted; what was measured is kept"
    assert all("mb64ic16ih14oc16oh14kh3ph1" in told or "left" in told for told in progress), progress
    assert sum(found.measurements for found in wisdom.summary()) > 0
