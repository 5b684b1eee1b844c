"""A size that may be chosen: the one asked for, how far others may be from it, and which of these are worth a try."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MOST_ALIGNED", "Axis", "alignment"]

MOST_ALIGNED = 256
"""No tile or vector is longer, so that larger powers of two are no better."""
NEAR = (1, 2, 4, 8, 16, 32, 64)
"""How far from a good value its neighbours are."""


def alignment(value: int) -> int:
    """The largest power of two that divides ``value``, up to :data:`MOST_ALIGNED`."""
    return min(value & -value, MOST_ALIGNED)


@dataclass(frozen=True, slots=True)
class Axis:
    """A size called ``name``: ``asked`` is what the user has, and others may differ from it by ``share`` of it.

    Only multiples of ``unit`` are sizes, such as the number of groups for channels. Raises ``ValueError`` for a share
    that is not from 0 to below 1, and for an asked size that is no multiple.

    >>> from tilewise.advice import Axis
    >>> Axis("channels", 64, 0.1, unit=4).near(64, tried=())
    [68, 60]
    """

    name: str
    asked: int
    share: float
    unit: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"{self.name}: sizes within {self.share:g} of it; a share from 0 to below 1 would do")
        if self.asked < 1 or self.asked % self.unit:
            raise ValueError(f"{self.name}={self.asked}: a multiple of {self.unit} would do")

    @property
    def values(self) -> range:
        """All sizes that may be chosen, the asked one among them."""
        # A tenth of 30 is not to be lost to rounding.
        low = math.ceil(self.asked * (1 - self.share) / self.unit - 1e-9) * self.unit
        high = math.floor(self.asked * (1 + self.share) / self.unit + 1e-9) * self.unit
        return range(max(self.unit, low), high + 1, self.unit)

    def promising(self, most: int) -> list[int]:
        """At most ``most`` sizes that are worth a try, the asked one first and then the likeliest.

        Kernels compute whole tiles and vectors, which are powers of two long: multiples of large ones waste least. Both
        ends count as well, as the least work and the largest.
        """
        values = self.values
        by_alignment = sorted(values, key=lambda value: (-alignment(value), abs(value - self.asked)))
        coarse = [value for value in by_alignment if alignment(value) >= 32]
        ends = [values[0], values[-1]]
        return list(dict.fromkeys([self.asked, *coarse[: max(1, most - 3)], *ends, *by_alignment]))[:most]

    def near(self, value: int, tried: Sequence[int]) -> list[int]:
        """Sizes close to ``value`` on both sides that are not among ``tried``, closest first."""
        found = [value + side * step * self.unit for step in NEAR for side in (1, -1)]
        return [size for size in found if size in self.values and size not in tried]
