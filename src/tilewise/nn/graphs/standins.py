"""Parameters of a model exchanged for aliases of them, while its gradients are captured.

An alias has the memory of its parameter and nothing else of it: no hooks on its gradient, no bucket of
``DistributedDataParallel``, no node of autograd that belongs to another stream. All of these take part when a gradient
that a replay has computed reaches the parameter itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["aliased", "buffers_aside", "exchanged"]


def aliased(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """A new parameter in the memory of each parameter of ``model``."""
    aliases = {}
    for parameter in model.parameters():
        alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        alias.__dict__.update(parameter.__dict__)  # what the program has noted on it
        aliases[parameter] = alias
    return aliases


@contextmanager
def exchanged(model: nn.Module, aliases: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Meanwhile let every module of ``model`` have the aliases of its parameters."""
    before = [(module, dict(module._parameters)) for module in model.modules()]
    try:
        for module, parameters in before:
            for name, parameter in parameters.items():
                if parameter is not None:
                    module._parameters[name] = aliases[parameter]
            _tell(module)
        yield
    finally:
        for module, parameters in before:
            module._parameters.update(parameters)
            _tell(module)


def _tell(module: nn.Module) -> None:
    """Let a recurrent module take its parameters into the list of them that it keeps."""
    if isinstance(module, nn.RNNBase):
        recurrent: Any = module
        recurrent._flat_weights = [getattr(module, name, None) for name in recurrent._flat_weights_names]


@contextmanager
def buffers_aside(model: nn.Module) -> Iterator[None]:
    """Meanwhile let every module have copies of its buffers, so that what is written to them is lost."""
    before = [(module, dict(module._buffers)) for module in model.modules()]
    copies: dict[int, torch.Tensor] = {}
    try:
        for module, buffers in before:
            for name, buffer in buffers.items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
        yield
    finally:
        for module, buffers in before:
            module._buffers.update(buffers)
