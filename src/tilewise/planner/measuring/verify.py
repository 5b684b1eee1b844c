"""Which error a plan may have: fp32's, or what torch's own choice has in the same precision."""

from __future__ import annotations

import math
from collections.abc import Callable

from tilewise.plan import Error
from tilewise.problems.base import Problem
from tilewise.problems.checks import LIMIT, floor_of, is_exact

__all__ = ["allowed", "error_limit"]


def error_limit(
    problem: Problem, asked: float | None, plans_error: Error, torchs_error: Callable[[], Error]
) -> tuple[float, float]:
    """The largest errors allowed for the problem's data types and precision, as :func:`allowed` has it."""
    return allowed(None if is_exact(problem) else floor_of(problem), asked, plans_error, torchs_error)


def allowed(
    floor: float | None, asked: float | None, plans_error: Error, torchs_error: Callable[[], Error]
) -> tuple[float, float]:
    """The largest L2 error and spread allowed: what was ``asked`` for, or by default what the type can do.

    The default is 1e-5 in fp32, where ``floor`` is ``None``; otherwise twice torch's own errors, and no less than
    ``floor``, the rounding of the type. ``torchs_error()`` measures them, which takes time: it is called only where
    ``plans_error`` is above ``floor``. TF32 rounds operands to 10 bits, so 1e-3 is allowed where torch happens to pick
    an fp32 engine.
    """
    if asked is not None:
        return asked, asked
    if floor is None:
        return LIMIT, LIMIT
    if plans_error.l2 <= floor and plans_error.spread <= floor:
        return floor, floor
    error = torchs_error()
    l2, spread = (2 * e if math.isfinite(e) else 0.0 for e in (error.l2, error.spread))
    return max(l2, floor), max(spread, floor)
