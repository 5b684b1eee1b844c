"""What Figure 4 of Caffe con Troll is held against: convolutions that lower one image at a time."""

from __future__ import annotations

import copy

import cct_fig4
import pytest
import torch
from torch import nn


@pytest.mark.parametrize(
    "window",
    [{"kernel_size": 5, "padding": 2}, {"kernel_size": (11, 7), "stride": 4}, {"kernel_size": 3, "dilation": 2}],
)
def test_lowering_one_image_at_a_time_is_the_same_convolution(window: dict[str, int]) -> None:
    own = nn.Sequential(nn.Conv2d(3, 8, **window), nn.ReLU(), nn.Conv2d(8, 8, 1, groups=8)).double()  # type: ignore[arg-type]
    other = copy.deepcopy(own)
    assert cct_fig4.one_image_at_a_time(other) == 1
    images = [torch.randn(3, 3, 40, 37, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) for _ in "ab"]
    results = [module(image.requires_grad_()) for module, image in zip((own, other), images, strict=True)]
    for each in results:
        each.square().sum().backward()
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(images[1].grad, images[0].grad)
    for mine, its in zip(own.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(its.grad, mine.grad)
