"""Learning-rate policies of Caffe's solvers: the rate of an iteration, by the ``lr_policy`` of a solver's file."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tilewise.frontends.caffe.errors import CaffeError

__all__ = ["POLICIES", "check_policy", "rate", "step_reached"]


def rate(solver: Any, iteration: int, current_step: int = 0) -> float:
    """The learning rate of ``iteration`` (0 for the first), before a parameter's own ``lr_mult``.

    ``solver`` has the fields of ``SolverParameter``. ``current_step`` counts the values of ``stepvalue`` that have been
    reached, and only ``multistep`` uses it; :func:`step_reached` counts it. Raises
    :class:`~tilewise.frontends.caffe.errors.CaffeError` for a policy that Caffe does not have.

    The policies, with ``i`` for the iteration:

    ============= ==================================================
    ``fixed``     ``base_lr``
    ``step``      ``base_lr * gamma ** floor(i / stepsize)``
    ``exp``       ``base_lr * gamma ** i``
    ``inv``       ``base_lr * (1 + gamma * i) ** -power``
    ``multistep`` ``base_lr * gamma ** current_step``
    ``poly``      ``base_lr * (1 - i / max_iter) ** power``
    ``sigmoid``   ``base_lr / (1 + exp(-gamma * (i - stepsize)))``
    ============= ==================================================

    ``rate(solver, 500)`` is 0.001 with ``base_lr: 0.01 lr_policy: "step" gamma: 0.1 stepsize: 400``.
    """
    check_policy(solver)
    return POLICIES[solver.lr_policy](solver, iteration, current_step)


def step_reached(solver: Any, iteration: int, current_step: int) -> int:
    """``current_step`` as it is once ``iteration`` begins: at most one further value of ``stepvalue`` is reached."""
    values = solver.stepvalue
    reached = solver.lr_policy == "multistep" and current_step < len(values) and iteration >= values[current_step]
    return current_step + 1 if reached else current_step


def check_policy(solver: Any) -> None:
    """Raise ``CaffeError`` for an ``lr_policy`` that is unknown, or whose own fields make no sense."""
    policy = solver.lr_policy
    if policy not in POLICIES:
        raise CaffeError(f"lr_policy: {policy!r} is not known; {', '.join(POLICIES)} would do")
    if policy == "step" and solver.stepsize <= 0:
        raise CaffeError(f'lr_policy: "step" with stepsize: {solver.stepsize}; a stepsize of 1 or more would do')
    if policy == "poly" and solver.max_iter <= 0:
        raise CaffeError(f'lr_policy: "poly" with max_iter: {solver.max_iter}; a max_iter of 1 or more would do')
    values = list(solver.stepvalue)
    if policy == "multistep" and values != sorted(values):
        raise CaffeError(f'lr_policy: "multistep" with stepvalue: {values}; values in ascending order would do')


def _sigmoid(exponent: float) -> float:
    """1 / (1 + exp(-exponent)), without overflow."""
    if exponent >= 0:
        return 1.0 / (1.0 + math.exp(-exponent))
    grown = math.exp(exponent)
    return grown / (1.0 + grown)


POLICIES: dict[str, Callable[[Any, int, int], float]] = {
    "fixed": lambda solver, i, step: float(solver.base_lr),
    "step": lambda solver, i, step: float(solver.base_lr * solver.gamma ** (i // solver.stepsize)),
    "exp": lambda solver, i, step: float(solver.base_lr * solver.gamma**i),
    "inv": lambda solver, i, step: float(solver.base_lr * (1.0 + solver.gamma * i) ** -solver.power),
    "multistep": lambda solver, i, step: float(solver.base_lr * solver.gamma**step),
    # Past max_iter Caffe's rate is not a number; it never trains there, but a net that is run once more asks.
    "poly": lambda solver, i, step: float(solver.base_lr * max(0.0, 1.0 - i / solver.max_iter) ** solver.power),
    "sigmoid": lambda solver, i, step: solver.base_lr * _sigmoid(solver.gamma * (i - solver.stepsize)),
}
"""How each policy computes the rate of iteration ``i``."""
