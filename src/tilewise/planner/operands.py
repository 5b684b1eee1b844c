"""Random tensors for a problem, laid out and aligned as it says; parts take views of the whole's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tilewise.device import torch_device
from tilewise.problem import ALIGNMENT, ConvProblem, Range, dense_strides

__all__ = ["LOWERED", "Tensors", "make_bias", "make_operand", "make_operands", "make_result", "narrow"]

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Both operands, in the order of ``problem.operands``, and the result."""

OCTAVES, RARE, OUTLIER = 4.0, 1e-3, 10.0
"""Wide-range data: magnitudes over 2^-4 to 2^4, one in a thousand 2^10."""
LOWERED = {"fp32": 0, "bf16": 0, "fp16": -8}
"""The power of two of its ordinary values. fp16 ends at 2^16: scaled down, sums of products of outliers stay within."""


def make_operands(problem: ConvProblem, seed: int = 0, *, wide: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands in the order of ``problem.operands``: standard normal, or with ``wide`` of magnitudes over many octaves.

    Wide-range data holds a few values a thousand times the rest, next to which an FFT spreads its rounding.
    """
    device = torch_device(problem.device)
    generator = torch.Generator(device).manual_seed(seed)
    first, second = (make_operand(problem, role, generator, wide) for role in problem.operands)
    return first, second


def make_operand(problem: ConvProblem, role: str, generator: torch.Generator, wide: bool) -> torch.Tensor:
    """One operand filled from ``generator``, on its device."""
    tensor = _allocate(problem, role, generator.device)
    tensor.normal_(generator=generator)
    if wide:
        octaves = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        octaves.uniform_(-OCTAVES, OCTAVES, generator=generator)
        octaves = torch.where(octaves > OCTAVES * (1 - 2 * RARE), OUTLIER, octaves)
        tensor.mul_(octaves.add_(LOWERED[problem.dtype]).exp2_().to(tensor.dtype))
    return tensor


def make_bias(problem: ConvProblem, seed: int = 0) -> torch.Tensor | None:
    """What is added over the result's channels, standard normal; ``None`` where nothing is."""
    if not problem.bias:
        return None
    generator = torch.Generator(torch_device(problem.device)).manual_seed(seed)
    bias = torch.empty(
        problem.shape(problem.result)[1], dtype=problem.torch_dtype(problem.result), device=generator.device
    )
    return bias.normal_(generator=generator)


def make_result(problem: ConvProblem) -> torch.Tensor:
    """A result tensor full of NaN, so that an element nobody writes shows."""
    tensor = _allocate(problem, problem.result, torch_device(problem.device))
    return tensor.fill_(0.0 if problem.accumulate else math.nan)


def _allocate(problem: ConvProblem, role: str, device: torch.device) -> torch.Tensor:
    shape, layout = problem.shape(role), problem.layout(role)
    dtype = problem.torch_dtype(role)
    offset = _offset(problem, role) // dtype.itemsize
    if layout == "view":
        # Rows of a larger tensor: dense along the last dimension, gaps between rows.
        wider = (*shape[:-1], shape[-1] + max(8, ALIGNMENT // dtype.itemsize))
        strides, size = dense_strides(wider, "contiguous"), math.prod(wider)
    else:
        strides, size = dense_strides(shape, layout), math.prod(shape)
    base = torch.empty(size + offset, dtype=dtype, device=device)
    return base.as_strided(shape, strides, offset)


def _offset(problem: ConvProblem, role: str) -> int:
    """Bytes past a fully aligned address that leave just the alignment the problem promises."""
    align = problem.alignment[("x", "w", "y").index(role)]
    return 0 if align >= ALIGNMENT else align


def narrow(tensor: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor:
    """The part of ``tensor`` that ``ranges`` name."""
    for r in ranges:
        tensor = tensor.narrow(r.dim, r.start, r.length)
    return tensor
