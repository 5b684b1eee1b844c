"""A device's measured profile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise.planner.search.estimate import is_profile, measure_profile


def test_a_profile_is_measured_in_its_own_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast of the caller would make twice the rate of it, which wisdom keeps."""
    plain, seen = torch.convolution, set()

    def watched(*operands: Any, **options: Any) -> torch.Tensor:
        result = plain(*operands, **options)
        seen.add((result.dtype, result.device.type, result.requires_grad))
        return result

    monkeypatch.setattr(torch, "convolution", watched)
    with torch.autocast("cpu"), torch.device("meta"):
        assert is_profile(measure_profile("cpu"))
    assert seen == {(torch.float32, "cpu", False)}
