"""The numbers that kernels of pooling are told, without Numba.

All that depends on where windows lie is in tables, so that kernels decide nothing. A table of *windows* has three
numbers for each result along an axis: the first element of its window inside the input, how many are, and the factor of
its divisor. A table of *takers* has three numbers for each input along an axis: the element of a window that it is for
the first of the results that take it, that result, and how many do.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

__all__ = ["COUNT", "WORDS", "Told"]


@dataclass(frozen=True, slots=True)
class Told:
    """What a worker is told beside the addresses of input, result and kept elements.

    A line is one row of results of an item: of an image with all channels, or of one channel. ``share`` lines of
    ``lines`` make a unit of work. ``depth``, ``height`` and ``width`` count the rows and columns of what is written,
    ``columns`` those of what is read. ``channels`` is 1 where vectors lie along the width. ``read_*`` and ``write_*``
    are distances in numbers between items, depths, rows and columns. ``step_*`` are distances in numbers between what
    two neighbours in a loop over a window read, ``origin_*`` those between two results of the forward, and ``start``
    that of the first window before the input. ``element_*`` is what the next element along an axis of a window adds to
    the number of an element, and ``each_*`` how much smaller that number is for the next result that takes an input.
    ``table_*`` are addresses of tables, ``factor_*`` those of fp32 factors along the axes.

    Vectors along the width begin at ``first``; those from ``low`` to ``high`` need no mask. ``stride``, ``padding``
    and ``dilation`` are those of the width, and ``taken`` the distance between results that take one input.
    """

    lines: int
    share: int
    depth: int
    height: int
    width: int
    columns: int
    channels: int
    read_item: int
    write_item: int
    write_depth: int
    write_row: int
    write_column: int
    step_depth: int
    step_row: int
    step_column: int
    origin_depth: int
    origin_row: int
    origin_column: int
    start: int
    element_depth: int
    element_row: int
    element_column: int
    each_depth: int
    each_row: int
    each_column: int
    table_depth: int
    table_height: int
    table_width: int
    factor_depth: int
    factor_height: int
    factor_width: int
    first: int
    last: int
    low: int
    high: int
    stride: int
    padding: int
    dilation: int
    taken: int
    taken_row: int
    taken_depth: int

    def numbers(self) -> np.ndarray:
        """All numbers in the order of :data:`WORDS`, int64."""
        return np.array([getattr(self, field.name) for field in fields(self)], dtype=np.int64)


WORDS = {field.name: place for place, field in enumerate(fields(Told))}
"""The index of each number."""
COUNT = len(WORDS)
"""The number of numbers."""
