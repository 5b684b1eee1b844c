"""Random numbers that depend on a seed and a place in the data alone.

Whatever is random about a batch is drawn from a generator made for it. So any process can make any batch, in any order,
and a run that goes on from the middle meets the same batches.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_SEED", "crops", "drawn_seed", "order", "seed_of", "skipped"]

MOST_SEED = 2**63
"""Seeds are whole numbers from 0 to below this."""
CROPS, ORDER, SKIP = range(3)
"""What is drawn; each has numbers of its own."""


def seed_of(seed: int, layer: str, phase: str) -> int:
    """The seed of one layer's numbers: layers of one net do not draw the same."""
    mixed = np.random.SeedSequence(
        [seed % MOST_SEED, zlib.crc32(layer.encode("utf-8", "surrogatepass")), zlib.crc32(phase.encode())]
    )
    return int(mixed.generate_state(1, np.uint64)[0]) % MOST_SEED


def drawn_seed() -> int:
    """A seed that no run had before."""
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0]) % MOST_SEED


def crops(seed: int, batch: int, records: int) -> npt.NDArray[np.int64]:
    """Numbers from 0 to 2**31 - 1, of shape (records, 3): for each record of a batch its row, column and mirroring."""
    return _generator(seed, CROPS, batch).integers(0, 2**31, size=(records, 3), dtype=np.int64)


def order(seed: int, epoch: int, records: int, part: int = 0) -> npt.NDArray[np.int64]:
    """A permutation of ``records`` numbers for an epoch; ``part`` tells apart several of one epoch."""
    return _generator(seed, ORDER, epoch, part).permutation(records).astype(np.int64)


def skipped(seed: int, most: int) -> int:
    """How many records are left out at the start, below ``most``, for ``rand_skip``; 0 where ``most`` is 0."""
    return int(_generator(seed, SKIP).integers(0, most)) if most > 0 else 0


def _generator(*words: int) -> np.random.Generator:
    """A generator that draws the same for the same words."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(list(words))))
