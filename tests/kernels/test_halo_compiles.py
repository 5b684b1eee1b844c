"""The kernels of halos by Triton's compiler for compute capability 9.0, without a GPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from tests.kernels.recorded import Recorded, apart

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def products() -> list[dict[str, Any]]:
    """All that a middle rank's halos launch: 64 to 64 channels, 3x3."""
    from tilewise.distributed.parts.layout import Grid, Layout, even_cuts
    from tilewise.distributed.passes.halo_kernels import BLOCKS, HaloTerms, Kernels
    from tilewise.distributed.passes.share import share_of
    from tilewise.problems.conv.axis import Axis

    Recorded.begin()
    axes = (Axis(384, 3, 1, 1, 1, 1), Axis(128, 3, 1, 1, 1, 1))
    share = share_of(Layout(Grid((-2,), (3,), (1,)), (even_cuts(384, 3),)), axes, False, "halos")
    orders = torch.channels_last, torch.contiguous_format
    cases = [("ieee", torch.float32, order, b) for order in orders for b in BLOCKS]
    cases += [("tf32", torch.float32, torch.channels_last, b) for b in BLOCKS]
    cases += [("ieee", torch.bfloat16, torch.contiguous_format, BLOCKS[2])]
    found = []
    for precision, dtype, order, blocks in cases:
        y = torch.empty(1, 64, 128, 128, dtype=dtype).contiguous(memory_format=order)
        w = torch.empty(64, 64, 3, 3, dtype=dtype).contiguous(memory_format=order)
        terms = HaloTerms(share, precision, Kernels.alike(blocks))
        boxes = terms.results([torch.empty(1, 64, 1, 128, dtype=dtype) for _ in share.boxes], w)
        terms.add(y, boxes, terms.filters(w, back=False))
        terms.home(y, terms.filters(w, back=True), boxes)
        terms.add_sums(w, terms.sums(boxes, w, y))
        found += Recorded.compiled(f"{precision} {dtype} {order} {blocks}")
    return found


@pytest.mark.slow
def test_products_take_matrix_units_and_spill_nothing() -> None:
    found = apart("tests.kernels.test_halo_compiles:products")
    assert {kernel["kernel"] for kernel in found} == {"gather", "weight_shares", "add_shares"}
    for kernel in found:
        # Where all registers are taken the compiler may leave an index or two of a block in its thread's memory.
        assert kernel["stack"] <= 8, (kernel["kernel"], kernel["of"])
        if kernel["kernel"] != "add_shares":
            assert "wgmma.mma_async" in kernel["ptx"] or "mma.sync" in kernel["ptx"]
            assert "cp.async.cg.shared.global" in kernel["ptx"] or "cp.async.ca.shared.global" in kernel["ptx"]
