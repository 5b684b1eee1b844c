"""Workers of thin matrix products: threads take units of the long axis, and compute all of the short one for each.

So the large operand is read once, in tiles that stay in a core's first cache while all of the short axis is computed
with them (Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication", section 4, without packing:
a pass that packs costs as much as a thin product itself). Sums stay in registers. ``v`` has the numbers of
:class:`tilewise.kernels.cpu.gemm.told.Told`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tilewise.kernels.cpu.gemm.told import WORDS
from tilewise.kernels.cpu.units import over_units
from tilewise.kernels.cpu.vectors import NUMBER, compiled, pointer_call

__all__ = ["thin_dots", "thin_outer"]

MANY, SHARE, FEW = (WORDS[name] for name in ("many", "share", "few"))
MANY_TILE, MANY_LAST, FEW_TILE, FEW_LAST = (
    WORDS[name] for name in ("many_tile", "many_last", "few_tile", "few_last")
)  # fmt: skip
DEPTH, PART, COLUMNS, INITIAL = (WORDS[name] for name in ("depth", "part", "columns", "initial"))
BIAS_COLUMNS, ZEROS, CALLS = (WORDS[name] for name in ("bias_columns", "zeros", "calls"))
A_ROW, A_STEP, B_ROW, C_ROW, C_STEP = (WORDS[name] for name in ("a_row", "a_step", "b_row", "c_row", "c_step"))


@functools.cache
def _tile(lanes: int) -> Callable[..., tuple[int, int]]:
    """Makes ``(v, index, count, tile, last)``: the first line of a tile and its number of lines."""

    @compiled(lanes)
    def run(v, index, count, tile, last):
        return index * tile, (last if index == count - 1 else tile)

    return run


@functools.cache
def _outer_unit(lanes: int) -> Callable[..., None]:
    """Makes ``(a, b, c, v, bias, unit)``, which computes one unit's share of the result by outer products."""
    call, tile_of = pointer_call(), _tile(lanes)

    @compiled(lanes)
    def run(a, b, c, v, bias, unit):
        first, last = unit * v[SHARE], min(v[MANY], (unit + 1) * v[SHARE])
        done = 0
        while done < v[DEPTH]:
            depth = min(v[PART], v[DEPTH] - done)
            for i in range(first, last):
                place, lines = tile_of(v, i, v[MANY], v[MANY_TILE], v[MANY_LAST])
                for j in range(v[FEW]):
                    other, others = tile_of(v, j, v[FEW], v[FEW_TILE], v[FEW_LAST])
                    row, column, columns = place, other, others
                    if v[COLUMNS]:
                        row, column, columns = other, place, lines
                    target = c + row * v[C_ROW] + column * NUMBER
                    init, init_row = v[ZEROS], 0
                    if done > 0 or v[INITIAL] == 1:
                        init, init_row = target, v[C_ROW]
                    elif v[INITIAL] == 2:
                        init = bias + column * NUMBER
                    ahead = lines * NUMBER if v[COLUMNS] and j == 0 else 0
                    to = v[CALLS + 2 * (i == v[MANY] - 1) + (j == v[FEW] - 1)]
                    call(
                        to, a + row * v[A_ROW] + done * v[A_STEP], v[A_ROW], v[A_STEP],
                        b + done * v[B_ROW] + column * NUMBER, v[B_ROW], target, v[C_ROW], init, init_row, columns,
                        depth, ahead, 0,
                    )  # fmt: skip
            done += depth

    return run


@functools.cache
def _dots_unit(lanes: int) -> Callable[..., None]:
    """Makes ``(a, b, c, v, bias, unit)``, which computes one unit's share of the result by dot products.

    ``a`` is the operand whose rows threads divide, ``b`` the one with few rows.
    """
    call, tile_of = pointer_call(), _tile(lanes)

    @compiled(lanes)
    def run(a, b, c, v, bias, unit):
        first, last = unit * v[SHARE], min(v[MANY], (unit + 1) * v[SHARE])
        done = 0
        while done < v[DEPTH]:
            depth = min(v[PART], v[DEPTH] - done)
            for i in range(first, last):
                row, valid = tile_of(v, i, v[MANY], v[MANY_TILE], v[MANY_LAST])
                for j in range(v[FEW]):
                    other, _ = tile_of(v, j, v[FEW], v[FEW_TILE], v[FEW_LAST])
                    target = c + row * v[C_ROW] + other * v[C_STEP]
                    init, init_row, init_step = v[ZEROS], 0, 0
                    if done > 0 or v[INITIAL] == 1:
                        init, init_row, init_step = target, v[C_ROW], v[C_STEP]
                    elif v[INITIAL] == 2:
                        if v[BIAS_COLUMNS]:
                            init, init_step = bias + other * NUMBER, NUMBER
                        else:
                            init, init_row = bias + row * NUMBER, NUMBER
                    call(
                        v[CALLS + (j == v[FEW] - 1)], a + row * v[A_ROW] + done * NUMBER, v[A_ROW], valid,
                        b + other * v[B_ROW] + done * NUMBER, v[B_ROW], target, v[C_ROW], v[C_STEP], init, init_row,
                        init_step, depth, 0,
                    )  # fmt: skip
            done += depth

    return run


def thin_outer(lanes: int) -> Callable[..., None]:
    """Makes ``(data)``, which computes all units that no other thread takes. Vectors lie along the columns.

    ``data`` is the address of int64: the next thread's number, the number of threads, the next unit, the number of
    units, the size of ``data``, the size of scratch (none), and the addresses of bias, left and right operand and
    result. After these :data:`~tilewise.kernels.cpu.sizes.HEADER` numbers come those of ``Told``. Without scratch, its
    address is that of the bias for every thread.
    """
    return over_units(_outer_unit(lanes), "thin_outer", lanes)


def thin_dots(lanes: int) -> Callable[..., None]:
    """As :func:`thin_outer`, with vectors along the sums. The second operand is the one with few rows."""
    return over_units(_dots_unit(lanes), "thin_dots", lanes)
