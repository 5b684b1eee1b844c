"""PyTorch's OpInfo samples of every convolution by plans that may not be torch's own choice, against float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import share_kernels
from tests.nn.opinfo import BEYOND, OPS
from tests.sampling import EVERY

ROOT = Path(__file__).parents[2]
UNSOLVED: set[str] = set()
"""Problems of these samples that no solver but torch's own choice solves. What is to be added here is a finding."""
UNTYPED = ("float64", "complex64", "complex128", "int64")
"""Types that are torch's own affair."""


def examine(folder: Path, kernels: Path, *words: str) -> dict[str, Any]:
    share_kernels(folder / "cache", kernels)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "TILEWISE_CACHE_DIR": str(folder / "cache"),
    }
    command = [sys.executable, "-m", "tests.nn.opinfo", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    print(found)
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*OPS] if EVERY else ["conv2d"])
def test_samples_are_right_and_planned(name: str, tmp_path: Path, kernels: Path) -> None:
    """``make test`` runs few samples of one operator, ``make test-all`` every one of all."""
    found = examine(tmp_path, kernels, name, *([] if EVERY else ["--most", "2"]))
    assert found["wrong"] == []
    assert found["unplanned"] == []
    assert set(found["unsolved"]) <= UNSOLVED, found["unsolved"]
    assert found["planned"] > 0
    assert found["compared"] > found["samples"] > 0
    assert found["planned"] + sum(found["torchs"].values()) == found["samples"]
    others = {f"torch.{name}" for name in UNTYPED}
    assert set(found["torchs"]) <= others | ({BEYOND} if name.startswith("conv_transpose") else set())
    if EVERY:
        each = {found["torchs"][other] for other in others}
        assert each == {(found["planned"] + found["torchs"].get(BEYOND, 0)) / 3}, "each type has as many samples"


def test_what_is_wrong_by_little_is_found(tmp_path: Path, kernels: Path) -> None:
    """A result of a plan that is off by a hundred roundings of fp32."""
    if not EVERY:
        pytest.skip("importing torch's samples takes seconds: in make test-all")
    found = examine(tmp_path, kernels, "conv1d", "--most", "3", "--plant", "1.00001")
    assert any("float32" in line for line in found["wrong"])
