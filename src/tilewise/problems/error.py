"""How far a result is from float64. This module is light: wisdom reads errors without torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Error"]


@dataclass(frozen=True, slots=True)
class Error:
    """Distance from float64: ``l2`` is |got - want| / |want|; ``spread`` is max |got - want| / s for each element.

    s is what the element would be if all of its terms were positive, such as the product of the operands' absolute
    values. ``spread`` shows an error beside an outlier, which the L2 norm hides. It is 1 where a result that reads
    nothing, as a stride beyond the kernel leaves some, is not exactly 0.

    >>> from tilewise.plan import Error
    >>> Error(l2=2e-7, spread=5e-7).l2 < 1e-5
    True
    """

    l2: float
    spread: float
