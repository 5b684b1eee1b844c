"""What tries the wheel knows every extra, and tells what failed. It downloads much, so that it is not run here."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from tools import check_wheel

ROOT = Path(__file__).parents[2]


def test_every_extra_is_tried() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    assert set(check_wheel.NEEDS) == {check_wheel.BASE, *extras}


@pytest.mark.parametrize("extra", check_wheel.NEEDS)
def test_what_needs_an_extra_is_python(extra: str) -> None:
    compile(check_wheel.NEEDS[extra], extra, "exec")


def test_a_program_runs_apart_and_its_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("TILEWISE_WORKSPACE", "1MiB")
    alone = (
        "import os\nfrom pathlib import Path\nassert 'PYTHONPATH' not in os.environ\n"
        "assert 'TILEWISE_WORKSPACE' not in os.environ\nPath('here').touch()\n"
    )
    python = Path(sys.executable)
    assert check_wheel.failure(python, alone, tmp_path) == ""
    assert (tmp_path / "here").is_file()
    said = check_wheel.failure(python, "print('before')\nraise SystemExit('no such kernel')", tmp_path)
    assert said.startswith("exit 1: before")
    assert "no such kernel" in said


def test_another_extra_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        check_wheel.main(["cuda"])
    assert raised.value.code == 2
    assert "'cuda': one of base, cpu, gpu" in capsys.readouterr().err
