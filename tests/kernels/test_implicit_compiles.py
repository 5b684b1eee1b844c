"""Implicit products, plain and Winograd's, by Triton's compiler for compute capability 9.0, without a GPU."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.kernels.recorded import apart, compiled

if TYPE_CHECKING:
    from tilewise.problems.conv.problem import ConvProblem, Pass
    from tilewise.solvers.common.views import View

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
SHARED = 227 * 1024
REGISTERS = 64 * 1024


def _problem(pass_: Pass, layout: str, kernel: int) -> tuple[ConvProblem, list[View]]:
    from tilewise.problems.conv.axis import Axis
    from tilewise.problems.conv.problem import ConvProblem
    from tilewise.solvers.common.views import View

    axis = Axis(27, kernel, 1, 1, kernel // 2, kernel // 2)
    p = replace(ConvProblem(pass_, 32, 192, 192, (axis, axis), device="cuda:any"), layouts=(layout,) * 3)
    order = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    tensors = [torch.empty(p.shape(r), device="meta").contiguous(memory_format=order) for r in (*p.operands, p.result)]
    return p, [View.of(tensor) for tensor in tensors]


def winograd() -> list[dict[str, Any]]:
    """Every tile's products, for results in both layouts and for a filter's gradient."""
    from tilewise.problems.conv.problem import Pass
    from tilewise.solvers.winograd._gemm import TilesLayout, launches
    from tilewise.solvers.winograd.winograd_gemm import GRADIENT_TILES, TILES, at_once

    found = []
    for pass_, layout, taps in (
        (Pass.FPROP, "contiguous", 5), (Pass.DGRAD, "channels_last", 3), (Pass.WGRAD, "contiguous", 5)
    ):  # fmt: skip
        p, tensors = _problem(pass_, layout, taps)
        tiles = {4: GRADIENT_TILES} if pass_ is Pass.WGRAD else TILES
        for outputs, tile in [(m, tile) for m, each in tiles.items() for tile, _ in each]:
            for launch in launches(TilesLayout(p, outputs, tile, 32), *tensors):
                if launch.kernel.fn.__name__ in ("tile_gemm", "gradient_gemm"):
                    of = {"of": f"{layout} {outputs} {tile}", "threads": 32 * tile.warps, "at_once": at_once(tile)}
                    found.append(compiled(launch, [16, 16, 16, 256]) | of)
    return found


def plain() -> list[dict[str, Any]]:
    """The products of half as many sums as there are registers, for results in both layouts."""
    from tilewise.problems.conv.problem import Pass
    from tilewise.solvers.common.split_products import Tile
    from tilewise.solvers.products._implicit import PRODUCTS, Layout, launches

    found = []
    for layout, accumulate in itertools.product(("contiguous", "channels_last"), (False, True)):
        p, tensors = _problem(Pass.FPROP, layout, 5)
        p = replace(p, accumulate=accumulate)
        made = launches(Layout(p, PRODUCTS["fp16x3"], Tile(64, 128, 64, 4, 2), 32), *tensors)
        (launch,) = (launch for launch in made if launch.kernel.fn.__name__ == "gather_gemm")
        found.append(compiled(launch, [16, 16, 16, 256]) | {"of": layout})
    return found


@pytest.mark.slow
def test_winograd_s_products_take_matrix_units_and_spill_nothing() -> None:
    found = apart("tests.kernels.test_implicit_compiles:winograd")
    assert {kernel["kernel"] for kernel in found} == {"tile_gemm", "gradient_gemm"}
    for kernel in found:
        assert kernel["stack"] == 0, kernel["of"]
        assert "wgmma.mma_async" in kernel["ptx"] or "mma.sync" in kernel["ptx"]
        assert "cp.async.cg.shared.global" in kernel["ptx"], kernel["of"]
        if "channels_last" in kernel["of"]:
            assert "st.global.v4.b32" in kernel["ptx"]
        # As many at a time as blocks of images are chosen by.
        assert kernel["at_once"] * kernel["threads"] * kernel["registers"] <= REGISTERS, kernel["of"]
        assert kernel["at_once"] * (kernel["shared"] + 1024) <= SHARED, kernel["of"]


@pytest.mark.slow
def test_results_with_channels_innermost_are_written_four_at_a_time() -> None:
    for kernel in apart("tests.kernels.test_implicit_compiles:plain"):
        assert kernel["stack"] == 0, kernel["of"]
        assert ("st.global.v4.b32" in kernel["ptx"]) == (kernel["of"] == "channels_last")
