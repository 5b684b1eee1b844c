"""``make demo`` as a process, with fewer images and steps."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.forked import run_script
from tests.sampling import EVERY

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
def test_demo_replaces_divides_and_trains_alike(tmp_path: Path, kernels: Path) -> None:
    # Which kernels are divided is a matter of speed, so of what else runs on this machine. In half the demo's memory
    # more than half of them are; of a quarter of its images one or two were, and sometimes none.
    done = demo("--workspace", "4MiB", "--steps", "2", "--iterations", "1", cache=tmp_path, kernels=kernels)
    assert done.returncode == 0, done.stderr
    assert "wide" in done.stdout
    divided = re.search(r"(\d+) take the mini-batch as micro-batches, (\d+) in blocks", done.stdout)
    assert divided is not None
    assert int(divided[1]) + int(divided[2]) > 0
    assert "Losses agree" in done.stdout
    assert str(tmp_path) in done.stdout


def test_demo_fails_when_nothing_was_divided(tmp_path: Path, kernels: Path) -> None:
    # One image cannot be divided.
    done = demo("--batch", "1", "--steps", "1", "--iterations", "1", cache=tmp_path, kernels=kernels)
    assert done.returncode == 1
    assert "no layer's mini-batch was divided" in done.stderr
