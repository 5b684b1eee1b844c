"""How much memory training a recurrent layer takes for each step of each sequence, as its own training step shows."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tilewise.machine import random_states
from tilewise.machine.device import torch_device
from tilewise.planner.measuring.times import counted_bytes, peak_bytes
from tilewise.problems.recurrent.problem import RecurrentProblem

__all__ = ["step_bytes"]

CLASSES = {"rnn_tanh": nn.RNN, "rnn_relu": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
STEPS, SEQUENCES = 8, 8
"""Steps and sequences of the shorter of both runs; the longer one has twice as many steps."""


def step_bytes(layer: RecurrentProblem | nn.RNN | nn.GRU | nn.LSTM) -> int:
    """Bytes that training ``layer`` takes for one time step of one sequence: what it keeps, and its gradients.

    Two training steps of random data are run, on the device of ``layer``, one with twice as many time steps as the
    other. What the longer one takes more at its peak is divided by the steps and sequences that it has more. So the
    memory of parameters is not in it. What is in it are the input (time, batch, inputs), the output, all that the
    forward keeps for the backward, and gradients.

    A module runs as a copy in training mode: its gradients, mode and random numbers stay as they were. Of a
    :class:`~tilewise.RecurrentProblem` torch's own layer of its sizes and dtype is run; its ``time``, ``batch`` and
    ``task`` do not count. The answer is that of the library that computes the layer: torch's LSTM takes about 22
    numbers a hidden unit on a CPU.

    Raises ``ValueError`` for another ``layer``, and ``RuntimeError`` where its device cannot tell or is out of memory.

    >>> step_bytes(torch.nn.GRU(16, 32)) > 32 * 4
    True
    """
    if not isinstance(layer, (RecurrentProblem, nn.RNNBase)):
        raise ValueError(f"layer={layer!r:.80}: an nn.RNN, nn.GRU or nn.LSTM, or a RecurrentProblem, would do")
    with random_states.kept([] if isinstance(layer, RecurrentProblem) else [layer]):
        module = _layer_of(layer) if isinstance(layer, RecurrentProblem) else copy.deepcopy(layer)
        short, long = (_peak(module.train(), steps) for steps in (STEPS, 2 * STEPS))
    return -(-max(0, long - short) // (STEPS * SEQUENCES))


def _layer_of(problem: RecurrentProblem) -> nn.RNNBase:
    """torch's layer of a problem's sizes, with random weights."""
    more: dict[str, Any] = {}
    if problem.cell.startswith("rnn_"):
        more["nonlinearity"] = problem.cell.removeprefix("rnn_")
    if problem.projection:
        more["proj_size"] = problem.projection
    module: nn.RNNBase = CLASSES[problem.cell](
        problem.inputs,
        problem.hidden,
        num_layers=problem.layers,
        bias=problem.biases,
        bidirectional=problem.directions == 2,
        device=torch_device(problem.device),
        dtype=problem.torch_dtype("x"),
        **more,
    )
    return module


def _peak(module: nn.RNNBase, steps: int) -> int:
    """Bytes that a training step takes at its peak beyond the parameters, its input and output included."""
    weight = next(module.parameters())
    first, second = (SEQUENCES, steps) if module.batch_first else (steps, SEQUENCES)
    weights = [each for each in module.parameters() if each.requires_grad]

    def step() -> None:
        x = torch.zeros(first, second, module.input_size, dtype=weight.dtype, device=weight.device, requires_grad=True)
        y = module(x)[0]
        torch.autograd.grad(y, [x, *weights], torch.ones_like(y))

    step()  # the first run loads libraries, whose memory is none of a step's
    if weight.device.type == "cpu":
        return counted_bytes(step)  # to the byte, where all that grows with the steps comes from torch's allocator
    return peak_bytes(step, weight.device)
