"""Networks of modules in the current folder, however the program is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NET = """
from torch import nn

class Net(nn.Module):
    input_shape = (3, 8, 8)

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        from besides_here import double  # only now
        return double(self.conv(x))
"""
SCRIPT = "import sys\nfrom tilewise.cli import main\nsys.exit(main())\n"
"""What pip writes for a console script: Python puts the script's folder on its path, not the current one."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a network whose forward needs another module of that folder."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "net_here.py").write_text(NET)
    (work / "besides_here.py").write_text("def double(x):\n    return 2 * x\n")
    return work


@pytest.mark.parametrize("started", ["script", "python -m"])
def test_a_module_of_the_current_folder_is_found(folder: Path, started: str) -> None:
    script = folder.parent / "tilewise"
    script.write_text(SCRIPT)
    begin = [str(script)] if started == "script" else ["-m", "tilewise"]
    done = subprocess.run(
        [sys.executable, *begin, "plan", "net_here:Net", "--rigor", "wisdom_only", "--device", "cpu"],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.returncode == 1, done.stderr  # wisdom has nothing, and it takes no time to say so
    assert "mb32ic3ih8oc4oh6kh3ph0" in done.stdout


@pytest.mark.parametrize(
    "words", [("plan",), ("plan", "--gpus", "2"), ("time",), ("kernels", "build", "-o", "x.pack")], ids=" ".join
)
def test_every_command_that_takes_one_finds_it(run, folder: Path, monkeypatch: pytest.MonkeyPatch, words) -> None:
    (folder / "broken_here.py").write_text("raise RuntimeError('found')\n")
    monkeypatch.chdir(folder)
    before = list(sys.path)
    arch = ("--arch", "cpu") if words[0] == "kernels" else ("--device", "cpu")
    result = run(words[0], *words[1:], *arch, "broken_here:Net")
    assert (result.exit_code, sys.path) == (2, before)
    assert "importing broken_here raised RuntimeError: found" in result.stderr


def test_what_needs_no_module_leaves_the_path_alone(run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "timm.py").write_text("raise RuntimeError('the wrong one')\n")
    monkeypatch.chdir(folder)
    result = run("plan", "timm:no_such_network")
    assert result.exit_code == 2
    assert "the wrong one" not in result.stderr
