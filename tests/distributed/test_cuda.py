"""The same on GPUs, by NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed import test_convolution, test_failures, test_layers
from tests.distributed.ranks import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not 1 < torch.cuda.device_count() < 5, reason="2 to 4 GPUs, one a rank"),
]


def ranks() -> int:
    return torch.cuda.device_count()


def test_convolutions() -> None:
    run(ranks(), test_convolution.many, ranks(), 1, 40, device="cuda", timeout=300)


def test_networks() -> None:
    run(ranks(), test_convolution.networks, device="cuda", timeout=120)


def test_layers_too() -> None:
    run(ranks(), test_layers.everything, ranks(), device="cuda", timeout=300)


@pytest.mark.parametrize("kind", ["model", "size", "raises", "dies", "hangs"])
def test_failures_too(kind: str) -> None:
    found: list[Any] = run(
        ranks(), test_failures.step, kind, 4.0, device="cuda", timeout=60, may_die=True,
        without=1 if kind == "hangs" else None,
    )  # fmt: skip
    heard = [pair for pair in found if pair is not None]
    assert heard
    for seconds, text in heard:
        assert "rank 1" in text or "OSError" in text, text
        assert seconds < 12, text
