"""The update rules of Caffe's six solvers, each over whole lists of tensors at once.

Each rule gets ``gradients`` that are clipped, divided by ``iter_size`` and have the weight decay added. It returns the
tensors that are subtracted from the parameters, and may write over the gradients on the way. The learning rate is part
of what SGD and Nesterov keep in their histories, as in Caffe: when the rate changes, the momentum keeps what was
gathered at the old one.

A rule keeps one or two tensors of history for each parameter. ``histories[0]`` is the list that comes first in a
``solverstate``, ``histories[1]`` the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.frontends.caffe.errors import CaffeError

__all__ = ["RULES", "Constants", "Rule", "rule_of"]

Tensors = list[Tensor]


@dataclass(frozen=True)
class Constants:
    """The numbers of a solver's rule that stay the same in all iterations, named as in ``SolverParameter``."""

    momentum: float = 0.0
    momentum2: float = 0.999
    delta: float = 1e-8
    rms_decay: float = 0.99


@dataclass(frozen=True)
class Rule:
    """One solver: how many tensors of history it keeps for a parameter, and how it updates.

    ``update(gradients, histories, rate, iteration, constants)`` changes the histories in place and returns the
    updates. ``rate`` is the local one, with ``lr_mult`` in it, and ``iteration`` is 0 for the first.
    """

    name: str
    kept: int
    update: Callable[[Tensors, Sequence[Tensors], float, int, Constants], Tensors]
    takes_momentum: bool = True


def _sgd(
    gradients: Tensors, histories: Sequence[Tensors], rate: float, iteration: int, constants: Constants
) -> Tensors:
    """``h = momentum h + rate g``; the update is ``h``."""
    (history,) = histories
    torch._foreach_mul_(history, constants.momentum)
    torch._foreach_add_(history, gradients, alpha=rate)
    return list(history)


def _nesterov(
    gradients: Tensors, histories: Sequence[Tensors], rate: float, iteration: int, constants: Constants
) -> Tensors:
    """``h' = momentum h + rate g``; the update is ``(1 + momentum) h' - momentum h``.

    That equals ``momentum h' + rate g``, which needs no copy of ``h``.
    """
    (history,) = histories
    torch._foreach_mul_(gradients, rate)
    torch._foreach_mul_(history, constants.momentum)
    torch._foreach_add_(history, gradients)
    torch._foreach_add_(gradients, history, alpha=constants.momentum)
    return gradients


def _adagrad(
    gradients: Tensors, histories: Sequence[Tensors], rate: float, iteration: int, constants: Constants
) -> Tensors:
    """``h += g^2``; the update is ``rate g / (sqrt(h) + delta)`` (Duchi et al., 2011)."""
    (squares,) = histories
    torch._foreach_addcmul_(squares, gradients, gradients)
    _divide_by_root(gradients, squares, constants.delta)
    torch._foreach_mul_(gradients, rate)
    return gradients


def _rmsprop(
    gradients: Tensors, histories: Sequence[Tensors], rate: float, iteration: int, constants: Constants
) -> Tensors:
    """``h = d h + (1 - d) g^2``; the update is ``rate g / (sqrt(h) + delta)`` (Tieleman and Hinton, 2012)."""
    (squares,) = histories
    torch._foreach_mul_(squares, constants.rms_decay)
    torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - constants.rms_decay)
    _divide_by_root(gradients, squares, constants.delta)
    torch._foreach_mul_(gradients, rate)
    return gradients


def _adadelta(
    gradients: Tensors, histories: Sequence[Tensors], rate: float, iteration: int, constants: Constants
) -> Tensors:
    """``h = m h + (1 - m) g^2``, ``u = g sqrt((s + delta) / (h + delta))``, ``s = m s + (1 - m) u^2``.

    The update is ``rate u`` (Zeiler, 2012, algorithm 1); the decay ``m`` is the solver's ``momentum``.
    """
    squares, steps = histories
    decay, delta = constants.momentum, constants.delta
    torch._foreach_mul_(squares, decay)
    torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - decay)
    ratio = torch._foreach_add(steps, delta)
    torch._foreach_div_(ratio, torch._foreach_add(squares, delta))
    torch._foreach_sqrt_(ratio)
    torch._foreach_mul_(gradients, ratio)
    torch._foreach_mul_(steps, decay)
    torch._foreach_addcmul_(steps, gradients, gradients, value=1.0 - decay)
    torch._foreach_mul_(gradients, rate)
    return gradients


def _adam(
    gradients: Tensors, histories: Sequence[Tensors], rate: float, iteration: int, constants: Constants
) -> Tensors:
    """``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``; the update is ``rate c m / (sqrt(v) + delta)``.

    ``c = sqrt(1 - b2^t) / (1 - b1^t)`` with ``t = iteration + 1`` (Kingma and Ba, 2015, the order of section 2's last
    paragraph). ``b1`` is the solver's ``momentum`` and ``b2`` its ``momentum2``.
    """
    means, squares = histories
    first, second, t = constants.momentum, constants.momentum2, iteration + 1
    torch._foreach_mul_(means, first)
    torch._foreach_add_(means, gradients, alpha=1.0 - first)
    torch._foreach_mul_(squares, second)
    torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - second)
    torch._foreach_copy_(gradients, means)
    _divide_by_root(gradients, squares, constants.delta)
    torch._foreach_mul_(gradients, rate * math.sqrt(1.0 - second**t) / (1.0 - first**t))
    return gradients


def _divide_by_root(values: Tensors, squares: Tensors, delta: float) -> None:
    """``values / (sqrt(squares) + delta)``, in place of the values."""
    roots = torch._foreach_sqrt(squares)
    torch._foreach_add_(roots, delta)
    torch._foreach_div_(values, roots)


RULES = {
    rule.name: rule
    for rule in (
        Rule("SGD", 1, _sgd),
        Rule("Nesterov", 1, _nesterov),
        Rule("AdaGrad", 1, _adagrad, takes_momentum=False),
        Rule("RMSProp", 1, _rmsprop, takes_momentum=False),
        Rule("AdaDelta", 2, _adadelta),
        Rule("Adam", 2, _adam),
    )
}
"""Caffe's solvers by the ``type`` of a solver's file."""


def rule_of(solver: Any) -> tuple[Rule, Constants]:
    """The rule and the constants that a ``SolverParameter`` asks for.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` for a ``type`` that Caffe does not have and for
    constants with which a rule makes no sense.
    """
    if solver.type not in RULES:
        raise CaffeError(f"type: {solver.type!r} is no solver; {', '.join(RULES)} would do")
    rule = RULES[solver.type]
    constants = Constants(solver.momentum, solver.momentum2, solver.delta, solver.rms_decay)
    if constants.momentum and not rule.takes_momentum:
        raise CaffeError(f"momentum: {constants.momentum:g} with type: {rule.name!r}, which has none; 0 would do")
    # Momentum of 1 and above never forgets; in these three rules it also divides by zero or takes roots below it.
    averages = {"Adam": ("momentum", "momentum2"), "AdaDelta": ("momentum",), "RMSProp": ("rms_decay",)}
    for name in averages.get(rule.name, ()):
        if not 0.0 <= getattr(constants, name) < 1.0:
            value = getattr(constants, name)
            raise CaffeError(f"{name}: {value:g} with type: {rule.name!r}; a number from 0 to below 1 would do")
    return rule, constants
