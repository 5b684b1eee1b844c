"""Means over the pixels of images whose channels lie innermost, and products of pixels with a factor for each channel.

Both are what surrounds a gate that weighs channels (squeeze and excitation: Hu et al. 2018, section 3). Vectors lie
along channels. For means a few of them are read from each pixel, so that sums stay in registers. The channels that are
left are read vector by vector, and only the last vector by a mask: on an EPYC without AVX-512 reading and writing a
vector by a mask takes twenty cycles more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.channels_last.loops import advanced, constant, looped, variable
from tilewise.kernels.cpu.channels_last.told import PIXELS as OF
from tilewise.kernels.cpu.sizes import HEADER
from tilewise.kernels.cpu.vectors import FLOAT, INT, NUMBER, Code, Values, intrinsic_of, named, next_number

__all__ = ["means", "scaled"]

VECTORS = 4
"""Vectors that a block reads of each pixel."""
IN_TURN = 4
"""Sums of each channel, which pixels are added to in turn: additions need not wait for one another."""
CHANNELS, COUNT, CHUNKS, PARTS, IMAGE = (OF[name] for name in ("channels", "count", "chunks", "parts", "image"))
WORDS = len(OF)


@functools.cache
def _sums(lanes: int, vectors: int, ragged: bool = False) -> Callable[..., None]:
    """Makes ``(pixels, count, step, out, valid)``, which writes the means of some channels over ``count`` pixels.

    They are those of so many ``vectors``, or with ``ragged`` the first ``valid`` of them. ``step`` is the distance of
    neighbouring pixels in bytes, a multiple of 4.
    """
    size = NUMBER * lanes

    def emit(code: Code, arguments: Values) -> None:
        pixels, count, step, out, valid = arguments
        b = code.builder
        there = masks.of_vectors(code, valid, vectors) if ragged else [None] * vectors
        sums = [[variable(code, code.splat(0.0)) for _ in range(vectors)] for _ in range(IN_TURN)]
        place = variable(code, pixels)

        def add(turn: int) -> None:
            at = b.load(place)
            for j in range(vectors):
                value = masks.read(code, code.at(at, j * size), there[j])
                b.store(b.fadd(b.load(sums[turn][j]), value), sums[turn][j])
            b.store(b.add(at, step), place)

        with looped(code, b.sdiv(count, constant(IN_TURN))):
            for turn in range(IN_TURN):
                add(turn)
        with looped(code, b.srem(count, constant(IN_TURN))):
            add(0)
        whole = code.everywhere(b.sitofp(count, FLOAT))
        for j in range(vectors):
            one, two, three, four = (b.load(sums[turn][j]) for turn in range(IN_TURN))
            total = b.fadd(b.fadd(one, two), b.fadd(three, four))
            masks.write(code, b.fdiv(total, whole), code.at(out, j * size), there[j])

    return intrinsic_of(lanes, emit)


@functools.cache
def _products(lanes: int) -> Callable[..., None]:
    """Makes ``(pixels, count, out, factors, channels)``, which multiplies ``count`` pixels by factors of channels.

    Memory is read and written from its beginning to its end, and the factors come from the nearest cache. Block by
    block of channels large images took up to three times as long.
    """
    size = NUMBER * lanes

    def emit(code: Code, arguments: Values) -> None:
        pixels, count, out, factors, channels = arguments
        b, apart, wide = code.builder, code.builder.sub(out, pixels), constant(VECTORS * lanes)
        left = b.srem(channels, constant(lanes))
        mask = masks.below(code, left)
        place, factor = variable(code, pixels), variable(code, factors)

        def multiply(vectors: int, mask: ir.Value | None = None) -> None:
            at, by = b.load(place), b.load(factor)
            for j in range(vectors):
                value = masks.read(code, code.at(at, j * size), mask)
                product = b.fmul(value, masks.read(code, code.at(by, j * size), mask))
                masks.write(code, product, code.at(b.add(at, apart), j * size), mask)
            advanced(code, place, vectors * size)
            advanced(code, factor, vectors * size)

        with looped(code, count):
            b.store(factors, factor)
            with looped(code, b.sdiv(channels, wide)):
                multiply(VECTORS)
            with looped(code, b.sdiv(b.srem(channels, wide), constant(lanes))):
                multiply(1)
            with looped(code, b.zext(b.icmp_signed(">", left, constant(0)), INT)):
                multiply(1, mask)
                b.store(b.add(b.load(place), b.mul(b.sub(left, constant(lanes)), constant(NUMBER))), place)

    return intrinsic_of(lanes, emit)


def means(lanes: int) -> Callable[..., None]:
    """Makes ``(data)``, which computes all units that no other thread takes: a chunk of channels of one image.

    ``data`` has a header, with the address of images as the first operand and that of the means as the result, and
    then the numbers of :data:`~tilewise.kernels.cpu.channels_last.told.PIXELS`.
    """
    several, one, last, count = _sums(lanes, VECTORS), _sums(lanes, 1), _sums(lanes, 1, ragged=True), next_number()
    wide, vector = VECTORS * lanes, NUMBER * lanes

    def run(address):
        data = carray(address, HEADER + WORDS)
        v = data[HEADER:]
        count(address, 0)
        unit = count(address, 2)
        while unit < data[3]:
            image, first = unit // v[CHUNKS], unit % v[CHUNKS] * wide
            start = data[7] + image * v[IMAGE] + first * NUMBER
            out = data[9] + (image * v[CHANNELS] + first) * NUMBER
            left, step = min(wide, v[CHANNELS] - first), v[CHANNELS] * NUMBER
            if left == wide:
                several(start, v[COUNT], step, out, wide)
                left = 0
            while left >= lanes:
                one(start, v[COUNT], step, out, lanes)
                start, out, left = start + vector, out + vector, left - lanes
            if left:
                last(start, v[COUNT], step, out, left)
            unit = count(address, 2)

    return named(run, lanes)


def scaled(lanes: int) -> Callable[..., None]:
    """Makes ``(data)`` as :func:`means`, whose units are some pixels of one image.

    The second operand has a factor for each channel of each image.
    """
    multiply, count = _products(lanes), next_number()

    def run(address):
        data = carray(address, HEADER + WORDS)
        v = data[HEADER:]
        count(address, 0)
        unit = count(address, 2)
        while unit < data[3]:
            image, part = unit // v[PARTS], unit % v[PARTS]
            first, end = part * v[COUNT] // v[PARTS], (part + 1) * v[COUNT] // v[PARTS]
            begin = image * v[IMAGE] + first * v[CHANNELS] * NUMBER
            factors = data[8] + image * v[CHANNELS] * NUMBER
            multiply(data[7] + begin, end - first, data[9] + begin, factors, v[CHANNELS])
            unit = count(address, 2)

    return named(run, lanes)
