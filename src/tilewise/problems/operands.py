"""Random tensors for a problem, laid out and aligned as it says. Parts take views of the whole's tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from tilewise.machine.device import torch_device
from tilewise.machine.turns import pause
from tilewise.problems.base import ALIGNMENT, Problem

__all__ = [
    "LOWERED",
    "OCTAVES",
    "Tensors",
    "described",
    "fill_constant",
    "make_bias",
    "make_operand",
    "make_operands",
    "make_residual",
    "make_result",
    "make_results",
    "plant_outlier",
]


class Tensors(NamedTuple):
    """All tensors of a problem: operands in the order of ``problem.operands``, and results.

    ``residual`` is the one that is added, where the problem has one.
    """

    operands: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]
    residual: torch.Tensor | None = None

    @property
    def all(self) -> tuple[torch.Tensor, ...]:
        """Operands and results, in this order."""
        return (*self.operands, *self.results)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.operands[0].device

    def call(self, bound: Callable[..., T], bias: torch.Tensor | None = None, *, new: bool = False) -> Callable[[], T]:
        """A function that calls ``bound`` with these tensors; with ``new`` the call allocates its results."""
        added = {} if self.residual is None else {"residual": self.residual}
        return functools.partial(bound, *self.operands, bias, *(() if new else self.results), **added)


T = TypeVar("T")

RESIDUAL_SEED = 1 << 20
"""What is added to the seed of a residual, so that its values are not those of an operand."""
OCTAVES, RARE, OUTLIER = 4.0, 1e-3, 10.0
"""Wide-range data has magnitudes from 2^-4 to 2^4, and one value in a thousand of 2^10."""
CONSTANT = 0.7
OUTLIERS = {"fp32": 14, "bf16": 14, "fp16": 12}
"""Powers of two by which a planted outlier is larger than the ordinary values beside it: fp16 ends at 2^16."""
LOWERED = {"fp32": 0, "bf16": 0, "fp16": -8}
"""The power of two by which ordinary wide-range values of each type are scaled. fp16 ends at 2^16: scaled down, sums of
products of outliers stay within."""


def make_operands(problem: Problem, seed: int = 0, *, wide: bool = False) -> tuple[torch.Tensor, ...]:
    """Operands in the order of ``problem.operands``: standard normal, or with ``wide`` of magnitudes over many octaves.

    Wide-range data holds a few values a thousand times the rest, next to which an FFT spreads its rounding.
    """
    device = torch_device(problem.device)
    generator = torch.Generator(device).manual_seed(seed)
    made = []
    for role in problem.operands:
        pause()
        made.append(make_operand(problem, role, generator, wide))
    return problem.arranged(tuple(made))


def make_operand(problem: Problem, role: str, generator: torch.Generator, wide: bool) -> torch.Tensor:
    """One operand filled from ``generator``, on its device."""
    tensor = _allocate(problem, role, generator.device)
    tensor.normal_(generator=generator)
    if wide:
        pause()
        octaves = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        octaves.uniform_(-OCTAVES, OCTAVES, generator=generator)
        octaves = torch.where(octaves > OCTAVES * (1 - 2 * RARE), OUTLIER, octaves)
        tensor.mul_(octaves.add_(LOWERED[problem.dtype]).exp2_().to(tensor.dtype))
    return tensor


def make_bias(problem: Problem, seed: int = 0) -> torch.Tensor | None:
    """A standard normal bias for the result's channels; ``None`` where the problem adds none."""
    if not problem.bias:
        return None
    generator = torch.Generator(torch_device(problem.device)).manual_seed(seed)
    result = problem.result
    bias = torch.empty(
        problem.shape(result)[problem.bias_dim], dtype=problem.torch_dtype(result), device=generator.device
    )
    return bias.normal_(generator=generator)


def make_residual(problem: Problem, seed: int = 0) -> torch.Tensor | None:
    """A standard normal residual that lies as the result does; ``None`` where the problem adds none."""
    if not problem.residual:
        return None
    generator = torch.Generator(torch_device(problem.device)).manual_seed(RESIDUAL_SEED + seed)
    return _allocate(problem, problem.result, generator.device).normal_(generator=generator)


def make_results(problem: Problem) -> tuple[torch.Tensor, ...]:
    """Result tensors full of NaN, so that an element nobody writes shows; of zeros where they are added to."""
    start = 0.0 if problem.accumulate else math.nan
    return tuple(_allocate(problem, role, torch_device(problem.device)).fill_(start) for role in problem.results)


def make_result(problem: Problem) -> torch.Tensor:
    """The one result of a problem that has one, as :func:`make_results` makes it."""
    (tensor,) = make_results(problem)
    return tensor


def described(problem: Problem) -> Tensors:
    """Tensors of a problem that have shapes and strides and no memory (device ``meta``), as examples to bind to."""
    meta = torch.device("meta")
    operands, results = (tuple(_allocate(problem, r, meta) for r in x) for x in (problem.operands, problem.results))
    return Tensors(operands, results)


def fill_constant(tensor: torch.Tensor) -> None:
    """Fill ``tensor`` with one value that takes all digits, so that sums of it are rounded."""
    tensor.fill_(CONSTANT)


def plant_outlier(problem: Problem, tensor: torch.Tensor) -> None:
    """Make one value in the middle of ``tensor`` larger than the others by a power of two that its type holds."""
    if tensor.numel():
        tensor[tuple(n // 2 for n in tensor.shape)] = 2.0 ** (OUTLIERS[problem.dtype] + LOWERED[problem.dtype])


def _allocate(problem: Problem, role: str, device: torch.device) -> torch.Tensor:
    """An empty tensor for ``role`` with the layout and just the alignment that the problem says."""
    shape, strides, dtype = problem.shape(role), problem.strides(role), problem.torch_dtype(role)
    offset = _offset(problem, role) // dtype.itemsize
    size = math.prod(shape)
    if problem.layout(role) == "view":
        size = shape[0] * strides[0]  # with the gap after the last row
    base = torch.empty(size + offset, dtype=dtype, device=device)
    return base.as_strided(shape, strides, offset)


def _offset(problem: Problem, role: str) -> int:
    """Bytes past a fully aligned address that leave just the alignment the problem promises."""
    align = problem.alignment_of(role)
    return 0 if align >= ALIGNMENT else align
