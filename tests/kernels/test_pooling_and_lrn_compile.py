"""Kernels of pooling and normalization by Triton's compiler for compute capability 9.0, without a GPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from tests.kernels.recorded import apart, compiled

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
LAYOUTS = ("contiguous", "channels_last")


def pooling() -> list[dict[str, Any]]:
    """The first and the last config of a maximum of images, in both layouts and two types."""
    from tilewise.problems.pooling.notation import parse_pooling
    from tilewise.solvers import get
    from tilewise.solvers.pooling.window_tiles import Tiles, backward_launch, forward_launch

    found = []
    for layout in LAYOUTS:
        for dtype in ("fp32", "bf16"):
            text = "max_pool:n64c64i112x112k3x3s2x2p1x1"
            p = parse_pooling(text, task="training", layout_name=layout, dtype=dtype, device="cuda:Some GPU")
            c: Any = list(get("window_tiles").configs(p))[-1]
            launches = forward_launch(Tiles(p, c["tile"])), backward_launch(Tiles(p, c["back"], back=True))
            found += [compiled(one, [16] * 3) | {"of": p.key} for one in launches]
    return found


def norms() -> list[dict[str, Any]]:
    """Some configs of AlexNet's first normalization, in both layouts."""
    from tilewise.problems.lrn.problem import LrnProblem
    from tilewise.solvers import get
    from tilewise.solvers.lrn.channel_tiles import backward_launch, forward_launch, tiles_of

    found = []
    for layout in LAYOUTS:
        p = LrnProblem(64, 96, (55, 55), 5, task="training", layout_name=layout, device="cuda:Some GPU")
        several = list(get("channel_tiles").configs(p))
        for c in (several[0], several[-1]):
            forward, backward = tiles_of(p, c)
            assert backward is not None
            for one, tensors in ((forward_launch(forward), 2), (backward_launch(backward), 3)):
                found.append(compiled(one, [16] * tensors) | {"of": f"{p.key} {c}"})
    return found


@pytest.mark.slow
def test_pooling_stays_in_registers_and_moves_wide_words_along_channels() -> None:
    found = apart("tests.kernels.test_pooling_and_lrn_compile:pooling")
    assert {one["kernel"] for one in found} == {"pooled", "gathered"}
    for one in found:
        assert one["stack"] == 0, one["of"]
        if "channels_last" in one["of"]:
            assert "ld.global.v4.b32" in one["ptx"], one["of"]
            assert "st.global.v4.b32" in one["ptx"], one["of"]


@pytest.mark.slow
def test_normalization_stays_in_registers() -> None:
    found = apart("tests.kernels.test_pooling_and_lrn_compile:norms")
    assert {one["kernel"] for one in found} == {"normalized", "gradient", "gradient_by_pixels"}
    for one in found:
        assert one["stack"] == 0, one["of"]
        if one["kernel"] == "gradient_by_pixels":
            # Each number is loaded once by a thread: 8 or 32 channels with those around them, of x and of dy.
            assert one["ptx"].count("ld.global.b32") in (8 + 8 + 8 + 4, 32 + 8 + 32 + 4), one["of"]
