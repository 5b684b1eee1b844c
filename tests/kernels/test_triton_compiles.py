"""Products by Triton's compiler for compute capability 9.0, without a GPU: what the interpreter cannot tell."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tilewise.kernels.cuda.launch import SHARED_LIMIT
from tilewise.solvers.fourier._frequency_products import PART_BLOCKS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
ORDERS = {"a": (False, False), "b": (True, True), "none": (True, False)}
"""Whether operands are contiguous along depth, where that one is conjugated."""


def compiled() -> None:
    """Prints the PTX, the shared memory and the use of resources of what stands in ``argv``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_for

    from tilewise.kernels.triton.split_gemm import split_gemm

    types = {"a": "*fp16", "b": "*fp16", "out": "*fp32", "a_peak": "*i32", "b_peak": "*i32"}
    found = []
    for constants, warps, stages in json.loads(sys.argv[1]):
        names = split_gemm.arg_names
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in ("a", "b", "out")}
        source = ASTSource(split_gemm, signature, {(names.index(n),): v for n, v in constants.items()}, attributes)
        kernel = compile_for(source, GPUTarget("cuda", 90, 32), {"num_warps": warps, "num_stages": stages})
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            tool = triton.knobs.nvidia.cuobjdump.path
            used = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        found.append({"ptx": kernel.asm["ptx"], "shared": kernel.metadata.shared, "used": used})
    json.dump(found, sys.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("form", list(PART_BLOCKS))
def test_products_of_parts_are_pipelined_and_spill_nothing(form: str) -> None:
    """The best blocks: asynchronous copies straight into shared memory, and the matrix units take them from there."""
    wanted = []
    for number, (conjugate, (a, b)) in enumerate(list(ORDERS.items())[: 3 if form == "split" else 1]):
        block = PART_BLOCKS[form][number][0]
        even = number != 0
        constants = {
            "A_DEPTH_INNER": a, "B_DEPTH_INNER": b, "CONJUGATE": conjugate, "ACCUMULATE": not even,
            "SPLIT": form == "split", "PROMOTE": 2 if form == "split" and block.rows == block.columns else 0,
            "UNIT": 8, "EVEN_M": even, "EVEN_N": even, "EVEN_K": even,
            "BLOCK_M": block.rows, "BLOCK_N": block.columns, "BLOCK_K": block.depth,
        }  # fmt: skip
        wanted.append((constants, block.warps, block.stages))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "src"), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "from tests.kernels.test_triton_compiles import compiled; compiled()"]
    done = subprocess.run(
        [*command, json.dumps(wanted)], capture_output=True, text=True, check=False, env=environment, cwd=root
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for kernel in json.loads(done.stdout):
        assert "wgmma.mma_async" in kernel["ptx"]
        assert "cp.async.cg.shared.global" in kernel["ptx"]
        assert kernel["shared"] <= SHARED_LIMIT
        (stack,) = re.findall(r"STACK:(\d+)", kernel["used"])
        assert int(stack) == 0
