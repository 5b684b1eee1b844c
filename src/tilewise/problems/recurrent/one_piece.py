"""Weights in one piece of memory, as cuDNN takes them and torch's modules keep them on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.problems.recurrent.tensors import Recurrent

__all__ = ["in_one_piece"]

CUDNN_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""cuDNN's numbers for the cells."""


def in_one_piece(p: Recurrent, weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The weights of ``p`` as ``nn.RNNBase.flatten_parameters`` lays them, copied where they do not lie so.

    On a CPU, and where cuDNN does not compute, they are returned as they are. The given tensors stay where they are.
    """
    if weights[0].device.type != "cuda" or not torch.backends.cudnn.is_acceptable(weights[0]):
        return weights
    if len({weight.untyped_storage().data_ptr() for weight in weights}) == 1:
        return weights
    with torch.inference_mode(False), torch.no_grad():
        own = [weight.detach() for weight in weights]  # these are moved
        each = len(own) // (p.layers * p.directions)
        mode, both = CUDNN_MODES[p.cell], p.directions == 2
        torch._cudnn_rnn_flatten_weight(own, each, p.inputs, mode, p.hidden, p.projection, p.layers, False, both)
    return own
