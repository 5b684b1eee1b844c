"""Kernels of recurrent cells by Triton's compiler for compute capability 9.0, without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
CASES = [
    ("peephole", "fp32", True), ("peephole", "bf16", True), ("three", "fp16", True), ("zoneout", "bf16", False),
    ("normalized", "fp32", False), ("means", "bf16", False), ("noisy_means", "fp16", False),
]  # fmt: skip


def compiled() -> None:
    """Compiles the kernels of the case that stands in ``argv`` as scans do, for batches of 1 and more."""
    import torch
    from tests.rnn.test_scan import CELLS, NOISE
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_for

    from tilewise.rnn.gpu_kernels import CellKernels
    from tilewise.rnn.tracing import trace

    name, dtype_name, fused = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype_name]
    cell, from_x, from_h, states, parts = CELLS[name]
    for batch, hidden in ((1, 1), (1, 48), (20, 33)):
        traced = trace(cell, from_x, from_h, states, parts, (batch, hidden), NOISE.get(name, 0))
        kernels = CellKernels(traced, batch, hidden, dtype, torch.device("cpu"), fused)
        for pass_name in ("step", "step_back"):
            made: Any = kernels.made(pass_name, "ieee")
            names = made.kernel.arg_names
            pointers = dict(zip(names, kernels.looks(pass_name), strict=False))
            types = {torch.uint8: "u8", torch.int64: "i64", torch.float32: "fp32", dtype: dtype_name}
            constants = dict(made.constants)
            signature = {}
            for each in names:
                signature[each] = f"*{types[pointers[each][0]]}" if each in pointers else "i32"
                if each in constants:
                    signature[each] = "constexpr"
            for each, value in zip(("batch", "hidden", "between"), kernels.scalars, strict=True):
                if value == 1:  # Triton takes it for a constant
                    constants[each], signature[each] = 1, "constexpr"
            source = ASTSource(made.kernel, signature, {(names.index(n),): v for n, v in constants.items()}, {})
            kernel = compile_for(source, GPUTarget("cuda", 90, 32), {"num_warps": made.warps, "num_stages": 2})
            assert "cubin" in kernel.asm


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "fused"), CASES)
def test_kernels_compile_for_a_gpu(name: str, dtype: str, fused: bool) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "src"), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "from tests.kernels.test_cell_steps_compile import compiled; compiled()"]
    done = subprocess.run(
        [*command, name, dtype, str(fused)], capture_output=True, text=True, check=False, env=environment, cwd=root
    )
    assert done.returncode == 0, done.stderr[-4000:]
