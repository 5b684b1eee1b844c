"""Transforms of a CPU's kernels as data: radices, twiddle factors, order of results. Knows nothing of Numba."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from tilewise.kernels.cuda.codelets import root

__all__ = [
    "CALLED", "DIGIT", "HEADER", "KEPT", "LANES", "NUMBERS", "PAGE", "RADICES", "Planes", "Signals", "between",
    "factors", "order", "packed", "smooth", "twiddles",
]  # fmt: skip

RADICES = (16, 12, 9, 8, 6, 4, 3, 2)
"""Sizes of codelets: the largest keep all their values in the registers of a 512-bit machine, nearly."""

DIGIT = 32
"""More than any radix."""
PAGE = 4096
"""Bytes that scratch is rounded up to, so that no two threads share a line of a cache."""
HEADER = 10
"""Integers of a call before those of the kernel: units, threads and addresses."""
NUMBERS = 45
"""Integers that the kernel takes beside addresses."""
CALLED = slice(36, 38)
"""Those that are addresses of functions that it calls."""
KEPT = 44
"""The one that is bytes of a spectrum kept for each block of channels, 0 where units transform filters themselves."""
LANES = (16, 8, 4)
"""Numbers of a vector that kernels are written for; 16 for AVX-512, 8 for AVX2, 4 elsewhere."""


def smooth(n: int) -> bool:
    """Whether n is 2^a 3^b."""
    while n % 2 == 0:
        n //= 2
    while n % 3 == 0:
        n //= 3
    return n == 1


@functools.lru_cache(maxsize=1024)
def factors(n: int) -> tuple[int, ...]:
    """Radices whose product is n: as few as there can be, then as even as there can be, the largest first.

    ``ValueError`` where n is not 2^a 3^b.
    """
    if n < 1 or not smooth(n):
        raise ValueError(f"n={n}: 2^a * 3^b would do")
    return _best(n, RADICES[0])


@functools.lru_cache(maxsize=4096)
def _best(n: int, most: int) -> tuple[int, ...]:
    if n == 1:
        return ()
    found = [(r, *_best(n // r, r)) for r in RADICES if r <= most and n % r == 0]
    found = [f for f in found if math.prod(f) == n]
    return min(found, key=lambda f: (len(f), sum(f)), default=(0,) * 64)


def packed(n: int) -> int:
    """:func:`factors` as one number, the first the lowest digit of base :data:`DIGIT`."""
    return sum(radix * DIGIT**i for i, radix in enumerate(factors(n)))


def between(radix: int, count: int) -> np.ndarray:
    """Factors after a pass of ``radix`` whose values are ``count`` apart: radix - 1 for each place.

    fp32, (values, 2): cosines and sines of ``-2 pi j q / (radix count)``.
    """
    found = [root(j * q, radix * count, -1) for j in range(count) for q in range(1, radix)]
    return np.array(found, dtype=np.float32).reshape(-1, 2)


def twiddles(n: int) -> np.ndarray:
    """:func:`between` of all passes of :func:`factors`, one after the other."""
    found, length = [np.zeros((0, 2), np.float32)], n
    for radix in factors(n):
        length //= radix
        found.append(between(radix, length))
    return np.concatenate(found)


def order(n: int) -> np.ndarray:
    """Where frequency k lies after the passes, int64: digits of k, the first radix's fastest, count the other way."""
    places = np.zeros(n, dtype=np.int64)
    k = np.arange(n, dtype=np.int64)
    length = n
    for radix in factors(n):
        length //= radix
        places += k % radix * length
        k = k // radix
    return places


@dataclass(frozen=True, slots=True)
class Planes:
    """Real planes of ``n1`` rows and ``n2`` columns, ``lanes`` at once; sizes in complex vectors."""

    n1: int
    n2: int
    lanes: int

    @property
    def half(self) -> int:
        """Columns of half a spectrum."""
        return self.n2 // 2 + 1

    @property
    def column(self) -> int:
        """From one column to the next: a row to spare, and odd, so that a row's places share out over the cache."""
        return (self.n1 + 1) | 1

    @property
    def spectrum(self) -> int:
        """All columns."""
        return self.half * self.column

    @property
    def scratch(self) -> int:
        """One row, beside spectra."""
        return self.n2

    def problems(self) -> str:
        """Why there is no such transform; empty where there is."""
        return _problems((self.n1, self.n2), self.lanes)


@dataclass(frozen=True, slots=True)
class Signals:
    """Complex signals of n points, ``lanes`` at once: ``radix`` blocks, each transformed while it is in cache."""

    n: int
    lanes: int

    @property
    def radix(self) -> int:
        """Blocks: with the fewest passes in all, then the most."""
        return min((r for r in RADICES if self.n % r == 0), key=lambda r: (len(factors(self.n // r)), -r))

    @property
    def block(self) -> int:
        """Points of a block."""
        return self.n // self.radix

    @property
    def apart(self) -> int:
        """From one block to the next: odd, so that equal places share out over the cache."""
        return self.block | 1

    @property
    def spectrum(self) -> int:
        """All blocks."""
        return self.radix * self.apart

    @property
    def scratch(self) -> int:
        """Nothing beside spectra."""
        return 0

    def problems(self) -> str:
        """Why there is no such transform; empty where there is."""
        return _problems((self.n,), self.lanes)


def _problems(basis: tuple[int, ...], lanes: int) -> str:
    if any(n < 2 or not smooth(n) for n in basis):
        return f"basis={basis}: sizes 2^a * 3^b from 2 on would do"
    return "" if lanes in LANES else f"lanes={lanes}: one of {', '.join(map(str, LANES))} would do"
