"""Random numbers of a recurrent cell, which depend on their place alone: on a seed, a step, a sequence and a unit.

They are made where they are used, forward and backward, and need no memory. The generator is Philox 4x32-10 (Salmon et
al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), whose counter is a unit, a row (step times sequences plus
sequence) and a group of four numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.cpu.recurrent.philox import FACTORS, ROUNDS, UNIT, WEYL

__all__ = ["philox", "uniform"]

WORD = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of 32 bits for each of the counters, which are int64 tensors of one shape, as ``seed`` has 64.

    >>> zero = torch.zeros((), dtype=torch.int64, device="cpu")
    >>> [f"{int(word):08x}" for word in philox((zero, zero, zero, zero), 0)]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    a, b, c, d = counter
    keys = [seed & WORD, seed >> 32 & WORD]
    for _ in range(ROUNDS):
        # Products wrap at 64 bits, and a shift brings the sign along, which the mask takes off.
        first, second = a * FACTORS[0], c * FACTORS[1]
        a, b, c, d = (
            (second >> 32 & WORD) ^ b ^ keys[0],
            second & WORD,
            (first >> 32 & WORD) ^ d ^ keys[1],
            first & WORD,
        )
        keys = [key + step & WORD for key, step in zip(keys, WEYL, strict=True)]
    return a, b, c, d


def uniform(seed: int, first_row: int, like: Tensor, count: int) -> Tensor:
    """Numbers of [0, 1) for the rows from ``first_row`` on, (N, count * H) for ``like`` (N, H), in its type.

    They are multiples of 2^-24. Narrow types round them, so that some may be 1.
    """
    batch, hidden = like.shape
    rows = torch.arange(first_row, first_row + batch, dtype=torch.int64, device=like.device)[:, None]
    units = torch.arange(hidden, dtype=torch.int64, device=like.device)[None, :]
    found: list[Tensor] = []
    for group in range(-(-count // 4)):
        place = units.expand(batch, hidden), rows & WORD, rows >> 32, torch.full_like(rows, group)
        found += philox(place, seed)
    return ((torch.cat(found[:count], 1) >> 8).to(torch.float64) * UNIT).to(like.dtype)
