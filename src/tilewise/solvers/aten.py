"""What torch does by itself, with its benchmark mode: the baseline of every plan."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewise.plan import Config
from tilewise.problem import ConvProblem, Pass, dense_strides
from tilewise.solvers.base import Cost, Run, Solver


class Aten(Solver):
    """``aten::convolution`` and ``aten::convolution_backward``."""

    name, version = "aten", 2
    own_output = True
    adds_bias = True
    baseline = True

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Asymmetric padding, which ATen pads by a copy of its own, and crops."""
        if any(axis.before != axis.after or axis.before < 0 for axis in p.axes):
            return ["ATen takes one non-negative padding per axis, the same before and after"]
        return []

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """One: torch chooses."""
        return (Config(),)

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """The direct method."""
        return Cost(p.flops, p.bytes, efficiency=0.7)

    def is_deterministic(self, p: ConvProblem, c: Config) -> bool:
        """cuDNN's backward engines may use atomics unless torch is told otherwise."""
        return p.device_type == "cpu" or p.pass_ is Pass.FPROP or torch.are_deterministic_algorithms_enabled()

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """``run`` calls the operator with torch's flags as they are."""
        options = ([x.stride for x in p.axes], [x.before for x in p.axes], [x.dilation for x in p.axes])
        zeros, groups = [0] * p.dims, p.groups
        if p.pass_ is Pass.FPROP or p.bias:
            convolution = torch.convolution  # less host time than the operator object
            transposed = p.pass_ is Pass.DGRAD  # with a bias a layer of its own, not a gradient
            extra = [
                x.size + x.before + x.after - (x.out - 1) * x.stride - x.reach if transposed else 0 for x in p.axes
            ]

            def forward(
                x: torch.Tensor,
                w: torch.Tensor,
                _: torch.Tensor | None,
                __: torch.Tensor | None,
                bias: torch.Tensor | None = None,
            ) -> torch.Tensor:
                y: torch.Tensor = convolution(x, w, bias, *options, transposed, extra, groups)
                return y

            return forward
        backward_of = torch.ops.aten.convolution_backward.default
        if p.pass_ is Pass.DGRAD:
            stand_in = _stand_in(p, "x", a)

            def backward(
                dy: torch.Tensor, w: torch.Tensor, _: torch.Tensor | None, __: torch.Tensor | None
            ) -> torch.Tensor:
                dx: torch.Tensor
                dx, _, _ = backward_of(dy, stand_in, w, None, *options, False, zeros, groups, [True, False, False])
                return dx

            return backward
        weight = _stand_in(p, "w", a)

        def gradient(
            x: torch.Tensor, dy: torch.Tensor, _: torch.Tensor | None, __: torch.Tensor | None
        ) -> torch.Tensor:
            dw: torch.Tensor
            _, dw, _ = backward_of(dy, x, weight, None, *options, False, zeros, groups, [False, True, False])
            return dw

        return gradient


def _stand_in(p: ConvProblem, role: str, like: torch.Tensor) -> torch.Tensor:
    """A tensor that the operator asks for and does not read, of the shape and layout from which it goes by.

    On a CPU pages that nobody touches take no memory, and one of other strides would be copied. On a GPU only a layout
    that the other operand does not have must be there.
    """
    shape, layout = p.shape(role), p.layout(role)
    other = p.layout("w" if role == "x" else "x")
    if p.device_type == "cuda" and not (layout == "channels_last" != other):
        return like.new_empty(()).expand(shape)
    return like.new_empty_strided(shape, dense_strides(shape, layout))
