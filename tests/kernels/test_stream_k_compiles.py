"""Stream-K products by Triton's compiler for compute capability 9.0, without a GPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from tests.kernels.recorded import apart, compiled

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
SHARED = 227 * 1024
REGISTERS = 64 * 1024
MOST_STACK = 64
"""Bytes of a thread that may be kept out of registers: beside the product, not in its loop."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def stream_k() -> list[dict[str, Any]]:
    """The kernels of the first config of each product and number of warps, in every type and storage."""
    from tilewise.problems.gemm.problem import GemmProblem
    from tilewise.solvers.gemm._stream_k import launches, wide, work_of
    from tilewise.solvers.gemm._stream_k_configs import configs

    found = []
    for dtype, precision in (("fp32", "ieee"), ("fp32", "tf32"), ("bf16", "ieee"), ("fp16", "ieee")):
        for op, m, n, k in (("NT", 128, 2560, 2560), ("NN", 33, 1760, 1761), ("TN", 2560, 65, 2560)):
            p = GemmProblem(m, n, k, op, dtype=dtype, precision=precision, device="cuda:Some GPU", bias=True)
            a, b, out = (torch.empty(p.shape(role), dtype=DTYPES[dtype], device="meta") for role in "abc")
            kinds = {(c.get("product"), c["warps"]): c for c in reversed(list(configs(p)))}
            for c in kinds.values():
                for launch in launches(work_of(p, c), a, b, out):
                    ahead = any(role in str(c.get("pack", "")) or wide(p, role) for role in "ab")
                    of = {"of": f"{p.key} {c}", "threads": 32 * launch.warps, "ahead": ahead}
                    found.append(compiled(launch, [16, 16, 16, 256, 2]) | of)
    return found


@pytest.mark.slow
def test_stream_k_products_fit_and_take_matrix_units() -> None:
    found = apart("tests.kernels.test_stream_k_compiles:stream_k")
    known = {"stream_k_product", "add_stretches", "pack_operand"}
    assert {"stream_k_product", "add_stretches"} <= {kernel["kernel"] for kernel in found} <= known
    for kernel in found:
        assert kernel["threads"] * kernel["registers"] <= REGISTERS, kernel["of"]
        assert kernel["shared"] <= SHARED, kernel["of"]
        if kernel["kernel"] == "stream_k_product":
            assert "wgmma.mma_async" in kernel["ptx"] or "mma.sync" in kernel["ptx"], kernel["of"]
            assert "cp.async" in kernel["ptx"] or not kernel["ahead"], kernel["of"]
        assert kernel["stack"] <= MOST_STACK, kernel["of"]
