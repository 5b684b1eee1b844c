"""Filters in the order in which tiles of indirect convolution read them: group, panel, tap, channel, output channel.

A constant filter is brought into that order once. One that changes is so at each call, in training and where a gate
has scaled it. Vectors lie along output channels, which are gathered from memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.channels_last.loops import advanced, constant, looped, variable
from tilewise.kernels.cpu.channels_last.told import FILTERS as OF
from tilewise.kernels.cpu.units import over_units
from tilewise.kernels.cpu.vectors import NUMBER, Code, Values, compiled, intrinsic_of

__all__ = ["filters"]

CHANNELS, OUTPUTS, PANELS, WIDTH, KERNEL = (OF[name] for name in ("channels", "outputs", "panels", "width", "kernel"))
OUTPUT, CHANNEL, TAP = (OF[name] for name in ("output", "channel", "tap"))
PANEL_BYTES, GROUP_BYTES = (OF[name] for name in ("panel_bytes", "group_bytes"))


@functools.cache
def _gathered(lanes: int) -> Callable[..., None]:
    """Makes ``(source, apart, step, target, channels, valid)``, which writes one tap of a panel.

    Its rows are of ``channels``, ``step`` bytes apart. Each has ``valid`` outputs, ``apart`` bytes apart, and zeros
    until the end of its last vector.
    """
    size = NUMBER * lanes

    def emit(code: Code, arguments: Values) -> None:
        source, apart, step, target, channels, valid = arguments
        b = code.builder
        vectors = b.sdiv(b.add(valid, constant(lanes - 1)), constant(lanes))
        further = b.mul(apart, constant(lanes))
        row, written = variable(code, source), variable(code, target)
        with looped(code, channels):
            place, left = variable(code, b.load(row)), variable(code, valid)
            with looped(code, vectors):
                mask = masks.below(code, b.load(left))
                code.store(masks.gather(code, b.load(place), apart, mask), b.load(written))
                b.store(b.add(b.load(place), further), place)
                advanced(code, left, -lanes)
                advanced(code, written, size)
            b.store(b.add(b.load(row), step), row)

    return intrinsic_of(lanes, emit)


@functools.cache
def _unit(lanes: int) -> Callable[..., None]:
    """Makes ``(x, w, y, v, scratch, unit)``, which writes a panel of the filter at ``w`` into the memory at ``y``."""
    gathered = _gathered(lanes)

    @compiled(lanes)
    def run(x, w, y, v, scratch, unit):
        group, panel = unit // v[PANELS], unit % v[PANELS]
        first = panel * v[WIDTH]
        valid = min(v[WIDTH], v[OUTPUTS] - first)
        source = w + (group * v[OUTPUTS] + first) * v[OUTPUT]
        target = y + group * v[GROUP_BYTES] + panel * v[PANEL_BYTES]
        tap_bytes = (valid + lanes - 1) // lanes * lanes * NUMBER * v[CHANNELS]
        for i in range(v[KERNEL]):
            for j in range(v[KERNEL + 1]):
                for k in range(v[KERNEL + 2]):
                    there = source + i * v[TAP] + j * v[TAP + 1] + k * v[TAP + 2]
                    gathered(there, v[OUTPUT], v[CHANNEL], target, v[CHANNELS], valid)
                    target += tap_bytes

    return run


def filters(lanes: int) -> Callable[..., None]:
    """Makes ``(data)``, which writes all panels that no other thread takes.

    ``data`` begins as in :func:`tilewise.kernels.cpu.fused_fourier.kernel.convolve`, with the address of the filter as
    the second operand and that of the panels as the result. Then follow the numbers of
    :data:`~tilewise.kernels.cpu.channels_last.told.FILTERS`.
    """
    return over_units(_unit(lanes), "filters", lanes)
