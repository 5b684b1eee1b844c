"""Gates of ReLU behind a norm, in training graphs of Inductor: taken from the norm's input instead of ReLU's result.

The gradient of ReLU is zero where its result is. Backward therefore reads the result once more, in the sums for the
norm's gradients and again in the gradient of the norm's input. Both read the norm's input in any case, and the result
follows from that by a few operations on registers. So a gate computed anew saves two passes over a tensor in memory for
each ReLU, which is what steps of such networks wait for. ``relu(t) <= 0`` is ``t <= 0`` for every ``t``, NaN included.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from tilewise.nn.layers.inductor.nodes import plain
from tilewise.nn.layers.inductor.norm_sums import norm_behind

__all__ = ["compute_gates_anew"]

aten = torch.ops.aten


def compute_gates_anew(graph: Graph) -> int:
    """Let each comparison ``relu(t) <= 0`` compare ``t``, where that is a training norm's result; returns how many."""
    found = 0
    for gate in list(graph.find_nodes(op="call_function", target=aten.le.Scalar)):
        relu = plain(gate.args[0])
        if relu is None or relu.target is not aten.relu.default or norm_behind(gate) is None:
            continue
        gate.replace_input_with(gate.args[0], relu.args[0])
        found += 1
    return found
