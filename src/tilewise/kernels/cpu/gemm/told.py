"""The numbers that kernels of thin products are told, and the tiles that fit into registers, without Numba."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

__all__ = ["COUNT", "DEPTH_OF_DOTS", "DEPTH_OF_OUTER", "TILES", "WORDS", "Told", "zeros"]

TILES = {16: (6, 4), 8: (4, 3), 4: (4, 3)}
"""By the lanes of a vector: the most rows and vectors (or rows of either operand) whose sums stay in registers."""
DEPTH_OF_DOTS = 1024
"""The longest part of a sum along which vectors lie: four rows of it stay in a core's first cache."""
DEPTH_OF_OUTER = 512
"""The longest part of a sum that is added up number by number, for the sake of rounding."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a worker is told beside addresses of tensors. Distances are in bytes.

    ``many`` counts tiles along the axis that threads divide, ``share`` of them to a unit of work; ``few`` counts tiles
    along the other one. The last tile of either axis has ``many_last`` or ``few_last`` lines, all others ``many_tile``
    or ``few_tile``. ``calls`` has the addresses of the blocks for a whole tile and for the last one along ``few``, the
    same for the last tile along ``many``. Sums are ``depth`` long and computed in parts of ``part``. With ``columns``
    threads divide the columns of the result, else its rows. ``initial`` says what sums begin with: 0 zeros, 1 the
    result, 2 the bias.
    """

    many: int
    share: int
    few: int
    many_tile: int
    many_last: int
    few_tile: int
    few_last: int
    depth: int
    part: int
    columns: int
    initial: int
    bias_columns: int
    a_row: int
    a_step: int
    b_row: int
    c_row: int
    c_step: int
    zeros: int
    calls: tuple[int, int, int, int]

    def numbers(self) -> np.ndarray:
        """All numbers in the order of :data:`WORDS`, int64."""
        values = [getattr(self, field.name) for field in fields(self)][:-1]
        return np.array([*values, *self.calls], dtype=np.int64)


WORDS = {field.name: place for place, field in enumerate(fields(Told))}
"""The index of each number."""
COUNT = len(WORDS) + 3
"""The number of numbers."""


def zeros() -> np.ndarray:
    """Zeros that sums may begin with: as many as the widest tile has columns."""
    return np.zeros(1024, dtype=np.float32)
