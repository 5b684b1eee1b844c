"""mu-cuDNN's Figure 12 goes on where an earlier run was ended, and judges no network that is not complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mucudnn_fig12
import pytest
import torch
from harness.result import Result, Row, Side
from harness.settings import Settings

MIB = 2**20


def settings(earlier: dict[str, Any] | None, **options: str) -> Settings:
    return Settings(torch.device("cpu"), True, False, {**mucudnn_fig12.DEFAULTS, **options}, earlier)


def row(name: str, workspace: int) -> Row:
    details = {
        "tensors": 100 * MIB, "baseline_workspace": 90 * MIB, "workspace": workspace, "baseline_ms": 1.0,
        "ours_ms": 1.05, "problem": f"problem of {name}",
    }  # fmt: skip
    return Row(name, "alexnet", Side("cudnn", 190.0), Side("plan", 100.0 + workspace / MIB), "MiB", details=details)


def test_rows_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    rows = [row("conv2 fprop", 2 * MIB), row("conv2 dgrad", 4 * MIB)]
    given = settings(None)
    saved = tmp_path / "earlier.json"
    saved.write_text(json.dumps({"settings": dict(given.options), "rows": [each.to_json() for each in rows]}))
    document = json.loads(saved.read_text())
    known = mucudnn_fig12._earlier(settings(document))
    assert list(known.values()) == rows
    assert known[("alexnet", "conv2 fprop", "problem of conv2 fprop")] == rows[0]
    assert mucudnn_fig12._earlier(settings(document, seconds="60")) == known
    assert mucudnn_fig12._earlier(settings(document, baseline="64MiB")) == {}
    assert mucudnn_fig12._earlier(given) == {}


@pytest.mark.parametrize(("left", "met"), [(0, True), (1, None)])
def test_a_part_of_a_network_is_not_judged(left: int, met: bool | None) -> None:
    found: Result = mucudnn_fig12._result([row("conv2 fprop", 2 * MIB), row("conv2 dgrad", 4 * MIB)], {"alexnet": left})
    assert [bar.met for bar in found.bars] == [met] * 3
    assert found.bars[0].value == pytest.approx(6 / 180)
    assert found.bars[1].value == pytest.approx(1.03)
    assert list(found.notes) == ([f"alexnet: {left} kernels are not measured yet"] if left else [])
