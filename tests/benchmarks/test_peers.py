"""The sides that other runtimes have in a comparison of whole networks."""

from __future__ import annotations

import copy

import pytest
import torch
from harness.peers import compiled_with
from tests.nn.fresh_dynamo import fresh_dynamo as fresh_dynamo
from torch import nn


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_frozen_side_does_not_run_what_was_compiled_for_another(mode: str) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    frozen = copy.deepcopy(module)
    x = torch.ones(1, 3, 5, 5, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        sides = [compiled_with(module, x, mode), compiled_with(frozen, x, mode, freezing=True)]
        before = module(x)
        for each in (module, frozen):
            each[0].weight.zero_()
        results = [side(x) for side in sides]
    torch.testing.assert_close(results[0], module(x).detach())
    torch.testing.assert_close(results[1], before, msg="frozen weights were read again")
