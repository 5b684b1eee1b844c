"""``make demo`` as a process with fewer steps, and what makes it fail."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.forked import run_script
from tests.sampling import EVERY

from tilewise.plan import Plan

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
REPOSITORY = Path(__file__).resolve().parents[1]


def demo(*arguments: str, cache: Path, kernels: Path) -> subprocess.CompletedProcess[str]:
    (cache / "kernels").symlink_to(kernels)
    # Without these it would begin again, in a process whose memory allocator is told of them.
    kept = {name: str(1 << 26) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")}
    environment = {**os.environ, **kept, "TILEWISE_CACHE_DIR": str(cache)}
    paths = [str(REPOSITORY / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return run_script(str(REPOSITORY / "examples" / "demo.py"), *arguments, environment=environment, timeout=280)


@pytest.mark.skipif(not EVERY, reason="takes a minute: make test-all runs it")
def test_demo_replaces_keeps_the_limit_and_trains_alike(tmp_path: Path, kernels: Path) -> None:
    done = demo("--batch", "8", "--steps", "2", "--iterations", "1", cache=tmp_path, kernels=kernels)
    assert done.returncode == 0, done.stderr
    assert "wide" in done.stdout
    assert re.search(r"[1-9]\d* of 14 layer-passes replaced", done.stdout)
    # Which kernels are divided is a matter of speed, so of the machine: on some, none is.
    assert re.search(r"None of them divides|take the mini-batch as micro-batches", done.stdout)
    assert "Losses agree" in done.stdout
    assert str(tmp_path) in done.stdout


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", REPOSITORY / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module
    spec.loader.exec_module(module)
    return module


def document(workspace: int | None) -> dict[str, Any]:
    """A document of one layer-pass whose plan takes ``workspace`` bytes; None: left to torch."""
    plan = Plan("mb1ic1ih1oc1oh1kh1", "fft", 1, workspace=workspace or 0).to_json()
    passes = [{"replaced": workspace is not None, "plan": plan}]
    return {"summary": {"passes": 1}, "layers": [{"passes": passes}]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workspace", "losses", "failure"),
    [
        (8 << 20, (0.5, 0.5), None),
        ((8 << 20) + 1, (0.5, 0.5), "a plan takes more workspace than 8MiB"),
        (None, (0.5, 0.5), "no layer was replaced"),
        (0, (0.5, 0.502), "the losses do not agree"),
        (0, (0.5, float("nan")), "the losses do not agree"),
    ],
)
def test_demo_fails_where_something_is_not_as_promised(
    workspace: int | None,
    losses: tuple[float, float],
    failure: str | None,
    program: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = argparse.Namespace(batch=32, workspace="8MiB")
    steps = [[program.Step(loss, 1.0)] for loss in losses]
    assert program.verdict(given, document(workspace), *steps) == int(failure is not None)
    printed = capsys.readouterr().err
    assert printed == (f"demo failed: {failure}\n" if failure else "")
