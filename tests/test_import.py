"""Importing tilewise is cheap: whatever costs time or touches a device waits until it is used."""

from __future__ import annotations

import json
import subprocess
import sys

LATER = {"click", "cuda", "cudnn", "jinja2", "matplotlib", "numba", "rich", "scipy", "sqlite3", "triton"}
PROGRAM = """
import json, sys
import torch
before = set(sys.modules)
import tilewise
tilewise.fft
packages = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps({"packages": sorted(packages), "cuda": torch.cuda.is_initialized(), "version": tilewise.__version__}))
"""


def import_in_new_process() -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_import_leaves_heavy_packages_and_the_gpu_alone() -> None:
    found = import_in_new_process()
    assert LATER.intersection(found["packages"]) == set()
    assert found["cuda"] is False
    assert found["version"]
