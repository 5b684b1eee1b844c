"""The numbers that kernels of local response normalization are told, without Numba."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

import numpy as np

__all__ = ["ALPHA", "BETA", "COUNT", "SLOPE", "WORDS", "K", "Told", "constants"]

ALPHA, K, BETA, SLOPE = range(4)
"""Places of the fp32 numbers of :func:`constants`."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a worker is told beside addresses of tensors. Distances are in bytes.

    An image has ``channels`` channels of ``pixels`` numbers. A window has ``before`` channels before its own and
    ``after`` behind it. A unit of work is a strip of at most ``strip`` pixels: of one image, which has ``strips``, or
    where the channels of a pixel are neighbours of the pixels of all images together. There ``block`` pixels are
    computed at a time, and a pixel's line of scratch has ``line`` bytes. Elsewhere a channel's line has that.
    ``numbers`` is the address of the fp32 numbers of :func:`constants`.
    """

    channels: int
    pixels: int
    before: int
    after: int
    strip: int
    strips: int
    block: int
    line: int
    numbers: int

    def array(self) -> np.ndarray:
        """All numbers in the order of :data:`WORDS`, int64."""
        return np.array(astuple(self), dtype=np.int64)


WORDS = {field.name: place for place, field in enumerate(fields(Told))}
"""The index of each number."""
COUNT = len(WORDS)
"""The number of numbers."""


def constants(alpha: float, size: int, beta: float, k: float) -> np.ndarray:
    """The fp32 numbers that kernels read: alpha / size, k, beta, and -2 alpha beta / size."""
    return np.array([alpha / size, k, beta, -2 * alpha * beta / size], dtype=np.float32)
