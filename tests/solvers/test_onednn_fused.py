"""oneDNN's convolution with what follows it: where torch lets it compute in bf16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests import toys

from tilewise.planner import Options, Planner
from tilewise.problems.conv.problem import ConvProblem
from tilewise.problems.operands import make_operands
from tilewise.solvers.vendor import onednn_fused
from tilewise.solvers.vendor.onednn_fused import OneDNNFused
from tilewise.wisdom import Wisdom

SOLVER = OneDNNFused()
REASON = "needs bf16 in oneDNN, which this processor lacks"
P = replace(toys.small(batch=2, channels=16, size=9), dtype="bf16", out_dtype="bf16", constant_weight=True)

pytestmark = pytest.mark.skipif(bool(SOLVER.why_not(replace(P, dtype="fp32", out_dtype="fp32"))), reason="no oneDNN")


def computes(p: ConvProblem) -> bool:
    """Whether torch's operators take the layer on this processor."""
    x, w = make_operands(p)
    sizes = [0, 0], [1, 1], [1, 1], 1
    try:
        torch.ops.mkldnn._reorder_convolution_weight(w.contiguous(), *sizes)
        torch.ops.mkldnn._convolution_pointwise(x, w, None, *sizes, "none", [], "")
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_supports_what_torchs_operators_take(dtype: str) -> None:
    p = replace(P, dtype=dtype, out_dtype=dtype)
    assert [REASON in reason for reason in SOLVER.why_not(p)] == ([] if computes(p) else [True])


@pytest.mark.parametrize("rigor", ["estimate", "measure"])
def test_a_plan_is_found_where_it_has_no_bf16(rigor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_fused, "_computes_bf16", lambda: False)
    assert [REASON in reason for reason in SOLVER.why_not(P)] == [True]
    assert not SOLVER.why_not(replace(P, dtype="fp32", out_dtype="fp32"))
    plan = Planner(Wisdom(tmp_path / "wisdom.sqlite3")).plan(P, Options(rigor=rigor))
    assert SOLVER.name not in str(plan)
