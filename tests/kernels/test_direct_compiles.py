"""Products of tensors as they lie, by Triton's compiler for compute capability 9.0, without a GPU."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.recorded import apart, compiled

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
SHARED = 227 * 1024
REGISTERS = 64 * 1024
SPILLED = 128
"""Bytes of a thread that the largest tiles keep in local memory."""


def direct() -> list[dict[str, Any]]:
    """The two largest tiles on pointwise kernels in both layouts, and on a first layer."""
    from tilewise.problems.conv.axis import Axis
    from tilewise.problems.conv.problem import ConvProblem, Pass
    from tilewise.solvers.common.views import View
    from tilewise.solvers.products._direct import Layout, launches
    from tilewise.solvers.products.direct_gemm import tiles

    found = []
    point = ConvProblem(Pass.FPROP, 64, 256, 128, (Axis(28, 1),) * 2)
    stem = ConvProblem(Pass.FPROP, 64, 3, 64, (Axis(224, 7, 2, 1, 3, 3),) * 2)
    for p, layout in itertools.product(
        (point, replace(point, pass_=Pass.WGRAD), stem), ("contiguous", "channels_last")
    ):
        order = torch.channels_last if layout == "channels_last" else torch.contiguous_format
        shapes = (p.shape(role) for role in (*p.operands, p.result))
        views = [View.of(torch.empty(shape, device="meta").contiguous(memory_format=order)) for shape in shapes]
        p = replace(p, layouts=(layout,) * 3)
        for tile, _ in itertools.islice(tiles(p), 2):
            for launch in launches(Layout(p, tile), *views):
                if launch.kernel.fn.__name__ in ("direct_gemm", "direct_gradient"):
                    of = {"of": f"{p.pass_.value} {layout} {tile}", "threads": 32 * tile.warps, "layout": layout}
                    found.append(compiled(launch, [16, 16, 16, 256]) | of)
    return found


@pytest.mark.slow
def test_products_take_matrix_units_from_registers() -> None:
    found = apart("tests.kernels.test_direct_compiles:direct")
    assert {kernel["kernel"] for kernel in found} == {"direct_gemm", "direct_gradient"}
    for kernel in found:
        assert kernel["stack"] <= SPILLED, kernel["of"]
        assert "wgmma.mma_async" in kernel["ptx"] or "mma.sync" in kernel["ptx"], kernel["of"]
        assert "cp.async" in kernel["ptx"], kernel["of"]
        assert kernel["threads"] * kernel["registers"] <= REGISTERS, kernel["of"]
        assert kernel["shared"] <= SHARED, kernel["of"]
