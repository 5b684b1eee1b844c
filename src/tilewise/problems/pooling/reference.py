"""The value of pooling in float64: window element by window element, with all results at once.

It takes the elements in torch's order. Of equal maxima the first one counts, and of NaNs the last one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import Protocol

import torch

from tilewise.machine.turns import pause
from tilewise.problems.pooling.key import Pooling

__all__ = ["reference"]


class Pooled(Pooling, Protocol):
    """A pooling problem as far as its value depends on it."""

    @property
    def pooled_space(self) -> tuple[int, ...]: ...

    def counts(self, axis: int) -> list[int]:
        """The factors of divisors along an axis."""
        ...


Slices = tuple[slice | EllipsisType, ...]


def reference(p: Pooled, operands: Sequence[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """y, and for training dx, in float64."""
    x, *dy = (t.double() for t in operands)
    y, index = (_maxima if p.op == "max" else _averages)(p, _bordered(p, x), _bordered(p, torch.ones_like(x[:1, :1])))
    if not dy:
        return y
    wide = torch.zeros_like(_bordered(p, x))
    share = dy[0] if p.op == "max" else dy[0] / _divisors(p, x.device)
    for number, place in _elements(p):
        wide[place] += share if index is None else torch.where(index == number, share, 0.0)
    for axis, (before, n) in enumerate(zip(p.padding, p.space, strict=True), 2):
        wide = wide.narrow(axis, before, n)
    return y, wide.contiguous()


def _bordered(p: Pooled, x: torch.Tensor) -> torch.Tensor:
    """``x`` with zeros around it wherever windows reach."""
    wide = []
    sizes = (p.space, p.kernel, p.stride, p.padding, p.dilation, p.pooled_space)
    for extent, kernel, stride, padding, dilation, results in reversed(list(zip(*sizes, strict=True))):
        wide += [padding, max(0, (results - 1) * stride + dilation * (kernel - 1) + 1 - padding - extent)]
    return torch.nn.functional.pad(x, wide)


def _elements(p: Pooled) -> Iterator[tuple[int, Slices]]:
    """The elements of a window in order: the number of each, and where it lies in all windows."""
    for number, element in enumerate(itertools.product(*(range(k) for k in p.kernel))):
        pause()
        axes = zip(element, p.stride, p.dilation, p.pooled_space, strict=True)
        slices = [slice(k * dilation, k * dilation + (n - 1) * stride + 1, stride) for k, stride, dilation, n in axes]
        yield number, (..., *slices)


def _maxima(p: Pooled, x: torch.Tensor, inside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The maxima, and which element of its window each one is."""
    best = torch.full((p.batch, p.channels, *p.pooled_space), -math.inf, dtype=torch.float64, device=x.device)
    index = torch.full(best.shape, -1, dtype=torch.int64, device=x.device)
    for number, place in _elements(p):
        value = x[place]
        better = (inside[place] > 0) & ((value > best) | value.isnan() | (index < 0))
        best, index = torch.where(better, value, best), torch.where(better, number, index)
    return best, index


def _averages(p: Pooled, x: torch.Tensor, inside: torch.Tensor) -> tuple[torch.Tensor, None]:
    """The averages."""
    total = torch.zeros((p.batch, p.channels, *p.pooled_space), dtype=torch.float64, device=x.device)
    for _, place in _elements(p):
        total = total + x[place]
    return total / _divisors(p, x.device), None


def _divisors(p: Pooled, device: torch.device) -> torch.Tensor:
    """What the sum of each window is divided by, as (1, 1, *results)."""
    dims = len(p.space)
    product = torch.full((1,) * (2 + dims), float(p.divisor or 1), dtype=torch.float64, device=device)
    for axis in range(dims):
        factors = torch.tensor(p.counts(axis), dtype=torch.float64, device=device)
        product = product * factors.view(-1, *[1] * (dims - 1 - axis))
    return product
