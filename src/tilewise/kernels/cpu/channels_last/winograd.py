"""Winograd convolution of images whose channels lie innermost (Lavin and Gray 2016, section 4.1).

A unit of work is a block of tiles and a range of panels, which are a few vectors of output channels each. It transforms
all channels of its tiles. Then for each panel it multiplies them with the panel's transformed filters, point by point,
and transforms the sums back while they are in a core's cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tilewise.kernels.cpu.channels_last.loops import PLACE, copied, put
from tilewise.kernels.cpu.channels_last.told import WINOGRAD as OF
from tilewise.kernels.cpu.units import over_units
from tilewise.kernels.cpu.vectors import NUMBER, compiled, pointer_call

__all__ = ["winograd_last"]

CHANNELS, OUTPUTS, BLOCKS, PANEL_PARTS = (OF[name] for name in ("channels", "outputs", "blocks", "panel_parts"))
PANELS, TILES, DOWN, ALONG, ROWS = (OF[name] for name in ("panels", "tiles", "down", "along", "rows"))
WIDTH, PADDED, POINTS_DOWN, POINTS_ALONG = (OF[name] for name in ("width", "padded", "points_down", "points_along"))
OUTPUTS_DOWN, OUTPUTS_ALONG, SIZES = (OF[name] for name in ("outputs_down", "outputs_along", "sizes"))
OUTS, BEFORE, X, Y, RESIDUAL, BIAS = (OF[name] for name in ("outs", "before", "x", "y", "residual", "bias"))
ZEROS, PANEL_BYTES, GROUP_BYTES, READ = (OF[name] for name in ("zeros", "panel_bytes", "group_bytes", "read"))
SUMS, WRITTEN, ADDED, BIASES, DUMMY = (OF[name] for name in ("sums", "written", "added", "biases", "dummy"))
INPUTS, INPUT_ROW, INPUT_POINT = (OF[name] for name in ("inputs", "input_row", "input_point"))
PRODUCTS, PRODUCT_POINT, TO, BACK = (OF[name] for name in ("products", "product_point", "to", "back"))
KERNELS, LAST_KERNEL = (OF[name] for name in ("kernels", "last_kernel"))


@functools.cache
def _inputs(lanes: int) -> Callable[..., None]:
    """Makes ``(v, x, scratch, first, count)``, which transforms ``count`` tiles of the image from ``first`` on.

    The table of a tile's pixels is written at the place of the products, which come later.
    """
    to, write = pointer_call(), put()

    @compiled(lanes)
    def run(v, x, scratch, first, count):
        table, vectors = scratch + v[PRODUCTS], (v[CHANNELS] + lanes - 1) // lanes
        for tile in range(first, first + count):
            w0 = tile % v[ALONG] * v[OUTPUTS_ALONG] - v[BEFORE + 1]
            h0 = tile // v[ALONG] % v[DOWN] * v[OUTPUTS_DOWN] - v[BEFORE]
            base, entry = x + tile // (v[ALONG] * v[DOWN]) * v[X], table
            for h in range(h0, h0 + v[POINTS_DOWN]):
                for w in range(w0, w0 + v[POINTS_ALONG]):
                    inside = 0 <= h < v[SIZES] and 0 <= w < v[SIZES + 1]
                    write(entry, base + h * v[X + 1] + w * v[X + 2] if inside else v[ZEROS])
                    entry += PLACE
            target = scratch + v[INPUTS] + (tile - first) * v[INPUT_ROW]
            to(v[TO], table, v[CHANNELS], vectors, target, v[INPUT_POINT])

    return run


@functools.cache
def _tables() -> Callable[..., None]:
    """Makes ``(v, y, scratch, first, count)``, which writes the tables of a block's products and results."""
    write = put()

    @compiled()
    def run(v, y, scratch, first, count):
        entry = 0
        for point in range(v[POINTS_DOWN] * v[POINTS_ALONG]):
            for i in range(v[PADDED]):
                there = scratch + v[INPUTS] + point * v[INPUT_POINT] + i * v[INPUT_ROW]
                write(scratch + v[READ] + entry, there if i < count else v[ZEROS])
                write(
                    scratch + v[SUMS] + entry,
                    scratch + v[PRODUCTS] + point * v[PRODUCT_POINT] + i * v[WIDTH] * NUMBER,
                )
                entry += PLACE
        entry = 0
        for tile in range(first, first + count):
            w0, h0 = tile % v[ALONG] * v[OUTPUTS_ALONG], tile // v[ALONG] % v[DOWN] * v[OUTPUTS_DOWN]
            image = tile // (v[ALONG] * v[DOWN]) * v[Y]
            for h in range(h0, h0 + v[OUTPUTS_DOWN]):
                for w in range(w0, w0 + v[OUTPUTS_ALONG]):
                    inside, place = h < v[OUTS] and w < v[OUTS + 1], image + h * v[Y + 1] + w * v[Y + 2]
                    write(scratch + v[WRITTEN] + entry, y + place if inside else scratch + v[DUMMY])
                    write(scratch + v[ADDED] + entry, v[RESIDUAL] + place if inside else scratch + v[DUMMY])
                    entry += PLACE

    return run


@functools.cache
def _panel(lanes: int) -> Callable[..., None]:
    """Makes ``(v, u, scratch, group, panel, count)``, which computes a panel of ``count`` tiles."""
    product, back, copy = pointer_call(), pointer_call(), copied(lanes)

    @compiled(lanes)
    def run(v, u, scratch, group, panel, count):
        is_last = panel == v[PANELS] - 1
        kernel, width = v[LAST_KERNEL] if is_last else v[KERNELS], v[WIDTH]
        if is_last:
            width = (v[OUTPUTS] - panel * width + lanes - 1) // lanes * lanes
        valid = min(width, v[OUTPUTS] - panel * v[WIDTH])
        filters = u + group * v[GROUP_BYTES] + panel * v[PANEL_BYTES]
        for point in range(v[POINTS_DOWN] * v[POINTS_ALONG]):
            for first in range(0, count, v[ROWS]):
                entry = (point * v[PADDED] + first) * PLACE
                product(
                    kernel, scratch + v[READ] + entry, 1, v[CHANNELS], filters, scratch + v[SUMS] + entry, 0, 0,
                    v[ZEROS], width,
                )  # fmt: skip
            filters += v[CHANNELS] * width * NUMBER
        shift = (group * v[OUTPUTS] + panel * v[WIDTH]) * NUMBER
        bias = v[ZEROS]
        if v[BIAS]:
            bias = scratch + v[BIASES]
            copy(0, bias, width)
            copy(v[BIAS] + shift, bias, valid)
        each = v[OUTPUTS_DOWN] * v[OUTPUTS_ALONG] * PLACE
        for i in range(count):
            others = scratch + v[ADDED] + i * each if v[RESIDUAL] else 0
            back(
                v[BACK], scratch + v[PRODUCTS] + i * v[WIDTH] * NUMBER, v[PRODUCT_POINT],
                scratch + v[WRITTEN] + i * each, others, shift, bias, valid, width // lanes,
            )  # fmt: skip

    return run


@functools.cache
def _unit(lanes: int) -> Callable[..., None]:
    """Makes ``(x, u, y, v, scratch, unit)``, which computes one unit of work."""
    inputs, tables, panels = _inputs(lanes), _tables(), _panel(lanes)

    @compiled(lanes)
    def run(x, u, y, v, scratch, unit):
        block, rest = unit % v[BLOCKS], unit // v[BLOCKS]
        part, group = rest % v[PANEL_PARTS], rest // v[PANEL_PARTS]
        first = block * v[TILES] // v[BLOCKS]
        count = (block + 1) * v[TILES] // v[BLOCKS] - first
        inputs(v, x + group * v[CHANNELS] * NUMBER, scratch, first, count)
        tables(v, y, scratch, first, count)
        for panel in range(part * v[PANELS] // v[PANEL_PARTS], (part + 1) * v[PANELS] // v[PANEL_PARTS]):
            panels(v, u, scratch, group, panel, count)

    return run


def winograd_last(lanes: int) -> Callable[..., None]:
    """Makes ``(data)``, which computes all units that no other thread takes.

    ``data`` begins as in :func:`tilewise.kernels.cpu.fused_fourier.kernel.convolve`, with the addresses of the image,
    the filters and the result. Then follow the numbers of :data:`~tilewise.kernels.cpu.channels_last.told.WINOGRAD`.
    """
    return over_units(_unit(lanes), "winograd_last", lanes)
