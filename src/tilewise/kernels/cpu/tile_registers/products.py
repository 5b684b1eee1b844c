"""Products of fp32 numbers by tile registers that multiply bf16 (Intel's AMX).

An fp32 number is the sum of two or three numbers of bf16: what the first one leaves is rounded again. The products of
these parts are exact in fp32, which the tile registers add up in. So the six largest products of three parts give the
accuracy of fp32, and the three largest of two parts about 3e-6 (Henry et al. 2019, "Leveraging the bfloat16
Artificial Intelligence Datatype For Higher-Precision Computations"). A tile register multiplies sixteen times as many
numbers as a vector register does in the same time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from llvmlite import ir
from numba.core import cgutils

from tilewise.kernels.cpu.channels_last.loops import PLACE, advanced, constant, looped, number, put, variable
from tilewise.kernels.cpu.tile_registers.told import DEPTH, HALF, LANES, TILE
from tilewise.kernels.cpu.vectors import NUMBER, Code, Values, compiled, intrinsic_of, named

__all__ = ["ORDER", "PRODUCT_WORDS", "SUMS", "by_tiles", "multiplied", "product", "released", "sized"]

PRODUCT_WORDS = 10
"""The number of integers that :func:`product` takes."""
ORDER = {2: ((1, 0), (0, 0), (0, 1)), 3: ((2, 0), (1, 0), (1, 1), (0, 1), (0, 0), (0, 2))}
"""By the number of parts: which parts of pixels and of filters are multiplied. One of each pair stays in its tile."""
SUMS, PIXELS, FILTERS = (0, 1, 2, 3), (4, 5), (6, 7)
"""Tile registers: those of sums, of two tiles of pixels, and of two tiles of filters."""


def by_tiles(code: Code, name: str, *arguments: ir.Value | int) -> None:
    """Call an intrinsic of the tile registers. Numbers are registers, integers with 64 bits are addresses or steps."""
    byte, values = ir.IntType(8), []
    for position, argument in enumerate(arguments):
        if isinstance(argument, int):
            values.append(ir.Constant(byte, argument))
        else:
            is_address = position == len(arguments) - 1 if name == "ldtilecfg" else position == 1
            values.append(code.builder.inttoptr(argument, byte.as_pointer()) if is_address else argument)
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    code.builder.call(cgutils.get_or_insert_function(code.builder.module, kind, f"llvm.x86.{name}"), values)


@functools.cache
def _configured() -> Callable[..., None]:
    """Makes ``(address)``, which sets the sizes of the tile registers to those of the 64 bytes there."""
    return intrinsic_of(LANES, lambda code, arguments: by_tiles(code, "ldtilecfg", arguments[0]))


@functools.cache
def sized() -> Callable[..., None]:
    """Makes ``(scratch, rows)``, which sets the tile registers to ``rows`` pixels, and the filters' to 16 pairs."""
    write, configure = put(), _configured()

    @compiled()
    def run(scratch, rows):
        for i in range(8):
            write(scratch + i * PLACE, 0)
        write(scratch, 1)
        wide = LANES * NUMBER * (1 + (1 << 16) + (1 << 32) + (1 << 48))
        write(scratch + 2 * PLACE, wide)
        write(scratch + 3 * PLACE, wide)
        both = rows * (1 + (1 << 8) + (1 << 16) + (1 << 24) + (1 << 32) + (1 << 40))
        write(scratch + 6 * PLACE, both + LANES * ((1 << 48) + (1 << 56)))
        configure(scratch)

    return run


@functools.cache
def released() -> Callable[..., None]:
    """Makes ``()``, which says that the tile registers are of no more use."""
    return intrinsic_of(LANES, lambda code, arguments: by_tiles(code, "tilerelease"))


@functools.cache
def _product(parts: int) -> Callable[..., None]:
    """Makes the instructions of :func:`product`."""

    def emit(code: Code, arguments: Values) -> None:
        first, second, pitch, apart, table, taps, blocks, filters, bias, sums = arguments
        b = code.builder
        for register in SUMS:  # every row of a tile of sums begins with the bias
            by_tiles(code, "tileloadd64", register, code.at(bias, register % 2 * LANES * NUMBER), constant(0))
        entry, weight = variable(code, table), variable(code, filters)
        with looped(code, taps):
            offset = number(code, b.load(entry))
            places = [variable(code, b.add(start, offset)) for start in (first, second)]
            with looped(code, blocks):
                pixels = [b.load(place) for place in places]
                multiplied(code, parts, pixels, (pitch, apart), b.load(weight), constant(TILE))
                for place in places:
                    advanced(code, place, DEPTH * HALF)
                advanced(code, weight, 2 * parts * TILE)
            advanced(code, entry, PLACE)
        for register in SUMS:
            by_tiles(code, "tilestored64", register, code.at(sums, register * TILE), constant(LANES * NUMBER))

    return intrinsic_of(LANES, emit)


def multiplied(
    code: Code, parts: int, pixels: list[ir.Value], steps: Sequence[ir.Value], weight: ir.Value, tile: ir.Value
) -> None:
    """Add the products of all pairs of parts, of one tap and a depth of :data:`DEPTH`.

    ``steps`` are the bytes between rows of tiles and between parts of ``pixels``. Tiles of ``weight``, two of each
    part, are ``tile`` bytes apart.
    """
    pitch, apart = steps
    held: tuple[int, int] = (-1, -1)
    for mine, other in ORDER[parts]:
        if mine != held[0]:
            for register, place in zip(PIXELS, pixels, strict=True):
                by_tiles(code, "tileloadd64", register, code.at(place, mine, apart), pitch)
        if other != held[1]:
            for i, register in enumerate(FILTERS):
                place = code.at(weight, 2 * other + i, tile)
                by_tiles(code, "tileloadd64", register, place, constant(LANES * NUMBER))
        held = mine, other
        for register in SUMS:
            by_tiles(code, "tdpbf16ps", register, PIXELS[register // 2], FILTERS[register % 2])


def product(parts: int) -> Callable[..., None]:
    """Makes ``(first, second, pitch, apart, table, taps, blocks, filters, bias, sums)``, four tiles of sums.

    They are those of two tiles of pixels, whose first numbers lie at ``first`` and ``second``, with 32 outputs. The
    next pixel is ``pitch`` bytes further, and the next of ``parts`` parts of all pixels ``apart``. ``table`` has for
    each of ``taps`` taps the distance of what it reads. A tap reads ``blocks`` times :data:`DEPTH` channels. For each
    of these ``filters`` has two tiles of each part. Sums begin with ``bias``, and are written to ``sums``: two tiles of
    the first pixels, then two of the second ones.
    """
    block = _product(parts)

    def run(first, second, pitch, apart, table, taps, blocks, filters, bias, sums):
        block(first, second, pitch, apart, table, taps, blocks, filters, bias, sums)

    return named(run, parts)
