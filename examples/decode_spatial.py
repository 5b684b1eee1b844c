"""Decode one huge image from a latent, as a VAE's decoder does, split over ranks: exactly, without seams.

    torchrun --nproc-per-node 4 examples/decode_spatial.py --height 256 --width 256

A latent of (1, 4, H, W) becomes an image of (1, 3, 8H, 8W). Decoding in tiles that are blended at their edges is an
approximation; with halos exchanged before each layer the image is the one that a single device would make. Each rank
writes its own stripe into one raw file of 8-bit RGB, so that no rank ever holds the image. ``--check 1`` compares it
with one device's. The weights are random: it is the shapes that count. Exits with 1 where pixels differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from spatial_start import say, start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tilewise.distributed import SpatialParallel

TOLERANCE = 1e-4
"""Greatest difference of values, which are of the order of 1."""


class Decoder(nn.Sequential):
    """Three times as large, twofold each: (N, 4, H, W) to (N, 3, 8H, 8W) in [-1, 1]."""

    def __init__(self, width: int) -> None:
        layers: list[nn.Module] = [nn.Conv2d(4, 4 * width, 3, padding=1)]
        for wide, narrow in ((4 * width, 2 * width), (2 * width, width), (width, width)):
            layers += [nn.ReLU(), nn.ConvTranspose2d(wide, narrow, 4, stride=2, padding=1)]
            layers += [nn.ReLU(), nn.Conv2d(narrow, narrow, 3, padding=1)]
        super().__init__(*layers, nn.ReLU(), nn.Conv2d(width, 3, 3, padding=1), nn.Tanh())


def stripe(path: str, image: torch.Tensor, first: int, height: int) -> None:
    """Write rows ``first`` and following of an image of ``height`` rows: (1, 3, rows, W) in [-1, 1]."""
    pixels = ((image[0] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    whole = np.memmap(path, np.uint8, "r+", shape=(height, *pixels.shape[1:]))
    whole[first : first + len(pixels)] = pixels
    whole.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where the image is the one of a single device."""
    parser = argparse.ArgumentParser(description="Decode a huge image on several ranks.")
    parser.add_argument("--height", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--check", type=int, default=0, help="1: compare with one device")
    parser.add_argument("-o", "--output", default="decoded.rgb")
    given = parser.parse_args(arguments)
    device = start()
    torch.manual_seed(0)
    decoder = Decoder(given.channels).to(device).eval()
    latent = torch.randn(1, 4, given.height, given.width).to(device)
    ranks, height, width = dist.get_world_size(), 8 * given.height, 8 * given.width
    parallel = SpatialParallel(decoder, init_device_mesh(device.type, (ranks,), mesh_dim_names=("h",)), dims=("h",))
    if dist.get_rank() == 0:
        np.memmap(given.output, np.uint8, "w+", shape=(height, width, 3)).flush()
    dist.barrier()
    with torch.no_grad():
        part = parallel(parallel.scatter(latent))
        (first, last), *_ = part.spatial.own
        stripe(given.output, part.local, first, height)
        dist.barrier()
        say(f"{given.output}: {height} x {width} pixels, {ranks} ranks with about {last - first} rows each")
        if not given.check:
            return 0
        furthest = float((decoder(latent)[:, :, first:last] - part.local).abs().max())
    worst = torch.tensor(furthest, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    say(f"differs from one device by {float(worst):.1e} at most")
    return int(not float(worst) <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
