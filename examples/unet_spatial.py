"""Train a segmentation U-Net on large photographs that are split over ranks.

    torchrun --nproc-per-node 4 examples/unet_spatial.py --height 1024 --width 1536

The photographs are scikit-learn's two, enlarged. A pixel's class is the strongest colour of its surroundings. Losses of
the same training on one device are printed beside those of the ranks; they agree to rounding. Where the photographs do
not fit on one device, ``--alone 0`` leaves that out. Exits with 1 where losses differ.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from spatial_start import compared, say, start, train, wrapped
from torch import nn

AROUND = 15


class UNet(nn.Module):
    """Two levels down and up (Ronneberger et al. 2015): (N, 3, H, W) to (N, 3, H, W); sizes divisible by four."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = block(3, width), block(width, 2 * width)
        self.third = block(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.back2, self.back1 = block(4 * width, 2 * width), block(2 * width, width)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        third = self.third(F.max_pool2d(second, 2))
        y = self.back2(torch.cat([second, self.up2(third)], 1))
        y = self.back1(torch.cat([first, self.up1(y)], 1))
        result: torch.Tensor = self.head(y)
        return result


def block(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()
    )


def photographs(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (2, 3, H, W) of mean 0, and their pixels' classes (2, H, W)."""
    images = torch.stack([torch.from_numpy(image.copy()) for image in load_sample_images().images])
    x = F.interpolate(images.permute(0, 3, 1, 2).float() / 255, size=(height, width), mode="bilinear")
    around = F.avg_pool2d(x, AROUND, stride=1, padding=AROUND // 2)
    return x - x.mean((2, 3), keepdim=True), around.argmax(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where the losses agree."""
    parser = argparse.ArgumentParser(description="Train a U-Net on photographs split over ranks.")
    parser.add_argument("--height", type=int, default=512)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--alone", type=int, default=1, help="0: not on one device as well")
    given = parser.parse_args(arguments)
    device = start()
    torch.manual_seed(0)
    model = UNet(given.channels).to(device)
    single = copy.deepcopy(model)
    x, target = (tensor.to(device) for tensor in photographs(given.height, given.width))
    parallel = wrapped(model, device, ("h", "w"))
    trained = partial(train, x=x, target=target, steps=given.steps, loss=F.cross_entropy, lr=0.05)
    split = trained(model, lambda x: parallel.gather(parallel(parallel.scatter(x, multiple=4))))
    if not given.alone:
        for step, loss in enumerate(split):
            say(f"step {step}: {loss:.6f}")
        return 0
    alone = trained(single, single)  # every rank does, so that none waits for another
    return compared(split, alone)


if __name__ == "__main__":
    sys.exit(main())
