"""Depthwise and pointwise layers in one kernel, by Triton's compiler for compute capability 9.0, without a GPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from tests.kernels.recorded import apart, compiled

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
SHARED = 227 * 1024


def offered() -> list[dict[str, Any]]:
    """What is measured first of each of some blocks of networks."""
    from tilewise.problems.conv.axis import Axis
    from tilewise.problems.separable.problem import SeparableProblem
    from tilewise.solvers.separable._tiles import launch_of, tile_of
    from tilewise.solvers.separable.separable_tiles import SeparableTiles

    solver, found = SeparableTiles(), []
    for channels, outputs, size, kernel, stride, function in (
        (144, 24, 56, 3, 1, "relu6"), (96, 24, 112, 3, 2, "clamp:0.0:4.0"), (240, 40, 28, 5, 1, "hardswish"),
        (512, 512, 14, 3, 1, "relu"), (40, 24, 15, 7, 1, "none"),
    ):  # fmt: skip
        axis = Axis(size, kernel, stride, 1, kernel // 2, kernel // 2)
        p = SeparableProblem(
            32, channels, channels, outputs, (axis, axis), expands=False, inner=(function,), activation="hardswish",
            residual=True, dtype="bf16", device="cuda:any",
        )  # fmt: skip
        x, out = (
            torch.empty(p.shape(role), device="meta").contiguous(memory_format=torch.channels_last) for role in "xy"
        )
        for c in list(solver.configs(p))[: solver.most_compiled]:
            tile = tile_of(c)
            channels_of_thread = tile.count * tile.depth // (32 * tile.warps)
            sums = {
                "of": f"{p.key} {c}",
                "line": channels_of_thread * tile.edge * kernel,
                "pixels": tile.count * tile.edge,
            }
            found.append(compiled(launch_of(p, tile, x, out), [16, 16, 16, 256, 16]) | sums)
    return found


@pytest.mark.slow
def test_what_is_offered_spills_nothing_and_reads_vectors() -> None:
    for kernel in apart("tests.kernels.test_separable_compiles:offered"):
        assert kernel["stack"] == 0, kernel["of"]
        assert kernel["shared"] <= SHARED, kernel["of"]
        ptx = kernel["ptx"]
        assert ("wgmma.mma_async" if kernel["pixels"] >= 64 else "mma.sync") in ptx, kernel["of"]
        assert "ld.global.v4.b32" in ptx, kernel["of"]
        assert "ld.global.b16" not in ptx, kernel["of"]
        # Each thread filters channels of its own, by a loop over rows: where several warps computed the same, there
        # would be more of these.
        assert ptx.count("fma.rn.f32") == kernel["line"], kernel["of"]
