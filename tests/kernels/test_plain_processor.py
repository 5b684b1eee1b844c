"""CPU kernels on a processor without extensions: x86-64 as it began, in a process that is told so."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

CONVOLVE = """
import math, torch
from tilewise import solvers
from tilewise.problems.conv.axis import Axis
from tilewise.kernels.cpu import halves
from tilewise.problems.operands import make_operands, make_result
from tilewise.problems.conv.problem import ConvProblem, Pass

assert not halves.has_instructions()
solver = solvers.get("fused_lowering")
p = ConvProblem(Pass.FPROP, 2, 3, 5, (Axis(9, 3, 2, 1, 1, 1), Axis(11, 3, 1, 1, 1, 0)))
c = next(iter(solver.configs(p)))
assert c["lanes"] == 4, c
a, b = make_operands(p)
out = make_result(p).fill_(math.nan)
space = torch.empty(solver.workspace(p, c), dtype=torch.uint8)
got, want = solver.bind(p, c, a, b, out)(a, b, out, space).double(), p.reference(a, b)
assert (got - want).norm() <= 1e-6 * want.norm()
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="another kind of processor")
def test_a_plain_processor_computes_the_same(tmp_path: Path) -> None:
    """Vectors of four, no fused multiplication and addition, and no instruction for fp16."""
    plain = {
        "NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "", "NUMBA_OPT": "0", "ATEN_CPU_CAPABILITY": "default",
        "TILEWISE_CACHE_DIR": str(tmp_path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CONVOLVE], env=os.environ | plain, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
