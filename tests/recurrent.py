"""Drawn recurrent layers and their tensors, for the tests of several folders."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence

from tilewise.problems.recurrent.packing import Packing
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.problems.recurrent.tensors import CELLS, TASKS

SIZES = (1, 2, 3, 5, 8)


@st.composite
def layers(draw: st.DrawFn, **fixed: Any) -> RecurrentProblem:
    """A small layer of any cell, depth, directions, lengths and task; ``fixed`` are fields that are not drawn."""
    drawn = {
        "cell": st.sampled_from(CELLS),
        "time": st.sampled_from((1, 2, 7)),
        "batch": st.sampled_from(SIZES),
        "inputs": st.sampled_from(SIZES),
        "hidden": st.sampled_from((1, 4, 7, 16)),
        "layers": st.integers(1, 3),
        "directions": st.integers(1, 2),
        "biases": st.booleans(),
        "task": st.sampled_from(TASKS),
        "dtype": st.sampled_from(("fp32", "bf16", "fp16")),
    }
    fields = {name: draw(each, name) for name, each in drawn.items() if name not in fixed} | fixed
    if "packed" not in fixed and draw(st.booleans(), "ends at different steps"):
        time, batch = fields["time"], fields["batch"]
        fields["packed"] = draw(st.integers(time + batch - 1, time * batch), "packed")
    if "projection" not in fixed and fields["cell"] == "lstm" and fields["hidden"] > 1:
        fields["projection"] = draw(st.just(0) | st.integers(1, fields["hidden"] - 1), "projection")
    return RecurrentProblem(**fields)


def called(module: torch.nn.RNNBase, x: torch.Tensor, state: Any, packing: Packing | None) -> tuple[torch.Tensor, Any]:
    """What torch's module gives for an input, which is packed where there is a ``packing``."""
    if packing is None:
        y, last = module(x, state)
        return y, last
    packed, last = module(PackedSequence(x, packing.sizes), state)
    return packed.data, last


def module_of(p: RecurrentProblem, weights: tuple[torch.Tensor, ...], dropout: float = 0.0) -> torch.nn.RNNBase:
    """torch's module with these weights: an implementation of its own, with autograd."""
    classes: dict[str, Any] = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM}
    options: dict[str, Any] = {"nonlinearity": p.cell[4:]} if p.cell.startswith("rnn") else {}
    options |= {"proj_size": p.projection} if p.projection else {}
    module = classes.get(p.cell, torch.nn.RNN)(
        p.inputs, p.hidden, p.layers, bias=p.biases, bidirectional=p.directions == 2, dropout=dropout,
        dtype=weights[0].dtype, device="cpu", **options,
    )  # fmt: skip
    with torch.no_grad():
        for parameter, weight in zip(module._flat_weights, weights, strict=True):
            parameter.copy_(weight)
    return module
