"""The search for operands' largest finite magnitudes, which give the scale of spectra in fp16 parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tilewise.solvers.common.buffers import Slot

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["PROGRAMS", "Searched", "collapsed", "launches"]

PROGRAMS = 512
"""Programs of the search, each giving one number: enough for all multiprocessors, few for one program to reduce."""
BLOCK = 4096
WARPS = 8
REDUCED = 1024


@dataclass(frozen=True, slots=True)
class Searched:
    """An operand to be searched: ``tensor``, which is tensor number ``source`` of a launch.

    ``partial`` and ``top`` are where the programs' numbers and the largest one go, in tensor number ``target``.
    """

    tensor: torch.Tensor
    source: int
    partial: Slot
    top: Slot
    target: int


def collapsed(sizes: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Sizes and strides of the same elements in as few dimensions as possible, the largest stride first.

    Each element is counted once: dimensions of stride 0 are left out.
    """
    merged: list[tuple[int, int]] = []
    moving = [(n, step) for n, step in zip(sizes, strides, strict=True) if n > 1 and step]
    for n, step in sorted(moving, key=lambda dimension: -dimension[1]):
        if merged and merged[-1][1] == n * step:
            merged[-1] = (merged[-1][0] * n, step)
        else:
            merged.append((n, step))
    return tuple(merged)


def launches(operands: Sequence[Searched]) -> list[Launch]:
    """The two kernels that search one operand, or two whose ``top`` slots are neighbours in one tensor."""
    from tilewise.kernels.triton.complex_gemm import largest
    from tilewise.kernels.triton.launch import Launch, Pointer
    from tilewise.kernels.triton.magnitude import magnitudes

    shapes = [collapsed(operand.tensor.shape, operand.tensor.stride()) for operand in operands]
    counts = [math.prod(n for n, _ in shape) for shape in shapes]
    programs = min(PROGRAMS, max(-(-count // BLOCK) for count in counts))
    both = (0, len(operands) - 1)
    scalars, dense = [], []
    for i in both:
        whole = ((1, 0),) * (4 - len(shapes[i])) + shapes[i]
        scalars += [counts[i], *(n for n, _ in whole[1:]), *(step for _, step in whole)]
        dense.append(shapes[i] in ((), ((counts[i], 1),)))
    partials = [Pointer(operands[i].target, operands[i].partial.offset, torch.int32) for i in both]
    top = Pointer(operands[0].target, operands[0].top.offset, torch.int32)
    sources = [Pointer(operands[i].source, 0, operands[i].tensor.dtype) for i in both]
    constants = {"A_DENSE": dense[0], "B_DENSE": dense[1], "BLOCK": BLOCK}
    return [
        Launch(magnitudes, (programs, len(operands), 1), (*sources, *partials), tuple(scalars), constants, WARPS, 1),
        Launch(largest, (len(operands), 1, 1), (*partials, top), (programs, programs), {"BLOCK": REDUCED}),
    ]
