"""Train a network on volumes whose slices are split over ranks.

    torchrun --nproc-per-node 4 examples/volume_spatial.py --size 128

The volumes hold random balls in noise, and the network is to find them: every voxel gets a score. Losses of the same
training on one device are printed beside; they agree to rounding. Exits with 1 where they differ.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from spatial_start import compared, start, train, wrapped
from torch import nn

BALLS = 6


class Finder(nn.Module):
    """(N, 1, D, H, W) to (N, 1, D, H, W), by way of half the resolution; sizes divisible by two."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.near = nn.Conv3d(1, width, 3, padding=1)
        self.down = nn.Conv3d(width, 2 * width, 3, stride=2, padding=1)
        self.far = nn.Conv3d(2 * width, 2 * width, 3, padding=2, dilation=2)
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.head = nn.Conv3d(2 * width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = F.relu(self.near(x))
        far = self.up(F.relu(self.far(F.relu(self.down(near)))))
        result: torch.Tensor = self.head(torch.cat([near, far], 1))
        return result


def volumes(count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy volumes (N, 1, D, H, W), and where their balls are, as 0 and 1."""
    generator = torch.Generator().manual_seed(1)
    places = torch.stack(torch.meshgrid(*[torch.linspace(0, 1, size)] * 3, indexing="ij"))
    inside = torch.zeros(count, size, size, size)
    for volume in inside:
        for _ in range(BALLS):
            centre, radius = torch.rand(3, generator=generator), 0.05 + 0.1 * torch.rand(1, generator=generator)
            volume[((places - centre.view(3, 1, 1, 1)) ** 2).sum(0) < radius**2] = 1
    noise = torch.randn(inside.shape, generator=generator)
    return (inside + noise).unsqueeze(1), inside.unsqueeze(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where the losses agree."""
    parser = argparse.ArgumentParser(description="Train on volumes split over ranks.")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--count", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args(arguments)
    device = start()
    torch.manual_seed(0)
    model = Finder(given.channels).to(device)
    single = copy.deepcopy(model)
    x, target = (tensor.to(device) for tensor in volumes(given.count, given.size))
    parallel = wrapped(model, device, ("d", "h"))
    trained = partial(train, x=x, target=target, steps=given.steps, loss=F.binary_cross_entropy_with_logits, lr=0.1)
    split = trained(model, lambda x: parallel.gather(parallel(parallel.scatter(x, multiple=2))))
    alone = trained(single, single)
    return compared(split, alone)


if __name__ == "__main__":
    sys.exit(main())
