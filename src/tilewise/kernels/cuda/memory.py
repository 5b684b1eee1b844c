"""What a kernel is bound to of its tensors: shapes, strides and alignment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["MOST_STRIDE", "REALS", "Leading", "Memory", "constants", "leading"]

REALS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Numbers by which ``memory.cu`` knows the types of real data."""
ALIGNMENT = 16
"""Bytes; more than the widest access is not asked about."""
MOST_PLANES = 2**31 - 1
MOST_STRIDE = 2**31 - 1
"""Elements between neighbours inside a plane or a signal; between planes there is no bound."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Shape, strides in elements, dtype, and the bytes (at most 16) to which the address is aligned."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    alignment: int = ALIGNMENT

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Memory:
        """That of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, math.gcd(tensor.data_ptr(), ALIGNMENT))


@dataclass(frozen=True, slots=True)
class Leading:
    """Two dimensions that count planes: ``outer`` and ``inner`` hold their stride in each tensor."""

    count: int
    inner_count: int
    outer: tuple[int, ...]
    inner: tuple[int, ...]


def leading(shape: Sequence[int], *strides: Sequence[int]) -> Leading:
    """The leading dimensions of tensors as at most two; those that lie one inside the other in each of them join.

    ``ValueError`` where more than two remain, or for more planes than a kernel counts.
    """
    count = math.prod(shape)
    if count > MOST_PLANES:
        raise ValueError(f"{count} planes in {tuple(shape)}: at most {MOST_PLANES}")
    found: list[tuple[int, tuple[int, ...]]] = []
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        if found and all(before == size * step for before, step in zip(found[-1][1], steps, strict=True)):
            found[-1] = (found[-1][0] * size, tuple(steps))
        else:
            found.append((size, tuple(steps)))
    if len(found) > 2:
        raise ValueError(f"leading dimensions {tuple(shape)} with strides {strides} do not join into two")
    none = (0,) * len(strides)
    outer, inner = [(1, none)] * (2 - len(found)) + found
    return Leading(count, inner[0], outer[1], inner[1])


def constants(values: Mapping[str, int]) -> str:
    """C++ definitions of ``values``."""
    return "\n".join(f"constexpr int {name} = {int(value)};" for name, value in values.items())
