"""Bias, residual and activation of products by Triton's compiler for compute capability 9.0, without a GPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from tests.kernels.recorded import Recorded, apart

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
KERNELS = {
    "implicit_gemm": "gather_gemm", "row_gemm": "row_product",
    "patch_gemm": "gathered_gemm", "direct_gemm": "direct_gemm",
}  # fmt: skip
FOLLOWED = ({"residual": True, "activation": "relu"}, {"activation": "gelu"})
SPILLED = {"direct_gemm": 288}
"""Bytes of a thread that may be kept in memory where results are written. This one keeps 96 with a bias alone."""


def products() -> list[dict[str, Any]]:
    """The first two that each solver offers in both layouts, with a residual and ReLU and with GELU."""
    from tilewise.problems.conv.axis import Axis
    from tilewise.problems.conv.problem import ConvProblem, Pass
    from tilewise.solvers import get

    same, stem, patch, point = Axis(28, 3, 1, 1, 1, 1), Axis(224, 7, 2, 1, 3, 3), Axis(224, 16, 16), Axis(28, 1)
    layers = (
        ("implicit_gemm", "bf16", 128, 128, same), ("implicit_gemm", "fp32", 128, 128, same),
        ("row_gemm", "bf16", 3, 64, stem),
        ("patch_gemm", "bf16", 3, 768, patch), ("direct_gemm", "fp32", 64, 128, point),
    )  # fmt: skip
    Recorded.begin()
    found = []
    for name, dtype, into, outof, axis in layers:
        for layout, followed in ((layout, f) for layout in ("contiguous", "channels_last") for f in FOLLOWED):
            if name == "row_gemm" and layout == "contiguous":
                continue
            p = ConvProblem(
                Pass.FPROP, 32, into, outof, (axis, axis), dtype=dtype, out_dtype=dtype, layouts=(layout,) * 3,  # type: ignore[arg-type]
                alignment=(16, 16, 16), device="cuda:any", bias=True, **followed,  # type: ignore[arg-type]
            )  # fmt: skip
            order = torch.channels_last if layout == "channels_last" else torch.contiguous_format
            tensors = [
                torch.empty(p.shape(r), dtype=p.torch_dtype(r), device="meta").contiguous(memory_format=order)
                for r in (*p.operands, p.result)
            ]
            solver = get(name)
            for c in list(solver.configs(p))[:2]:
                solver.bind(p, c, *tensors)
                made = Recorded.made
                made[:] = [one for one in made if one[0].kernel.fn.__name__ == KERNELS[name]]
                found += Recorded.compiled(f"{name} {dtype} {layout} {followed} {c.key}")
    return found


@pytest.mark.slow
def test_what_follows_the_sums_spills_nothing() -> None:
    found = apart("tests.kernels.test_epilogues_compile:products")
    assert {kernel["kernel"] for kernel in found} == set(KERNELS.values())
    for kernel in found:
        assert kernel["stack"] <= SPILLED.get(kernel["kernel"], 0), f"{kernel['of']}: {kernel['stack']} bytes"
        assert "wgmma.mma_async" in kernel["ptx"] or "mma.sync" in kernel["ptx"]
        if "'activation': 'relu'" in kernel["of"]:
            assert "max.NaN" in kernel["ptx"]
