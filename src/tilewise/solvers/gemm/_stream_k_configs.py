"""Which configs of stream-K are worth trying, by a model of their times on an H100."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from tilewise.plan import Config
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.base import Cost
from tilewise.solvers.common.tiles import PROCESSORS
from tilewise.solvers.gemm._stream_k import COLUMNS, NATIVE, PRODUCTS, Work, uneven_columns, wide

__all__ = ["config_of", "configs", "cost", "expected_us"]

TIMES = {"tf32x3": 3, "bf16x6": 6, "tf32": 1, NATIVE: 1}
"""Products of matrix units for one."""
MEMORY, CACHE, ONE_READS = 3e6, 5.5e6, 1e5
"""Bytes a microsecond from an H100's memory, from its second cache, and that one of its multiprocessors can read."""
RATES = {"tf32x3": 1.1e6, "bf16x6": 1.9e6, "tf32": 2e6, NATIVE: 4e6}
"""Operations a microsecond that the matrix units of one multiprocessor reach in kernels like these."""
LOW, LOWER = 64, 0.5
"""Tiles of fewer rows take older instructions, which reach such a share of these rates. So do products of TF32 with an
operand whose sums lie across rows."""
LARGE, FASTER = 2**14, 1.3
"""Numbers from which on a tile's products in parts are so many times faster."""
FIRST_US, LAUNCH_US = 1.0, 1.0
"""Microseconds until the first tiles are there, and that another kernel takes at least that may start before."""
NARROW_US = 1.5e-4
"""Microseconds for each number of a tile that is read by itself: nothing is read ahead then."""
MOST_BATCH = 65535
"""Matrices that one launch packs."""
HOPELESS = 2.0
"""A config that is expected to take so many times as long as the best is not offered."""
NARROW = 32
"""Columns of a tile up to which steps of 16-bit numbers are longer: they hold little otherwise."""
MOST_PARTS = 16
SMALLER = 8
"""An operand that has so many times fewer bytes than the other is copied in no time beside the product."""


def configs(p: GemmProblem) -> Iterable[Config]:
    """Tiles of each shape: whole, in equal stretches for one or two programs a multiprocessor, or in equal parts.

    Operands that cannot be read by wide accesses are also packed first. The best by the model come first.
    """
    found: list[Work] = []
    for product in PRODUCTS[p.precision] if p.dtype == "fp32" else (NATIVE,):
        for pack in _packs(p):
            for tile, warps, stages in _tiles(p):
                whole = Work(p, tile, 1, product, warps, stages, 0, pack)
                if not (uneven_columns(tile[1]) and product == NATIVE and whole.awkward):
                    found += _divided(whole)
    times = sorted(((expected_us(work), place) for place, work in enumerate(found)))
    return list(dict.fromkeys(config_of(found[place]) for us, place in times if us <= HOPELESS * times[0][0]))


def _divided(whole: Work) -> Iterator[Work]:
    """The ways to divide the work of tiles among programs."""
    processors = _processors()
    tiles = replace(whole, programs=whole.tiles)
    if whole.tiles <= 2 * processors or not whole.p.batch:
        most = min(whole.total, 2 * processors)
        for programs in dict.fromkeys((min(most, processors), most)):
            yield replace(whole, programs=programs)
    if whole.tiles <= 4 * processors:
        yield tiles
    for programs in (processors // 2, processors, 2 * processors):  # half of them may read as fast as all
        splits = min(programs // whole.tiles, MOST_PARTS, whole.steps)
        if splits > 1:
            yield replace(whole, programs=0, splits=splits)


def _packs(p: GemmProblem) -> list[str]:
    """The operands that are packed: none, or those that lie awkwardly, the small one or both.

    Matrix units take fp32 numbers with the sums contiguous alone. A large operand is not packed for that.
    """
    awkward = "".join(role for role in "ab" if not wide(p, role) or _across(p, role))
    if not awkward or p.batch > MOST_BATCH:
        return [""]
    small = min(awkward, key=p.nbytes)
    return list(dict.fromkeys(("", small, awkward)))


def _across(p: GemmProblem, role: str) -> bool:
    """Whether an fp32 operand that is much the smaller one lies with its sums across rows."""
    other = "b" if role == "a" else "a"
    return p.dtype == "fp32" and _is_across(p, role) and SMALLER * p.nbytes(role) <= p.nbytes(other)


def _is_across(p: GemmProblem, role: str) -> bool:
    """Whether the sums lie across the rows of an operand."""
    return p.op["ab".index(role)] == "TN"["ab".index(role)]


@functools.cache
def _processors() -> int:
    """Multiprocessors of the current GPU; those of an H100 where there is none."""
    if not torch.cuda.is_available():
        return PROCESSORS
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def _tiles(p: GemmProblem) -> Iterator[tuple[tuple[int, int, int], int, int]]:
    """Tiles with all of the short side up to 128, warps and stages."""
    itemsize = p.torch_dtype("a").itemsize
    long, short = max(p.m, p.n), min(p.m, p.n)
    least = -(-short // -(-short // 128))  # of as few tiles as there can be, as equal as they can be
    columns = next(width for width in COLUMNS if width >= least)
    for rows in (32, 64, 128) if long > 64 else (64,):
        for side in dict.fromkeys((columns, 1 << (columns - 1).bit_length(), min(columns, 64))):
            depth = 32 if itemsize == 4 else 64 if side > NARROW else 128
            stages = max(2, min(5, 200 * 2**10 // ((rows + side) * depth * itemsize)))
            yield (rows, side, depth), 8 if rows * side > 2**13 else 4, stages


def config_of(work: Work) -> Config:
    """The config of some work."""
    named: dict[str, str | int] = {} if work.product == NATIVE else {"product": work.product}
    if work.pack:
        named["pack"] = work.pack
    if work.splits:
        named["splits"] = work.splits
    else:
        named["programs"] = work.programs
    return Config(tile=work.tile, share=work.share, warps=work.warps, stages=work.stages, **named)


def expected_us(work: Work) -> float:
    """Microseconds that the kernels take of an H100, without the first launch: what orders configs.

    A program reads the tiles of its steps, at its share of the second cache's rate or its own limit, while matrix units
    work on others. The first tiles are waited for, once in each tile that a program begins.
    """
    rows, columns, depth = work.tile
    p = work.p
    size = p.torch_dtype("a").itemsize
    active = min(work.used, _processors())
    left, right = ("b", "a") if work.turned else ("a", "b")
    short = min(p.m, p.n) / work.grid[1]  # the last tile may have a few columns only
    read = (rows + short) * depth * size / min(CACHE / active, ONE_READS)
    rate = RATES[work.product]
    if rows < LOW or (work.product == "tf32" and any(_is_across(p, role) for role in "ab" if role not in work.pack)):
        rate *= LOWER
    elif TIMES[work.product] > 1 and rows * columns >= LARGE:
        rate *= FASTER
    multiplied = 2 * rows * columns * depth * TIMES[work.product] / rate
    alone = sum(
        numbers * depth * NARROW_US
        for role, numbers in ((left, rows), (right, columns))
        if role not in work.pack and not wide(p, role)
    )
    steps = -(-work.total // work.used) * (work.used / active)
    begun = 1 if work.splits else -(-work.tiles // work.used) + (work.share == "steps")
    summed = 2 * 4 * rows * short * (work.used if work.splits else min(2 * work.used, work.used + work.tiles))
    took = begun * FIRST_US + steps * (max(read, multiplied) + alone)
    for role in work.pack:
        took += LAUNCH_US + 2 * p.nbytes(role) / MEMORY
    if work.shared:
        took += LAUNCH_US + summed / CACHE
    return took


def cost(work: Work) -> Cost:
    """The product as the device can do it at best, and beside that what tiles, copies and sums take longer."""
    p = work.p
    kernels = 1 + len(work.pack) + work.shared
    late_us = expected_us(work) - LAUNCH_US * (kernels - 1) - p.bytes / MEMORY
    return Cost(p.flops, p.bytes, kernels, serial_us=max(0.0, late_us))
