"""Torch's own convolutions one after the other: the baseline of separable convolutions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tilewise.plan import Config
from tilewise.problems.activations import CONV_ACTIVATIONS, activate
from tilewise.problems.separable.problem import SeparableProblem
from tilewise.problems.separable.stages import channels_of, parted
from tilewise.solvers.base import Cost, Run
from tilewise.solvers.separable._separable import SeparableSolver

__all__ = ["AtenSeparable"]


class AtenSeparable(SeparableSolver):
    """``aten::convolution`` for each convolution, and its function in place behind it."""

    name, version = "aten_separable", 1
    own_output = True
    adds_residual = True
    activations = frozenset(CONV_ACTIVATIONS)
    baseline = True

    def unsupported(self, p: SeparableProblem) -> list[str]:
        """A reason for padding that differs by side, for which ATen copies the input, and for negative padding."""
        if any(axis.before != axis.after or axis.before < 0 for axis in p.axes):
            return ["ATen takes one non-negative padding per axis, the same before and after"]
        return []

    def configs(self, p: SeparableProblem) -> Iterable[Config]:
        """One empty config: torch chooses the algorithms."""
        return (Config(),)

    def hidden_workspace(self, p: SeparableProblem, c: Config) -> int:
        """Bytes of what lies between the convolutions, and of torch's copies of filters."""
        return self._between(p) + p.nbytes("w")

    def cost(self, p: SeparableProblem, c: Config) -> Cost:
        """The direct method's arithmetic; what lies between is written and read."""
        return Cost(p.flops, p.bytes, len(channels_of(p)), 0.5, apart=2 * self._between(p))

    def _between(self, p: SeparableProblem) -> int:
        """Bytes of the tensors between the convolutions."""
        into, outof = p.pixels
        return p.batch * p.channels * (into * p.expands + outof * p.projects) * p.torch_dtype("x").itemsize

    def bind(self, p: SeparableProblem, c: Config, *tensors: Any, **nothing: Any) -> Run:
        """A run of torch's operators into new tensors."""
        functions = p.functions

        def run(x: Tensor, w: Tensor, _: Any, __: Any, residual: Tensor | None = None) -> Tensor:
            value = x
            for number, (stage, function) in enumerate(zip(parted(p, w), functions, strict=True)):
                height, width = stage.axes
                value = torch.convolution(
                    value, stage.weight, stage.bias, (height.stride, width.stride), (height.before, width.before),
                    (height.dilation, width.dilation), False, (0, 0), stage.groups,
                )  # fmt: skip
                if residual is not None and number == len(functions) - 1:
                    value.add_(residual)
                activate(value, function)
            return value

        return run
