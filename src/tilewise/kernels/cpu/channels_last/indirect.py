"""Convolution by tables of the pixels that each tap reads (Dukhan 2019, "The Indirect Convolution Algorithm").

A unit of work is a range of pixels and a range of panels, which are a few vectors of output channels each. The unit
writes the tables of all its tiles of pixels once. Then it takes panel by panel, because a panel of the filter stays in
a core's cache for all tiles. Pixels outside of the image are read from a row of zeros. Tiles are filled up with pixels
that read zeros and are written to scratch.

Where an image has few channels, a unit first copies the rows that it reads, padded. What a row of the filter meets of
it is then one run of memory, which counts as one tap with more channels. Such an image may also lie channel by channel:
the copy makes neighbours of a pixel's channels.

Of layers whose groups have few outputs several groups are computed side by side, as one group of all their channels
(:mod:`~tilewise.kernels.cpu.channels_last.interleaving`). The copy then lets their channels take turns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tilewise.kernels.cpu.channels_last.loops import PLACE, copied, interleaved, put
from tilewise.kernels.cpu.channels_last.told import INDIRECT as OF
from tilewise.kernels.cpu.channels_last.told import UNROLLED
from tilewise.kernels.cpu.units import over_units
from tilewise.kernels.cpu.vectors import NUMBER, compiled, pointer_call

__all__ = ["indirect", "panels"]

CHANNELS, OUTPUTS, PLANES, PARTS = (OF[name] for name in ("channels", "outputs", "planes", "parts"))
PANEL_PARTS, PANELS, TILES, PIXELS = (OF[name] for name in ("panel_parts", "panels", "tiles", "pixels"))
ROWS, WIDTH, SIZES, OUTS, KERNEL = (OF[name] for name in ("rows", "width", "sizes", "outs", "kernel"))
STRIDE, DILATION, BEFORE, X, Y = (OF[name] for name in ("stride", "dilation", "before", "x", "y"))
ADDED, RESIDUAL, BIAS, ZEROS = (OF[name] for name in ("added", "residual", "bias", "zeros"))
PANEL_BYTES, GROUP_BYTES, TABLE, STRIP = (OF[name] for name in ("panel_bytes", "group_bytes", "table", "strip"))
DUMMY, BIASES, STRIP_LINE, LINES = (OF[name] for name in ("dummy", "biases", "strip_line", "lines"))
KERNELS, LAST_KERNEL, APART = (OF[name] for name in ("kernels", "last_kernel", "apart"))
GROUPS, INTERLEAVED, INTERLEAVE = (OF[name] for name in ("groups", "interleaved", "interleave"))
ALL_CHANNELS, ALL_OUTPUTS, AHEAD = (OF[name] for name in ("all_channels", "all_outputs", "ahead"))


@functools.cache
def _taps() -> Callable[..., None]:
    """Makes ``(v, x, start, entry)``, which writes the address of what each tap reads of one pixel.

    ``start`` is where in the image the pixel's window begins. Addresses are ``v[ROWS]`` entries apart.
    """
    write = put()

    @compiled()
    def run(v, x, start, entry):
        base = x + start[0] * v[X + 1] + start[1] * v[X + 2] + start[2] * v[X + 3]
        for i in range(v[KERNEL]):
            depth = start[0] + i * v[DILATION]
            for j in range(v[KERNEL + 1]):
                height = start[1] + j * v[DILATION + 1]
                inside = 0 <= depth < v[SIZES] and 0 <= height < v[SIZES + 1]
                line = base + i * v[DILATION] * v[X + 1] + j * v[DILATION + 1] * v[X + 2]
                for k in range(v[KERNEL + 2]):
                    width = start[2] + k * v[DILATION + 2]
                    there = line + k * v[DILATION + 2] * v[X + 3]
                    write(entry, there if inside and 0 <= width < v[SIZES + 2] else v[ZEROS])
                    entry += v[ROWS] * PLACE

    return run


@functools.cache
def _tables() -> Callable[..., None]:
    """Makes ``(v, x, y, scratch, first, last)``, which writes the tables of the tiles from ``first`` to ``last``.

    The table of the pixels that taps read is followed by that of the places of results, and that of what is added.
    """
    taps, write = _taps(), put()

    @compiled()
    def run(v, x, y, scratch, first, last):
        rows, count = v[ROWS], v[KERNEL] * v[KERNEL + 1] * v[KERNEL + 2]
        outs = scratch + v[TABLE]
        others = outs + (last - first) * rows * PLACE
        pixel = first * rows
        w, h = pixel % v[OUTS + 2], pixel // v[OUTS + 2] % v[OUTS + 1]
        d, n = pixel // (v[OUTS + 2] * v[OUTS + 1]) % v[OUTS], pixel // (v[OUTS + 2] * v[OUTS + 1] * v[OUTS])
        for tile in range(last - first):
            for i in range(rows):
                entry = scratch + (tile * count * rows + i) * PLACE
                place = (tile * rows + i) * PLACE
                if pixel < v[PIXELS]:
                    write(outs + place, y + n * v[Y] + d * v[Y + 1] + h * v[Y + 2] + w * v[Y + 3])
                    write(
                        others + place,
                        v[RESIDUAL] + n * v[ADDED] + d * v[ADDED + 1] + h * v[ADDED + 2] + w * v[ADDED + 3],
                    )
                    start = (
                        d * v[STRIDE] - v[BEFORE],
                        h * v[STRIDE + 1] - v[BEFORE + 1],
                        w * v[STRIDE + 2] - v[BEFORE + 2],
                    )
                    taps(v, x + n * v[X], start, entry)
                else:
                    write(outs + place, scratch + v[DUMMY])
                    write(others + place, scratch + v[DUMMY])
                    for k in range(count):
                        write(entry + k * rows * PLACE, v[ZEROS])
                pixel += 1
                w += 1
                if w == v[OUTS + 2]:
                    w, h = 0, h + 1
                    if h == v[OUTS + 1]:
                        h, d = 0, d + 1
                        if d == v[OUTS]:
                            d, n = 0, n + 1

    return run


@functools.cache
def _tables_of_one_tap() -> Callable[..., None]:
    """Makes what :func:`_tables` makes, for one tap that never lies outside of the image: row by row of results."""
    write = put()

    @compiled()
    def run(v, x, y, scratch, first, last):
        outs = scratch + v[TABLE]
        begin, count = first * v[ROWS], (last - first) * v[ROWS]
        others, there = outs + count * PLACE, min(count, v[PIXELS] - begin)
        k = 0
        while k < there:
            w, rest = (begin + k) % v[OUTS + 2], (begin + k) // v[OUTS + 2]
            h, rest = rest % v[OUTS + 1], rest // v[OUTS + 1]
            d, n = rest % v[OUTS], rest // v[OUTS]
            source = (
                x + n * v[X] + (d * v[STRIDE] - v[BEFORE]) * v[X + 1] + (h * v[STRIDE + 1] - v[BEFORE + 1]) * v[X + 2]
            )
            source += (w * v[STRIDE + 2] - v[BEFORE + 2]) * v[X + 3]
            to = y + n * v[Y] + d * v[Y + 1] + h * v[Y + 2] + w * v[Y + 3]
            more = v[RESIDUAL] + n * v[ADDED] + d * v[ADDED + 1] + h * v[ADDED + 2] + w * v[ADDED + 3]
            length, step = min(v[OUTS + 2] - w, there - k), v[STRIDE + 2] * v[X + 3]
            for j in range(length):
                write(scratch + (k + j) * PLACE, source + j * step)
                write(outs + (k + j) * PLACE, to + j * v[Y + 3])
            if v[RESIDUAL]:
                for j in range(length):
                    write(others + (k + j) * PLACE, more + j * v[ADDED + 3])
            k += length
        for j in range(there, count):
            write(scratch + j * PLACE, v[ZEROS])
            write(outs + j * PLACE, scratch + v[DUMMY])
            write(others + j * PLACE, scratch + v[DUMMY])

    return run


@functools.cache
def _is_inside() -> Callable[..., bool]:
    """Makes ``(v)``: whether the filter has one tap, which never lies outside of the image."""

    @compiled()
    def run(v):
        inside = v[KERNEL] * v[KERNEL + 1] * v[KERNEL + 2] == 1
        for i in range(3):
            end = (v[OUTS + i] - 1) * v[STRIDE + i] - v[BEFORE + i]
            inside = inside and v[BEFORE + i] <= 0 and end < v[SIZES + i]
        return inside

    return run


@functools.cache
def _strip(lanes: int) -> Callable[..., None]:
    """Makes ``(v, x, group, first, count, strip)``, which copies the lines that ``count`` rows of results read, padded.

    ``first`` is the first row of results, and ``x`` the plane of ``group`` that they read.
    """
    copy, interleave, interleave_groups = copied(lanes), interleaved(lanes), pointer_call()

    @compiled(lanes)
    def run(v, x, group, first, count, strip):
        channels, length = v[CHANNELS], v[STRIP_LINE] // (v[CHANNELS] * NUMBER)
        ahead = max(0, min(v[BEFORE + 2], length))
        skipped = max(0, -v[BEFORE + 2])
        inside = max(0, min(v[SIZES + 2] - skipped, length - ahead))
        for i in range((count - 1) * v[STRIDE + 1] + (v[KERNEL + 1] - 1) * v[DILATION + 1] + 1):
            line = first * v[STRIDE + 1] - v[BEFORE + 1] + i
            target = strip + i * v[STRIP_LINE]
            if line < 0 or line >= v[SIZES + 1]:
                copy(0, target, length * channels)
                continue
            source = x + line * v[X + 2] + skipped * v[X + 3]
            copy(0, target, ahead * channels)
            if v[APART]:
                interleave(source, v[APART], target + ahead * channels * NUMBER, channels, inside)
            elif v[INTERLEAVED]:
                valid = min(channels, v[ALL_CHANNELS] - group * channels)
                begin = target + ahead * channels * NUMBER
                interleave_groups(v[INTERLEAVE], source, v[X + 3], begin, inside, valid)
            elif v[X + 3] == channels * NUMBER:
                copy(source, target + ahead * channels * NUMBER, inside * channels)
            else:
                for k in range(inside):
                    copy(source + k * v[X + 3], target + (ahead + k) * channels * NUMBER, channels)
            copy(0, target + (ahead + inside) * channels * NUMBER, (length - ahead - inside) * channels)

    return run


@functools.cache
def _strip_tables() -> Callable[..., None]:
    """Makes ``(v, y, other, scratch, first, pixels, tiles)``, which writes the tables of ``tiles`` tiles of a strip.

    The tiles cover ``pixels`` pixels from the row ``first`` of results on.
    """
    write = put()

    @compiled()
    def run(v, y, other, scratch, first, pixels, tiles):
        rows, strip, count = v[ROWS], scratch + v[STRIP], v[KERNEL + 1]
        outs = scratch + v[TABLE]
        others = outs + tiles * rows * PLACE
        w, step, i, place = 0, v[STRIDE + 2] * v[CHANNELS] * NUMBER, 0, 0
        entry, line, taps = scratch, strip, v[DILATION + 1] * v[STRIP_LINE]
        to, more = y + first * v[Y + 2], other + first * v[ADDED + 2]
        for pixel in range(tiles * rows):
            if pixel < pixels:
                there = line + w * step
                write(outs + place, to + w * v[Y + 3])
                write(others + place, more + w * v[ADDED + 3])
            else:
                there = strip  # what the first pixel reads
                write(outs + place, scratch + v[DUMMY])
                write(others + place, scratch + v[DUMMY])
            for k in range(count):
                write(entry + k * rows * PLACE, there + k * taps)
            place += PLACE
            entry += PLACE
            i += 1
            if i == rows:
                i, entry = 0, entry + (count - 1) * rows * PLACE
            w += 1
            if w == v[OUTS + 2]:
                w, line, to, more = 0, line + v[STRIDE + 1] * v[STRIP_LINE], to + v[Y + 2], more + v[ADDED + 2]

    return run


@functools.cache
def _panel(lanes: int) -> Callable[..., tuple[int, int, int, int]]:
    """Makes ``(v, scratch, group, panel)``: the kernel of a panel's tiles, its shift, bias and valid outputs."""
    copy = copied(lanes)

    @compiled(lanes)
    def run(v, scratch, group, panel):
        width = v[WIDTH]
        valid = min(width, v[OUTPUTS] - panel * width)
        if v[INTERLEAVED]:
            valid = min(valid, v[ALL_OUTPUTS] - group * v[OUTPUTS])
        shift = (group * v[OUTPUTS] + panel * width) * NUMBER
        bias = v[ZEROS]
        if v[BIAS]:
            # The last panel's vectors may reach beyond the bias.
            bias = scratch + v[BIASES]
            copy(0, bias, width)
            copy(v[BIAS] + shift, bias, valid)
        kernel = v[LAST_KERNEL] if panel == v[PANELS] - 1 else v[KERNELS]
        return kernel, shift, bias, valid

    return run


@functools.cache
def panels(lanes: int, ahead: bool = False) -> Callable[..., None]:
    """Makes ``(v, w, scratch, group, first, last, taps, depth, tiles, entries)``, which computes panels of a unit.

    It computes ``tiles`` tiles. Each has ``entries`` entries in the table of what is read.

    With ``ahead`` tiles prefetch the next panel, each as much as its own passes have time for. A large panel comes from
    memory while the first tile computes with it, which waits. The first panel of a unit comes as it did.
    """
    tile, prepared = pointer_call(), _panel(lanes)

    @compiled(lanes)
    def run(v, w, scratch, group, first, last, taps, depth, tiles, entries):
        rows, piece = v[ROWS], v[AHEAD] * taps * (depth // UNROLLED)
        outs = scratch + v[TABLE]
        others = outs + tiles * rows * PLACE if v[RESIDUAL] else 0
        for panel in range(first, last):
            kernel, shift, bias, valid = prepared(v, scratch, group, panel)
            filters = w + group * v[GROUP_BYTES] + panel * v[PANEL_BYTES]
            later, step = (filters + v[PANEL_BYTES], v[AHEAD]) if panel + 1 < last else (filters, 0)
            for i in range(tiles):
                place = i * rows * PLACE
                second = others + place if v[RESIDUAL] else 0
                table = scratch + i * entries * PLACE
                if ahead:
                    tile(kernel, table, taps, depth, filters, outs + place, second, shift, bias, valid, later, step)
                    later += piece if step else 0
                else:
                    tile(kernel, table, taps, depth, filters, outs + place, second, shift, bias, valid)

    return run


@functools.cache
def _unit(lanes: int) -> Callable[..., None]:
    """Makes ``(x, w, y, v, scratch, unit)``, which computes one unit of work."""
    tables, compute, strip, strip_tables = _tables(), panels(lanes), _strip(lanes), _strip_tables()
    one_tap, inside, compute_ahead = _tables_of_one_tap(), _is_inside(), panels(lanes, ahead=True)

    @compiled(lanes)
    def run(x, w, y, v, scratch, unit):
        part, rest = unit % v[PARTS], unit // v[PARTS]
        panel_part, group = rest % v[PANEL_PARTS], rest // v[PANEL_PARTS]
        first, last = panel_part * v[PANELS] // v[PANEL_PARTS], (panel_part + 1) * v[PANELS] // v[PANEL_PARTS]
        if v[INTERLEAVED]:
            # Channels of a pixel that are neighbours in memory are read one after the other.
            group, part = unit % v[GROUPS], unit // v[GROUPS]
        x += group * v[CHANNELS] * NUMBER
        if v[STRIP]:
            # Parts are of one plane each.
            each = v[PARTS] // v[PLANES]
            plane, piece = part // each, part % each
            begin, end = piece * v[LINES], min(v[OUTS + 1], (piece + 1) * v[LINES])
            n, d = plane // v[OUTS], plane % v[OUTS]
            source = x + n * v[X] + (d * v[STRIDE] - v[BEFORE]) * v[X + 1]
            pixels = (end - begin) * v[OUTS + 2]
            tiles = (pixels + v[ROWS] - 1) // v[ROWS]
            other = v[RESIDUAL] + n * v[ADDED] + d * v[ADDED + 1]
            strip(v, source, group, begin, end - begin, scratch + v[STRIP])
            strip_tables(v, y + n * v[Y] + d * v[Y + 1], other, scratch, begin, pixels, tiles)
            taps, depth = v[KERNEL + 1], v[KERNEL + 2] * v[CHANNELS]
            if v[INTERLEAVED]:
                depth //= v[INTERLEAVED]
            compute(v, w, scratch, group, first, last, taps, depth, tiles, taps * v[ROWS])
        else:
            begin, end = part * v[TILES] // v[PARTS], (part + 1) * v[TILES] // v[PARTS]
            taps = v[KERNEL] * v[KERNEL + 1] * v[KERNEL + 2]
            if inside(v):
                one_tap(v, x, y, scratch, begin, end)
            else:
                tables(v, x, y, scratch, begin, end)
            if v[AHEAD]:
                compute_ahead(v, w, scratch, group, first, last, taps, v[CHANNELS], end - begin, taps * v[ROWS])
            else:
                compute(v, w, scratch, group, first, last, taps, v[CHANNELS], end - begin, taps * v[ROWS])

    return run


def indirect(lanes: int) -> Callable[..., None]:
    """Makes ``(data)``, which computes all units that no other thread takes.

    ``data`` begins as in :func:`tilewise.kernels.cpu.fused_fourier.kernel.convolve`, with the addresses of the image,
    the filters and the result. Then follow the numbers of :data:`~tilewise.kernels.cpu.channels_last.told.INDIRECT`.
    """
    return over_units(_unit(lanes), "indirect", lanes)
