"""Images joined along channels, which lie innermost, each channel scaled, shifted and put through an activation.

One pass in place of three: a concatenation, a norm with fixed statistics, and what follows it. Vectors lie along
channels, so that factors and summands of a few of them stay in registers for many pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import carray  # type: ignore[attr-defined]

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.channels_last.finishing import activation_of
from tilewise.kernels.cpu.channels_last.loops import looped, variable
from tilewise.kernels.cpu.channels_last.told import JOINED as OF
from tilewise.kernels.cpu.channels_last.told import JOINED_NUMBERS, word_of
from tilewise.kernels.cpu.sizes import HEADER
from tilewise.kernels.cpu.vectors import NUMBER, Code, Values, intrinsic_of, named, next_number

__all__ = ["joined"]

VECTORS = 4
"""Vectors that a block reads of each pixel."""
PIXELS, CHANNELS, PARTS, INPUTS, SCALE, SHIFT = (
    HEADER + OF[name] for name in ("pixels", "channels", "parts", "inputs", "scale", "shift")
)
FIRST = HEADER + JOINED_NUMBERS
"""The place of the first input's channels, with its address behind it."""


@functools.cache
def _block(lanes: int, activation: str, vectors: int, ragged: bool = False) -> Callable[..., None]:
    """Makes ``(pixels, count, step, out, out_step, scale, shift, valid)``: channels of ``count`` pixels.

    They are those of so many ``vectors``, or with ``ragged`` the first ``valid`` of them. ``step`` and ``out_step`` are
    the distances of neighbouring pixels in bytes.
    """
    size, function = NUMBER * lanes, activation_of(activation)

    def emit(code: Code, arguments: Values) -> None:
        pixels, count, step, out, out_step, scale, shift, valid = arguments
        b = code.builder
        there = masks.of_vectors(code, valid, vectors) if ragged else [None] * vectors
        factors = [masks.read(code, code.at(scale, j * size), mask) for j, mask in enumerate(there)]
        summands = [masks.read(code, code.at(shift, j * size), mask) for j, mask in enumerate(there)]
        place, target = variable(code, pixels), variable(code, out)
        with looped(code, count):
            at, to = b.load(place), b.load(target)
            for j, mask in enumerate(there):
                value = masks.read(code, code.at(at, j * size), mask)
                value = function(code, b.call(code.fma, [value, factors[j], summands[j]]))
                masks.write(code, value, code.at(to, j * size), mask)
            b.store(b.add(at, step), place)
            b.store(b.add(to, out_step), target)

    return intrinsic_of(lanes, emit)


def joined(lanes: int, activation: str) -> Callable[..., None]:
    """Makes ``(data)``, which computes all units that no other thread takes: some pixels, with all their channels.

    ``data`` has a header with the address of the result, and then the numbers of
    :data:`~tilewise.kernels.cpu.channels_last.told.JOINED`.
    """
    several, one = _block(lanes, activation, VECTORS), _block(lanes, activation, 1)
    last, count = _block(lanes, activation, 1, ragged=True), next_number()
    wide, vector = VECTORS * lanes, NUMBER * lanes

    def run(address):
        data = carray(address, HEADER)
        data = carray(address, data[4])
        count(address, 0)
        unit = count(address, 2)
        while unit < data[3]:
            first = unit * data[PIXELS] // data[PARTS]
            number = (unit + 1) * data[PIXELS] // data[PARTS] - first
            step, before = data[CHANNELS] * NUMBER, 0
            for k in range(data[INPUTS]):
                channels = data[FIRST + 2 * k]
                source, row = data[FIRST + 2 * k + 1] + first * channels * NUMBER, channels * NUMBER
                out, scale, shift = data[9] + first * step + before, data[SCALE] + before, data[SHIFT] + before
                left, at = channels, 0
                while left >= wide:
                    several(source + at, number, row, out + at, step, scale + at, shift + at, wide)
                    at, left = at + VECTORS * vector, left - wide
                while left >= lanes:
                    one(source + at, number, row, out + at, step, scale + at, shift + at, lanes)
                    at, left = at + vector, left - lanes
                if left:
                    last(source + at, number, row, out + at, step, scale + at, shift + at, left)
                before += row
            unit = count(address, 2)

    return named(run, lanes, word_of(activation))
