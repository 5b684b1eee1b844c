"""What follows a convolution within one operation graph of cuDNN: residual, bias and activation, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilewise.problems.activations import activation_kind, activation_parameters
from tilewise.problems.conv.problem import ConvProblem

__all__ = ["BIAS_UID", "POINTWISE", "RESIDUAL_UID", "followed"]

BIAS_UID, RESIDUAL_UID = 4, 5
"""Numbers of the tensors that are added; the operands have 1 and 2, the result has 3."""

Pointwise = Callable[..., Any]
"""``pointwise(graph, value, *parameters)`` adds an operation to a graph and returns what it gives."""


POINTWISE: Mapping[str, Pointwise] = {
    "none": lambda graph, value: value,
    "relu": lambda graph, value: graph.relu(value),
    "relu6": lambda graph, value: graph.relu(value, lower_clip=0.0, upper_clip=6.0),
    "leaky_relu": lambda graph, value, slope: graph.leaky_relu(value, negative_slope=slope),
    "gelu": lambda graph, value: graph.gelu(value),
    "gelu_tanh": lambda graph, value: graph.gelu_approx_tanh(value),
    "silu": lambda graph, value: graph.swish(value),
    "tanh": lambda graph, value: graph.tanh(value),
    "sigmoid": lambda graph, value: graph.sigmoid(value),
}
"""Activations that cuDNN's graphs have, by the first word of their names. All of them keep NaN (cuDNN 9.19)."""


def followed(graph: Any, p: ConvProblem, value: Any, dims: list[int], strides: list[int], kind: Any) -> Any:
    """``value`` after what ``p`` adds to it and its activation: what the graph then gives.

    The residual has the result's ``dims`` and ``strides``, and is of its data type ``kind``, as the bias is.
    """
    if p.residual:
        residual = graph.tensor(dims, strides, data_type=kind, name="residual", uid=RESIDUAL_UID)
        residual.set_alignment(p.alignment_of(p.result))
        value = graph.add(a=value, b=residual)
    if p.bias:
        channels = dims[1]
        ones = [1] * (len(dims) - 2)
        bias = graph.tensor([1, channels, *ones], [channels, 1, *ones], data_type=kind, name="bias", uid=BIAS_UID)
        value = graph.add(a=value, b=bias)
    return POINTWISE[activation_kind(p.activation)](graph, value, *activation_parameters(p.activation))
