"""The halos' kernels by Triton's compiler for compute capability 9.0, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

PROGRAM = """
import json, subprocess, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from tilewise.distributed.halo_terms import ADD_BLOCK, CHANNELS, DEPTH, ROWS, SUM_ROWS, WARPS
from tilewise.kernels.triton import halo

def made(kernel, pointers, constants):
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, {})
    found = compile(source, GPUTarget("cuda", 90, 32), {"num_warps": WARPS})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        used = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return found.asm["ptx"], used

found = []
for product in ("tf32x3", "tf32"):
    blocks = {"PRECISION": product, "BLOCK_R": ROWS, "BLOCK_O": CHANNELS, "BLOCK_I": DEPTH}
    operands = dict.fromkeys(["source0", "source1", "w0", "w1", "out0", "out1"], "*fp32")
    found.append(made(halo.gather, operands, blocks | {"ACCUMULATE": True}))
    operands = dict.fromkeys(["x0", "x1", "y0", "y1", "shares"], "*fp32")
    found.append(made(halo.weight_shares, operands, blocks | {"BLOCK_R": SUM_ROWS, "BLOCK_I": CHANNELS}))
made(halo.add_shares, {"shares": "*fp32", "out": "*fp32"}, {"BLOCK": ADD_BLOCK})
print(json.dumps(found))
"""


def test_products_take_matrix_units_and_spill_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root / "src"), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    for ptx, used in json.loads(done.stdout.splitlines()[-1]):
        assert "wgmma.mma_async" in ptx
        assert re.findall(r"STACK:(\d+)", used) == ["0"]
