"""Copies between tensors and their phases: what lies at the same place modulo the strides, as channels of its own.

A convolution with strides is one without over as many times the channels (polyphase decomposition; Vaidyanathan 1993,
section 4.3). Phases are dense: of each channel, ``S_D * S_H * S_W`` follow each other. Place ``v`` of an axis is phase
``(v + before) % S`` at ``(v + before) // S``; what is beyond either end is zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["join_phases", "split_phases"]


@triton.jit(
    do_not_specialize=[
        "channels", "depth", "height", "width", "before_d", "before_h", "before_w", "planes", "lines", "columns",
        "s_c", "s_d", "s_h",
    ]
)  # fmt: skip
def split_phases(
    source, target, channels, depth, height, width, before_d, before_h, before_w, planes, lines, columns,
    s_n, s_c, s_d, s_h, s_w, S_D: tl.constexpr, S_H: tl.constexpr, S_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the phases of a tensor, each ``planes`` by ``lines`` by ``columns``.

    Neighbouring threads read neighbouring elements and write runs, as a phase along the width takes every ``S_W``-th
    element. Grid (images * channels * S_D * S_H, blocks).
    """
    phase = tl.program_id(0) % (S_D * S_H)
    which = tl.program_id(0) // (S_D * S_H)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = e % (columns * S_W)
    row = e // (columns * S_W)
    d = row // lines
    h = row % lines
    valid = d < planes
    from_d = d * S_D + phase // S_H - before_d
    from_h = h * S_H + phase % S_H - before_h
    from_w = column - before_w
    inside = valid & (from_d >= 0) & (from_d < depth) & (from_h >= 0) & (from_h < height)
    inside = inside & (from_w >= 0) & (from_w < width)
    base = source + (which // channels).to(tl.int64) * s_n + (which % channels).to(tl.int64) * s_c
    value = tl.load(base + (from_d * s_d + from_h * s_h + from_w * s_w), mask=inside, other=0.0)
    first = target + tl.program_id(0).to(tl.int64) * S_W * (planes * lines * columns)
    place = column % S_W * (planes * lines * columns) + row * columns + column // S_W
    tl.store(first + place, value, mask=valid)


@triton.jit(
    do_not_specialize=[
        "channels", "depth", "height", "width", "before_d", "before_h", "before_w", "planes", "lines", "columns",
        "s_c", "s_d", "s_h",
    ]
)  # fmt: skip
def join_phases(
    source, target, channels, depth, height, width, before_d, before_h, before_w, planes, lines, columns,
    s_n, s_c, s_d, s_h, s_w, S_D: tl.constexpr, S_H: tl.constexpr, S_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the tensor of ``depth`` by ``height`` by ``width`` elements whose phases are at ``source``.

    Grid (images * channels, blocks).
    """
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w = e % width
    row = e // width
    d = row // height
    h = row % height
    valid = d < depth
    at_d = d + before_d
    at_h = h + before_h
    at_w = w + before_w
    known = valid & (at_d >= 0) & (at_d < planes * S_D) & (at_h >= 0) & (at_h < lines * S_H)
    known = known & (at_w >= 0) & (at_w < columns * S_W)
    phase = (at_d % S_D * S_H + at_h % S_H) * S_W + at_w % S_W
    place = phase * (planes * lines * columns) + (at_d // S_D * lines + at_h // S_H) * columns + at_w // S_W
    first = source + tl.program_id(0).to(tl.int64) * (S_D * S_H * S_W) * (planes * lines * columns)
    value = tl.load(first + place, mask=known, other=0.0)
    image = (tl.program_id(0) // channels).to(tl.int64)
    base = target + image * s_n + (tl.program_id(0) % channels).to(tl.int64) * s_c
    tl.store(base + (d * s_d + h * s_h + w * s_w), value, mask=valid)
