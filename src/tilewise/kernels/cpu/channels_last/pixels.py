"""Means over the pixels of images whose channels lie innermost, and products of pixels with a factor for each channel.

Both are what surrounds a gate that weighs channels (squeeze and excitation: Hu et al. 2018, section 3). Vectors lie
along channels. A few of them are read from each pixel, so that sums and factors stay in registers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.channels_last.loops import constant, looped, variable
from tilewise.kernels.cpu.channels_last.told import PIXELS as OF
from tilewise.kernels.cpu.sizes import HEADER
from tilewise.kernels.cpu.vectors import FLOAT, NUMBER, Code, Values, intrinsic_of, named, next_number

__all__ = ["means", "scaled"]

VECTORS = 4
"""Vectors that a block reads of each pixel."""
IN_TURN = 4
"""Sums of each channel, which pixels are added to in turn: additions need not wait for one another."""
CHANNELS, COUNT, CHUNKS, PARTS, IMAGE = (OF[name] for name in ("channels", "count", "chunks", "parts", "image"))
WORDS = len(OF)


@functools.cache
def _sums(lanes: int) -> Callable[..., None]:
    """Makes ``(pixels, count, step, out, valid)``, which writes the means of ``valid`` channels over ``count`` pixels.

    ``step`` is the distance of neighbouring pixels in bytes, a multiple of 4.
    """
    size = NUMBER * lanes

    def emit(code: Code, arguments: Values) -> None:
        pixels, count, step, out, valid = arguments
        b = code.builder
        there = [masks.below(code, b.sub(valid, constant(j * lanes))) for j in range(VECTORS)]
        sums = [[variable(code, code.splat(0.0)) for _ in range(VECTORS)] for _ in range(IN_TURN)]
        place = variable(code, pixels)

        def add(turn: int) -> None:
            at = b.load(place)
            for j in range(VECTORS):
                value = masks.load(code, code.at(at, j * size), there[j])
                b.store(b.fadd(b.load(sums[turn][j]), value), sums[turn][j])
            b.store(b.add(at, step), place)

        with looped(code, b.sdiv(count, constant(IN_TURN))):
            for turn in range(IN_TURN):
                add(turn)
        with looped(code, b.srem(count, constant(IN_TURN))):
            add(0)
        whole = code.everywhere(b.sitofp(count, FLOAT))
        for j in range(VECTORS):
            one, two, three, four = (b.load(sums[turn][j]) for turn in range(IN_TURN))
            total = b.fadd(b.fadd(one, two), b.fadd(three, four))
            masks.store(code, b.fdiv(total, whole), code.at(out, j * size), there[j])

    return intrinsic_of(lanes, emit)


@functools.cache
def _products(lanes: int) -> Callable[..., None]:
    """Makes ``(pixels, count, step, out, factors, valid)``: ``valid`` channels of ``count`` pixels times factors."""
    size = NUMBER * lanes

    def emit(code: Code, arguments: Values) -> None:
        pixels, count, step, out, factors, valid = arguments
        b = code.builder
        there = [masks.below(code, b.sub(valid, constant(j * lanes))) for j in range(VECTORS)]
        factor = [masks.load(code, code.at(factors, j * size), mask) for j, mask in enumerate(there)]
        place, apart = variable(code, pixels), b.sub(out, pixels)
        with looped(code, count):
            at = b.load(place)
            for j in range(VECTORS):
                value: ir.Value = masks.load(code, code.at(at, j * size), there[j])
                masks.store(code, b.fmul(value, factor[j]), code.at(b.add(at, apart), j * size), there[j])
            b.store(b.add(at, step), place)

    return intrinsic_of(lanes, emit)


def means(lanes: int) -> Callable[..., None]:
    """Makes ``(data)``, which computes all units that no other thread takes: a chunk of channels of one image.

    ``data`` has a header, with the address of images as the first operand and that of the means as the result, and
    then the numbers of :data:`~tilewise.kernels.cpu.channels_last.told.PIXELS`.
    """
    block, count = _sums(lanes), next_number()
    wide = VECTORS * lanes

    def run(address):
        data = carray(address, HEADER + WORDS)
        v = data[HEADER:]
        count(address, 0)
        unit = count(address, 2)
        while unit < data[3]:
            image, first = unit // v[CHUNKS], unit % v[CHUNKS] * wide
            start = data[7] + image * v[IMAGE] + first * NUMBER
            out = data[9] + (image * v[CHANNELS] + first) * NUMBER
            block(start, v[COUNT], v[CHANNELS] * NUMBER, out, min(wide, v[CHANNELS] - first))
            unit = count(address, 2)

    return named(run, lanes)


def scaled(lanes: int) -> Callable[..., None]:
    """Makes ``(data)`` as :func:`means`, whose units are some pixels of one image.

    The second operand has a factor for each channel of each image.
    """
    block, count = _products(lanes), next_number()
    wide = VECTORS * lanes

    def run(address):
        data = carray(address, HEADER + WORDS)
        v = data[HEADER:]
        count(address, 0)
        unit = count(address, 2)
        while unit < data[3]:
            image, part = unit // v[PARTS], unit % v[PARTS]
            first, last = part * v[COUNT] // v[PARTS], (part + 1) * v[COUNT] // v[PARTS]
            begin = image * v[IMAGE] + first * v[CHANNELS] * NUMBER
            for channel in range(0, v[CHANNELS], wide):
                there, factors = begin + channel * NUMBER, data[8] + (image * v[CHANNELS] + channel) * NUMBER
                block(data[7] + there, last - first, v[CHANNELS] * NUMBER, data[9] + there, factors,
                      min(wide, v[CHANNELS] - channel))  # fmt: skip
            unit = count(address, 2)

    return named(run, lanes)
