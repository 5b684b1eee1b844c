"""Counting the bytes of one call on a CPU."""

from __future__ import annotations

import gc

import torch

from tilewise.planner.measuring.times import counted_bytes


def test_nothing_is_collected_while_bytes_are_counted() -> None:
    seen: list[bool] = []

    def call() -> torch.Tensor:
        seen.append(gc.isenabled())  # torch warns of a tensor that is older than the recording and freed within it
        return torch.zeros(1000, dtype=torch.float32, device="cpu")

    assert gc.isenabled()
    assert counted_bytes(call, result_bytes=1000) == 3000
    assert seen == [False]
    assert gc.isenabled()
