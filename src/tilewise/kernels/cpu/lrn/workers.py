"""Workers of local response normalization: threads take strips of pixels, and read each number from memory once.

Where the channels of an image lie one behind another, vectors lie along pixels. A strip is narrow enough that the lines
of a window's channels stay in a core's first cache: squares are read from there as often as windows need them. Where
the channels of a pixel are neighbours, vectors lie along channels, and a window's squares are read at shifted places.

Sums are added up anew for each window. A running sum, to which a square is added and from which one is taken away,
would keep the rounding errors of the largest square for all channels that follow.

The backward pass computes the powers again from x. Keeping them would move two more numbers for each one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tilewise.kernels.cpu.lrn import windows
from tilewise.kernels.cpu.lrn.told import WORDS
from tilewise.kernels.cpu.units import over_units
from tilewise.kernels.cpu.vectors import NUMBER, compiled, zero

__all__ = ["worker"]

CHANNELS, PIXELS, BEFORE, AFTER = (WORDS[name] for name in ("channels", "pixels", "before", "after"))
STRIP, STRIPS, BLOCK, LINE, NUMBERS = (WORDS[name] for name in ("strip", "strips", "block", "line", "numbers"))


@functools.cache
def _forward_strip(lanes: int, quarters: int) -> Callable[..., None]:
    """Makes ``(x, dy, out, v, scratch, unit)`` for vectors along pixels: the result's strip."""
    whole, part = (windows.forward(lanes, quarters, False, masked) for masked in (False, True))

    @compiled(lanes, quarters)
    def run(x, dy, out, v, scratch, unit):
        image, number = unit // v[STRIPS], unit % v[STRIPS]
        first, step = number * v[STRIP], v[PIXELS] * NUMBER
        width = min(v[STRIP], v[PIXELS] - first)
        start = image * v[CHANNELS] * step + first * NUMBER
        ahead = (v[AFTER] + 1) * step
        for c in range(v[CHANNELS]):
            place = start + c * step
            begin, end = -min(v[BEFORE], c), min(v[AFTER], v[CHANNELS] - 1 - c) + 1
            i = 0
            while i + lanes <= width:
                at = place + i * NUMBER
                whole(x + at, step, begin, end, out + at, v[NUMBERS], ahead, 0, 0)
                i += lanes
            if i < width:
                at = place + i * NUMBER
                part(x + at, step, begin, end, out + at, v[NUMBERS], ahead, 0, width - i)

    return run


@functools.cache
def _backward_strip(lanes: int, quarters: int) -> Callable[..., None]:
    """As :func:`_forward_strip`: the gradient's strip.

    The terms of a window's channels lie in scratch, one line each. The window of channel c is whole once the terms of
    channel c + before are there: c's own ones, those of ``after`` channels before it and of ``before`` behind it.
    """
    whole, part = (windows.terms(lanes, quarters, False, masked) for masked in (False, True))
    last_whole, last_part = (windows.gradient(lanes, False, masked) for masked in (False, True))
    clear = zero(lanes)

    @compiled(lanes, quarters)
    def run(x, dy, out, v, scratch, unit):
        image, number = unit // v[STRIPS], unit % v[STRIPS]
        first, step = number * v[STRIP], v[PIXELS] * NUMBER
        width = min(v[STRIP], v[PIXELS] - first)
        start = image * v[CHANNELS] * step + first * NUMBER
        ahead, lines = (v[AFTER] + 1) * step, v[BEFORE] + v[AFTER] + 1
        for i in range(0, lines * v[LINE], lanes * NUMBER):
            clear(scratch + i)
        for c in range(v[CHANNELS] + v[BEFORE]):
            line = scratch + c % lines * v[LINE]
            if c < v[CHANNELS]:
                place = start + c * step
                begin, end = -min(v[BEFORE], c), min(v[AFTER], v[CHANNELS] - 1 - c) + 1
                i = 0
                while i + lanes <= width:
                    at, to = place + i * NUMBER, line + i * NUMBER
                    whole(x + at, step, begin, end, dy + at, out + at, to, v[NUMBERS], ahead, 0, 0)
                    i += lanes
                if i < width:
                    at, to = place + i * NUMBER, line + i * NUMBER
                    part(x + at, step, begin, end, dy + at, out + at, to, v[NUMBERS], ahead, 0, width - i)
            else:
                for i in range(0, v[LINE], lanes * NUMBER):
                    clear(line + i)
            if c >= v[BEFORE]:
                place = start + (c - v[BEFORE]) * step
                i = 0
                while i + lanes <= width:
                    at = place + i * NUMBER
                    last_whole(scratch + i * NUMBER, v[LINE], 0, lines, x + at, out + at, v[NUMBERS], 0, 0)
                    i += lanes
                if i < width:
                    at = place + i * NUMBER
                    last_part(scratch + i * NUMBER, v[LINE], 0, lines, x + at, out + at, v[NUMBERS], 0, width - i)

    return run


@functools.cache
def _forward_pixels(lanes: int, quarters: int) -> Callable[..., None]:
    """Makes ``(x, dy, out, v, scratch, unit)`` for vectors along channels: the result's strip."""
    whole, part = (windows.forward(lanes, quarters, True, masked) for masked in (False, True))

    @compiled(lanes, quarters)
    def run(x, dy, out, v, scratch, unit):
        first = unit * v[STRIP]
        channels, before, after = v[CHANNELS], v[BEFORE], v[AFTER]
        for pixel in range(first, min(v[PIXELS], first + v[STRIP])):
            row = pixel * channels * NUMBER
            for c in range(0, channels, lanes):
                at = row + c * NUMBER
                if c >= before and c + lanes + after <= channels:
                    whole(x + at, NUMBER, -before, after + 1, out + at, v[NUMBERS], 0, 0, 0)
                else:
                    part(x + at, NUMBER, -before, after + 1, out + at, v[NUMBERS], 0, -c, channels - c)

    return run


@functools.cache
def _backward_pixels(lanes: int, quarters: int) -> Callable[..., None]:
    """As :func:`_forward_pixels`: the gradient's strip.

    A pixel's terms lie in its line of scratch, with zeros before the first channel and behind the last one. Several
    pixels are computed at a time: a vector that is read across two that were just written makes a processor wait.
    """
    whole, part = (windows.terms(lanes, quarters, True, masked) for masked in (False, True))
    last_whole, last_part = (windows.gradient(lanes, True, masked) for masked in (False, True))
    clear = zero(lanes)

    @compiled(lanes, quarters)
    def run(x, dy, out, v, scratch, unit):
        first = unit * v[STRIP]
        channels, before, after = v[CHANNELS], v[BEFORE], v[AFTER]
        for i in range(0, v[BLOCK] * v[LINE], lanes * NUMBER):
            clear(scratch + i)
        end = min(v[PIXELS], first + v[STRIP])
        while first < end:
            count = min(v[BLOCK], end - first)
            for pixel in range(count):
                row, line = (first + pixel) * channels * NUMBER, scratch + pixel * v[LINE] + after * NUMBER
                for c in range(0, channels, lanes):
                    at, to = row + c * NUMBER, line + c * NUMBER
                    if c >= before and c + lanes + after <= channels:
                        whole(x + at, NUMBER, -before, after + 1, dy + at, out + at, to, v[NUMBERS], 0, 0, 0)
                    else:
                        part(
                            x + at, NUMBER, -before, after + 1, dy + at, out + at, to, v[NUMBERS], 0, -c, channels - c
                        )  # fmt: skip
            for pixel in range(count):
                row, line = (first + pixel) * channels * NUMBER, scratch + pixel * v[LINE] + after * NUMBER
                for c in range(0, channels, lanes):
                    at, of = row + c * NUMBER, line + c * NUMBER
                    if c + lanes <= channels:
                        last_whole(of, NUMBER, -after, before + 1, x + at, out + at, v[NUMBERS], 0, 0)
                    else:
                        last_part(of, NUMBER, -after, before + 1, x + at, out + at, v[NUMBERS], 0, channels - c)
            first += count

    return run


def worker(lanes: int, quarters: int, along: bool, back: bool) -> Callable[..., None]:
    """Makes ``(data)``, which computes all units that no other thread takes.

    ``quarters`` are four times beta, or ``GENERAL``. ``along`` says that vectors lie along channels, ``back`` that it
    computes the gradient of x.

    ``data`` is the address of int64: the next thread's number, the number of threads, the next unit, the number of
    units, the size of ``data``, the bytes of a thread's scratch, and the addresses of scratch, x, dy and result. After
    these :data:`~tilewise.kernels.cpu.sizes.HEADER` numbers come those of
    :class:`~tilewise.kernels.cpu.lrn.told.Told`.
    """
    makers = (_forward_strip, _backward_strip), (_forward_pixels, _backward_pixels)
    unit_of = makers[along][back](lanes, quarters)
    return over_units(unit_of, "lrn", lanes, quarters, "along" if along else "across", "back" if back else "to")
