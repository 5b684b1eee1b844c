"""Describes the Fourier transforms of CPU kernels: radices, twiddle factors and the order of results, without Numba."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from tilewise.kernels.codelets import root

__all__ = [
    "CALLED", "DIGIT", "HEADER", "KEPT", "LANES", "NUMBERS", "PAGE", "RADICES", "Planes", "Signals", "between",
    "factors", "order", "packed", "smooth", "twiddles",
]  # fmt: skip

RADICES = (16, 12, 9, 8, 6, 4, 3, 2)
"""The sizes of codelets. The largest ones keep nearly all their values in the registers of a 512-bit machine."""

DIGIT = 32
"""The base in which radices are packed into one number: more than any radix."""
PAGE = 4096
"""Scratch is rounded up to a multiple of so many bytes, so that no two threads share a cache line."""
HEADER = 10
"""The number of integers of a call before those of the kernel: units, threads and addresses."""
NUMBERS = 45
"""The number of integers that the Fourier kernel takes besides addresses."""
CALLED = slice(36, 38)
"""Which of these integers are the addresses of functions that the kernel calls."""
KEPT = 44
"""Which integer is the number of bytes of a kept spectrum of each block of channels; 0 where none are kept."""
LANES = (16, 8, 4)
"""The numbers of lanes of a vector: 16 for AVX-512, 8 for AVX2, 4 elsewhere."""


def smooth(n: int) -> bool:
    """Whether n is 2^a 3^b."""
    while n % 2 == 0:
        n //= 2
    while n % 3 == 0:
        n //= 3
    return n == 1


@functools.lru_cache(maxsize=1024)
def factors(n: int) -> tuple[int, ...]:
    """Radices whose product is n: as few as possible and of sizes as equal as possible, the largest first.

    Raises ``ValueError`` where n is not 2^a 3^b.
    """
    if n < 1 or not smooth(n):
        raise ValueError(f"n={n}: 2^a * 3^b would do")
    return _best(n, RADICES[0])


@functools.lru_cache(maxsize=4096)
def _best(n: int, most: int) -> tuple[int, ...]:
    """The factors of n that are no larger than ``most``; zeros where there are none."""
    if n == 1:
        return ()
    candidates = [(radix, *_best(n // radix, radix)) for radix in RADICES if radix <= most and n % radix == 0]
    candidates = [radices for radices in candidates if math.prod(radices) == n]
    return min(candidates, key=lambda radices: (len(radices), sum(radices)), default=(0,) * 64)


def packed(n: int) -> int:
    """The :func:`factors` of n as one number of base :data:`DIGIT`; the first factor is the lowest digit."""
    return sum(radix * DIGIT**i for i, radix in enumerate(factors(n)))


def between(radix: int, count: int) -> np.ndarray:
    """The twiddle factors after a pass of ``radix`` whose values are ``count`` apart: radix - 1 for each position.

    They are in fp32, (factors, 2): cosines and sines of ``-2 pi j q / (radix count)``.
    """
    roots = [root(j * q, radix * count, -1) for j in range(count) for q in range(1, radix)]
    return np.array(roots, dtype=np.float32).reshape(-1, 2)


def twiddles(n: int) -> np.ndarray:
    """The twiddle factors of all passes of a transform of size n, one pass after the other."""
    by_pass, length = [np.zeros((0, 2), np.float32)], n
    for radix in factors(n):
        length //= radix
        by_pass.append(between(radix, length))
    return np.concatenate(by_pass)


def order(n: int) -> np.ndarray:
    """The index at which each frequency lies after the passes, int64: the digits of the frequency are reversed."""
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
    """The transform of ``lanes`` real planes of ``n1`` rows and ``n2`` columns. Sizes are in complex vectors."""

    n1: int
    n2: int
    lanes: int

    @property
    def half(self) -> int:
        """The number of columns of half a spectrum."""
        return self.n2 // 2 + 1

    @property
    def column(self) -> int:
        """The distance between columns: one spare row, and odd, so that a row spreads over all sets of the cache."""
        return (self.n1 + 1) | 1

    @property
    def spectrum(self) -> int:
        """The size of a spectrum."""
        return self.half * self.column

    @property
    def scratch(self) -> int:
        """The size of scratch besides spectra: one row."""
        return self.n2

    def problems(self) -> str:
        """Why there is no such transform; empty where there is one."""
        return _problems((self.n1, self.n2), self.lanes)


@dataclass(frozen=True, slots=True)
class Signals:
    """The transform of ``lanes`` complex signals of n points at once, in blocks that stay in the first cache.

    Sizes are in complex vectors.
    """

    n: int
    lanes: int

    @property
    def radix(self) -> int:
        """The number of blocks: that with the fewest passes in all, and of these the largest."""
        return min((r for r in RADICES if self.n % r == 0), key=lambda r: (len(factors(self.n // r)), -r))

    @property
    def block(self) -> int:
        """The number of points of a block."""
        return self.n // self.radix

    @property
    def apart(self) -> int:
        """The distance between blocks: odd, so that equal positions in them spread over all sets of the cache."""
        return self.block | 1

    @property
    def spectrum(self) -> int:
        """The size of all blocks."""
        return self.radix * self.apart

    @property
    def scratch(self) -> int:
        """The size of scratch besides spectra: nothing."""
        return 0

    def problems(self) -> str:
        """Why there is no such transform; empty where there is one."""
        return _problems((self.n,), self.lanes)


def _problems(basis: tuple[int, ...], lanes: int) -> str:
    """Why there is no transform of these sizes and lanes; empty where there is one."""
    if any(n < 2 or not smooth(n) for n in basis):
        return f"basis={basis}: sizes 2^a * 3^b from 2 on would do"
    return "" if lanes in LANES else f"lanes={lanes}: one of {', '.join(map(str, LANES))} would do"
