"""The kernels of halos and of messages by Triton's compiler for compute capability 9.0, without a GPU."""

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
from tilewise.comm import peers
from tilewise.distributed.halo_terms import ADD_AT_ONCE, ADD_BLOCK, BLOCKS, CHANNELS
from tilewise.kernels.triton import halo, peer

def made(kernel, pointers, constants, warps):
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, {})
    found = compile(source, GPUTarget("cuda", 90, 32), {"num_warps": warps, "num_stages": 2})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        used = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return found.asm["ptx"], used

found = []
cases = [("tf32x3", blocks, True, False) for blocks in BLOCKS]
cases += [("tf32x3", BLOCKS[0], False, True), ("tf32", BLOCKS[0], False, False)]
for product, blocks, rows, volume in cases:
    common = {"PRECISION": product, "BLOCK_O": CHANNELS, "VOLUME": volume}
    operands = dict.fromkeys(["source0", "source1", "w0", "w1", "out0", "out1"], "*fp32")
    near = {"SOURCE_ROWS": rows, "W_INPUTS": True, "OUT_ROWS": rows, "ACCUMULATE": True}
    sides = {"BLOCK_R": blocks.rows, "BLOCK_I": blocks.depth}
    found.append((blocks.rows, *made(halo.gather, operands, common | near | sides, blocks.warps)))
    operands = dict.fromkeys(["x0", "x1", "y0", "y1", "shares"], "*fp32")
    sides = {"BLOCK_R": blocks.sum_rows, "BLOCK_I": CHANNELS, "X_ROWS": rows, "Y_ROWS": rows}
    found.append((CHANNELS, *made(halo.weight_shares, operands, common | sides, blocks.warps)))
made(halo.add_shares, {"shares": "*fp32", "out": "*fp32"}, {"BLOCK": ADD_BLOCK, "AT_ONCE": ADD_AT_ONCE}, 4)
counts = {n + i: "*i32" for n in ("awaited", "released", "counts") for i in "01"} | {"page": "*i32"}
words = {n + i: "*i64" for n in ("memory", "box") for i in "01"}
sizes = {"WORDS": peers.CHUNK // 8, "CHANNELS": peers.CHANNELS, "DIMS": 2, "LOOK": peers.LOOK, "ADD": False}
messages = [made(peer.message, words | counts, sizes | {"TAKE": take}, peers.WARPS) for take in (False, True)]
print(json.dumps([found, messages]))
"""


@pytest.fixture(scope="module")
def compiled() -> list[list[list[str]]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root / "src"), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[list[list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_products_take_matrix_units_and_spill_nothing(compiled: list[list[list[str]]]) -> None:
    for rows, ptx, used in compiled[0]:
        assert "wgmma.mma_async" in ptx if rows >= 64 else "mma.sync" in ptx
        assert re.findall(r"STACK:(\d+)", used) == ["0"]


def test_messages_are_released_and_acquired_by_all_gpus(compiled: list[list[list[str]]]) -> None:
    for ptx, used in compiled[1]:
        assert re.findall(r"STACK:(\d+)", used) == ["0"]
        lines = ptx.splitlines()
        looks = [n for n, line in enumerate(lines) if "acquire" in line]
        turns = [n for n, line in enumerate(lines) if "ld.volatile" in line]
        assert len(looks) == 1, "warps read a look in a loop through shared memory, and may part"
        assert turns
        assert max(turns) < looks[0]
        stores = [n for n, line in enumerate(lines) if "st.global.b64" in line]
        (release,) = (n for n, line in enumerate(lines) if "release" in line)
        assert all("sys" in lines[n] for n in (looks[0], release))
        barriers = [n for n, line in enumerate(lines) if "bar.sync" in line]
        assert not any(min(turns) < n < looks[0] for n in barriers)
        assert looks[0] < min(stores)
        assert any(max(stores) < n < release for n in barriers)
