"""Local response normalization and its gradient in float64, by their formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.machine.turns import pause
from tilewise.problems.lrn.key import Lrn

__all__ = ["reference", "reference_and_scales", "windows"]

Tensors = tuple[Tensor, ...]


def windows(t: Tensor, before: int, after: int) -> Tensor:
    """Sums of ``t`` over ``before`` channels before each one, itself, and ``after`` behind it; none lie outside."""
    channels = t.shape[1]
    total = t.clone()
    for distance in range(1, min(before, channels - 1) + 1):
        total[:, distance:] += t[:, :-distance]
    for distance in range(1, min(after, channels - 1) + 1):
        total[:, :-distance] += t[:, distance:]
    return total


def reference(p: Lrn, operands: Tensors) -> Tensors:
    """All results of ``p`` in float64: ``y``, and of training ``dx``."""
    return tuple(value for value, _ in reference_and_scales(p, operands))


@torch.no_grad()
def reference_and_scales(p: Lrn, operands: Tensors) -> tuple[tuple[Tensor, Tensor], ...]:
    """Each result in float64, and beside it the sum of the magnitudes of its terms.

    With ``d = k + alpha / size * windows(x^2)`` the result is ``y = x d^-beta``. A channel's ``dx`` has the term
    ``dy d^-beta``, and ``-2 alpha beta / size x`` times the sum of ``dy x d^(-beta - 1)`` over all channels whose
    windows it is in.
    """
    x = operands[0].to(torch.float64)
    before, after = p.size // 2, (p.size - 1) // 2
    d = p.k + p.alpha / p.size * windows(x * x, before, after)
    pause()
    power = d.pow(-p.beta)
    y = x * power
    if p.task == "inference":
        return ((y, y.abs()),)
    dy = operands[1].to(torch.float64)
    pause()
    first, terms, factor = dy * power, dy * y / d, 2 * p.alpha * p.beta / p.size * x
    pause()
    dx = first - factor * windows(terms, after, before)
    scale = first.abs() + factor.abs() * windows(terms.abs(), after, before)
    return (y, y.abs()), (dx, scale)
