"""Torch's own convolution in its benchmark mode: the baseline that every plan is measured against."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tilewise.plan import Config
from tilewise.problems.base import dense_strides
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost, Run
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.vendor._warm import search_on_few


class Aten(ConvSolver):
    """``aten::convolution`` and ``aten::convolution_backward``."""

    name, version = "aten", 4
    own_output = True
    adds_bias = True
    baseline = True

    def unsupported(self, p: ConvProblem) -> list[str]:
        """A reason for padding that differs by side, for which ATen copies the input, and for negative padding."""
        if any(axis.before != axis.after or axis.before < 0 for axis in p.axes):
            return ["ATen takes one non-negative padding per axis, the same before and after"]
        return []

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """One empty config: torch chooses the algorithm."""
        return (Config(),)

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """The direct method's arithmetic."""
        return Cost(p.flops, p.bytes, efficiency=0.7)

    def is_deterministic(self, p: ConvProblem, c: Config) -> bool:
        """cuDNN's backward engines may use atomics unless torch is told otherwise."""
        return p.device_type == "cpu" or p.pass_ is Pass.FPROP or torch.are_deterministic_algorithms_enabled()

    def warm_up(self, p: ConvProblem) -> Callable[[], object] | None:
        """Torch's search in cuDNN on a few images, where torch would choose among cuDNN's engines."""
        return search_on_few(p) if p.groups == 1 else None

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """A run that calls the operator with torch's flags as they are."""
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
            stand_in = _stand_in_for_x(p, a, b)

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
    """A tensor that the operator asks for but does not read, with the shape and layout that it chooses by.

    On a CPU pages that nobody touches take no memory, and a tensor of other strides would be copied. On a GPU the
    strides matter where this tensor is channels_last.
    """
    shape, layout = p.shape(role), p.layout(role)
    if p.device_type == "cuda" and layout != "channels_last":
        return like.new_empty(()).expand(shape)
    return like.new_empty_strided(shape, dense_strides(shape, layout))


def _stand_in_for_x(p: ConvProblem, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """:func:`_stand_in` for the input, whose memory is given back where cuDNN computes: it is as large as a result.

    It cannot be smaller: cuDNN's backward brings the gradient into its layout, and with another one torch would seem
    slower, by two copies that a step's own backward does not make.
    """
    x = _stand_in(p, "x", dy)
    if x.device.type == "cuda" and x.dim() > 3 and x.untyped_storage().nbytes() > x.element_size():
        options = ([a.stride for a in p.axes], [a.before for a in p.axes], [a.dilation for a in p.axes])
        chosen: Any = torch._C._select_conv_backend(x, w, None, *options, False, [0] * p.dims, p.groups)
        if chosen.name == "Cudnn":
            x.untyped_storage().resize_(0)
    return x
