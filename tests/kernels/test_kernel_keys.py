"""Keys of kernels in Triton's cache, in processes that meet the kernels in different orders."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

MODULES = ("depthwise", "norm_sums", "halo", "winograd")
"""Modules of kernels; the first two have constants that called functions use."""
PROGRAM = """
import importlib, json, sys
from triton import JITFunction
from tilewise.kernels.building.kernel_keys import settle
modules = [importlib.import_module(f"tilewise.kernels.triton.{name}") for name in sys.argv[2:]]
kernels = [kernel for module in modules for kernel in vars(module).values() if isinstance(kernel, JITFunction)]
for kernel in kernels[:: int(sys.argv[1])]:
    settle(kernel)
print(json.dumps({f"{kernel.__module__}.{kernel.__name__}": kernel.cache_key for kernel in kernels}))
"""


def keys(step: int) -> Any:
    """The keys of all kernels in a process that goes through them in one direction (1) or the other (-1)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")
    command = [sys.executable, "-c", PROGRAM, str(step), *MODULES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def test_the_order_of_kernels_does_not_matter() -> None:
    """Triton's own keys of depthwise kernels differ by the kernel that a process met first."""
    forwards, backwards = keys(1), keys(-1)
    assert len(forwards) > 10
    assert forwards == backwards
