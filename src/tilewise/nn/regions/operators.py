"""What the rewriting of a region asks of a graph's nodes: constants, norms with fixed statistics, activations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from tilewise.nn.regions import fused
from tilewise.problems.activations import activation_name

__all__ = ["NORMS", "activation_of", "constants_of", "norm_constants", "tensor_of"]

aten = torch.ops.aten
NORMS = {
    aten.native_batch_norm.default: 5,
    aten._native_batch_norm_legit.default: 5,
    aten._native_batch_norm_legit_no_training.default: None,
    aten.cudnn_batch_norm.default: 5,
    aten.miopen_batch_norm.default: 5,
}
"""Norms with statistics, and the place of the argument that says whether they take those of the batch."""


def constants_of(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on no input: parameters, and what is computed from them alone."""
    constant: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr" or (
            node.op == "call_function" and all(source in constant for source in node.all_input_nodes)
        ):
            constant.add(node)
    return constant


def norm_constants(graph: fx.Graph, norm: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Nodes of a norm's factor and summand a channel; ``None`` where they depend on the input or the batch."""
    weight, bias, mean, variance = norm.args[1:5]
    place = NORMS[norm.target]  # type: ignore[index]
    eps = norm.args[-1]
    if place is not None and norm.args[place] is not False:
        return None
    constant = constants_of(graph)
    if any(t is not None and t not in constant for t in (weight, bias)) or not {mean, variance} <= constant:
        return None
    with graph.inserting_before(norm):
        scale = graph.call_function(fused.norm_scale, (weight, variance, eps))
        shift = graph.call_function(fused.norm_shift, (scale, bias, mean))
    return scale, shift


def activation_of(node: fx.Node) -> str:
    """The name of the activation that the node is, as problems name it; empty where it is none."""
    target, args = node.target, node.args
    simple = {
        aten.relu.default: "relu",
        aten.silu.default: "silu",
        aten.hardswish.default: "hardswish",
        aten.hardsigmoid.default: "hardsigmoid",
        aten.sigmoid.default: "sigmoid",
        aten.tanh.default: "tanh",
    }
    if target in simple:
        return simple[target]
    if target is aten.gelu.default:
        return "gelu_tanh" if node.kwargs.get("approximate", "none") == "tanh" else "gelu"
    if target is aten.leaky_relu.default:
        return activation_name("leaky_relu", args[1] if len(args) > 1 else 0.01)  # type: ignore[arg-type]
    if target in (aten.hardtanh.default, aten.clamp.default, aten.clamp_min.default, aten.relu6.default):
        return _bounds(node)
    return ""


def _bounds(node: fx.Node) -> str:
    """The name of an activation that keeps numbers between two bounds."""
    if node.target is aten.relu6.default:
        return "relu6"
    low, high = (*node.args[1:], None, None)[:2]
    if node.target is aten.hardtanh.default:
        low, high = -1.0 if low is None else low, 1.0 if high is None else high
    if any(bound is not None and not isinstance(bound, int | float) for bound in (low, high)):
        return ""
    least = -math.inf if low is None else float(low)  # type: ignore[arg-type]
    most = math.inf if high is None else float(high)  # type: ignore[arg-type]
    if least > most or math.isnan(least) or math.isnan(most):
        return ""
    if (least, most) in ((0.0, 6.0), (0.0, math.inf)):
        return "relu6" if most == 6.0 else "relu"
    return activation_name("clamp", least, most)


def tensor_of(node: Any) -> torch.Tensor | None:
    """The tensor without memory that a node stands for; ``None`` where it stands for something else."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
