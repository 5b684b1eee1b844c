"""One step of a solver over all of a net's parameters: clip, divide by ``iter_size``, decay, update, subtract."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.training.ranks import ALONE, Ranks
from tilewise.frontends.caffe.training.rules import rule_of
from tilewise.frontends.caffe.weights import Learnable

__all__ = ["Clipped", "Update"]

REGULARIZERS = ("L2", "L1")


@dataclass(frozen=True)
class Clipped:
    """Gradients were longer than ``clip_gradients`` and were scaled down by ``factor``."""

    norm: float
    limit: float
    factor: float


@dataclass
class Group:
    """Parameters that have both factors in common, so that one call updates all of them."""

    lr_mult: float
    decay_mult: float
    parameters: list[Tensor] = field(default_factory=list)
    histories: list[list[Tensor]] = field(default_factory=list)


class Update:
    """The state and the steps of one of Caffe's six solvers.

    ``solver`` has the fields of ``SolverParameter``, ``learnable`` are the net's parameters in Caffe's order.
    :attr:`histories` is the list of history tensors in the order of a ``solverstate``: one for each parameter, and for
    AdaDelta and Adam a second one for each after all of the first. A parameter with ``lr_mult`` 0 is left alone and
    keeps a history of zeros.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` for a solver that makes no sense.

    ::

        update = Update(read_solver("solver.prototxt"), net.learnable)
        update.clear()
        net()
        net.loss.backward()
        update.step(rate=0.01, iteration=0)
    """

    def __init__(self, solver: Any, learnable: Iterable[Learnable], ranks: Ranks = ALONE) -> None:
        self.rule, self.constants = rule_of(solver)
        if solver.regularization_type not in REGULARIZERS:
            kind = solver.regularization_type
            raise CaffeError(f"regularization_type: {kind!r} is not known; {' or '.join(REGULARIZERS)} would do")
        if solver.iter_size < 1:
            raise CaffeError(f"iter_size: {solver.iter_size}; 1 or more would do")
        self.iter_size, self.weight_decay = int(solver.iter_size), float(solver.weight_decay)
        self.clip_gradients, self.regularization_type = float(solver.clip_gradients), solver.regularization_type
        self.learnable, self.ranks = list(learnable), ranks
        parameters = [each.parameter for each in self.learnable]
        self.histories = [
            torch.zeros_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
            for _ in range(self.rule.kept)
            for parameter in parameters
        ]
        self._groups = self._grouped()

    def _grouped(self) -> list[Group]:
        """The parameters that are updated, by their factors, with their histories."""
        groups: dict[tuple[object, ...], Group] = {}
        for number, each in enumerate(self.learnable):
            if not each.lr_mult:
                continue
            key = (each.lr_mult, each.decay_mult, each.parameter.device, each.parameter.dtype)
            group = groups.get(key)
            if group is None:
                group = groups[key] = Group(
                    each.lr_mult, each.decay_mult, histories=[[] for _ in range(self.rule.kept)]
                )
            group.parameters.append(each.parameter)
            for kept, history in enumerate(group.histories):
                history.append(self.histories[kept * len(self.learnable) + number])
        return list(groups.values())

    def clear(self) -> None:
        """Forget all gradients. Call it before the first backward pass of each iteration."""
        for each in self.learnable:
            each.parameter.grad = None

    @torch.no_grad()
    def step(self, rate: float, iteration: int) -> Clipped | None:
        """Update all parameters from the gradients that ``iter_size`` backward passes have summed.

        ``rate`` is the learning rate of ``iteration``, which is 0 for the first. The order is Caffe's: gradients are
        averaged over ranks, clipped by their common L2 norm, then divided by ``iter_size``, then the weight decay is
        added, and the rule makes updates of them. It writes over the gradients. Returns what clipping did, where it
        did.
        """
        gradients = [self._gradients(group) for group in self._groups]
        everything = [gradient for group in gradients for gradient in group]
        self.ranks.average(everything)
        clipped = self._clip(everything)
        for group, own in zip(self._groups, gradients, strict=True):
            if self.iter_size != 1:
                torch._foreach_mul_(own, 1.0 / self.iter_size)
            self._decay(own, group)
            updates = self.rule.update(own, group.histories, rate * group.lr_mult, iteration, self.constants)
            torch._foreach_sub_(group.parameters, updates)
        return clipped

    def _gradients(self, group: Group) -> list[Tensor]:
        """The gradients of a group; zeros where no backward pass reached a parameter, since it may still decay."""
        for parameter in group.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in group.parameters if parameter.grad is not None]

    def _clip(self, gradients: Sequence[Tensor]) -> Clipped | None:
        """Scale all gradients down to the limit where their common L2 norm is above it."""
        if self.clip_gradients < 0 or not gradients:
            return None
        norms = [norm.to(gradients[0].device) for norm in torch._foreach_norm(list(gradients))]
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        if not norm > self.clip_gradients:
            return None
        factor = self.clip_gradients / norm
        torch._foreach_mul_(list(gradients), factor)
        return Clipped(norm, self.clip_gradients, factor)

    def _decay(self, gradients: list[Tensor], group: Group) -> None:
        """Add the gradient of the regularisation: the parameter itself (L2) or its sign (L1)."""
        decay = self.weight_decay * group.decay_mult
        if not decay:
            return
        pull = group.parameters if self.regularization_type == "L2" else torch._foreach_sign(group.parameters)
        torch._foreach_add_(gradients, pull, alpha=decay)
