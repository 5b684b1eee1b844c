"""What tests of kept filters get."""

from __future__ import annotations

import pytest
import torch
from tests.execute.kept_filters import FFT


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each time that a filter was prepared."""
    found: list[object] = []
    original = type(FFT).prepare

    def prepare(self: object, *arguments: object) -> object:
        inner = original(self, *arguments)  # type: ignore[arg-type]

        def counted(*tensors: torch.Tensor | None) -> None:
            found.append(tensors)
            inner(*tensors)  # type: ignore[arg-type]

        return counted

    monkeypatch.setattr(type(FFT), "prepare", prepare)
    return found
