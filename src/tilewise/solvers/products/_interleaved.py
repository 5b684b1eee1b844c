"""Groups side by side in the lanes of vectors: how many may be, and their filters."""

from __future__ import annotations

import torch

from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.common.channels_last import SHAPES

__all__ = ["ROWS", "counts", "in_lanes", "why_not"]

ROWS = SHAPES | {16: SHAPES[16] | {4: 6}}
"""As :data:`SHAPES`, with a register more for what is read of an image: it is in no instruction's operand in memory."""
MOST = 32
"""Most vectors of the input channels that are interleaved, since their shuffles are unrolled."""


def why_not(p: ConvProblem, lanes: int, count: int) -> str:
    """Why ``count`` groups of ``p`` cannot be side by side in vectors of ``lanes`` lanes; empty where they can."""
    if count < 2 or lanes % count:
        return f"at least 2 groups that divide {lanes} lanes would do"
    if count >= 2 * p.groups:
        return f"fewer than twice the {p.groups} groups would do"
    if p.dims > 2 or (p.axes[-1].kernel > 1 and p.axes[-1].dilation > 1):
        return "1-D or 2-D without dilation along the width would do"
    if count * (p.in_channels // p.groups) > MOST * lanes:
        return f"up to {MOST * lanes} input channels side by side would do"
    return ""


def counts(p: ConvProblem, lanes: int) -> dict[int, int]:
    """Numbers of groups that may be side by side and pay, and for each the vectors of their outputs.

    One vector alone waits for what is read of the image, so that of more than one number those of several vectors pay.
    """
    outputs = p.out_channels // p.groups
    powers = [1 << i for i in range(1, lanes.bit_length())]
    found = {count: -(-count * outputs // lanes) for count in powers if not why_not(p, lanes, count)}
    found = {count: vectors for count, vectors in found.items() if vectors <= max(ROWS[lanes])}
    several = {count: vectors for count, vectors in found.items() if vectors > 1}
    return several or dict(list(found.items())[-1:])


def in_lanes(p: ConvProblem, interleaved: int, width: int, weight: torch.Tensor, flat: torch.Tensor) -> None:
    """Write a filter to ``flat`` as tiles of several groups read it: groups, taps, channel, and lines of ``width``.

    In a line output j of group g has the place ``j * interleaved + g``. ``flat`` is zero before.
    """
    channels, outputs = p.in_channels // p.groups, p.out_channels // p.groups
    strides = [1] * p.dims
    step = channels * width
    for i in reversed(range(p.dims)):
        strides[i], step = step, step * p.axes[i].kernel
    whole = p.groups // interleaved
    for first, sets, groups in ((0, whole, interleaved), (whole * interleaved, 1, p.groups - whole * interleaved)):
        if not sets or not groups:
            continue
        target = flat.as_strided(
            (sets, groups, outputs, channels, *(axis.kernel for axis in p.axes)),
            (step, 1, interleaved, width, *strides), flat.storage_offset() + first // interleaved * step,
        )  # fmt: skip
        begin = first * outputs
        target.copy_(weight[begin : begin + sets * groups * outputs].unflatten(0, (sets, groups, outputs)))
