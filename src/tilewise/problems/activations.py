"""Functions that are applied to every number of a result: their values in torch, and derivatives.

Their names are those of :mod:`tilewise.problems.activation_names`, which needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from tilewise.problems.activation_names import (
    ACTIVATIONS,
    CONV_ACTIVATIONS,
    PARAMETERS,
    activation_kind,
    activation_name,
    activation_parameters,
    kernel_parameters,
    require_activation,
)

__all__ = [
    "ACTIVATIONS",
    "CONV_ACTIVATIONS",
    "FROM_RESULT",
    "PARAMETERS",
    "activate",
    "activated",
    "activation_kind",
    "activation_name",
    "activation_parameters",
    "gradient_from_result",
    "kernel_parameters",
    "require_activation",
]

FROM_RESULT = ("relu", "tanh", "sigmoid")
"""Activations whose derivative follows from their result, so that no other tensor need be kept for it."""


def activated(x: torch.Tensor, name: str) -> torch.Tensor:
    """``x`` after the activation ``name``, in its own type; ``x`` itself for ``none``.

    Raises ``KeyError`` for a name whose first word is not in :data:`CONV_ACTIVATIONS`.
    """
    parameters = activation_parameters(name)
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "none": lambda x: x,
        "relu": torch.relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "silu": functional.silu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "relu6": functional.relu6,
        "hardswish": functional.hardswish,
        "hardsigmoid": functional.hardsigmoid,
        "leaky_relu": lambda x: functional.leaky_relu(x, parameters[0]),
        "clamp": lambda x: torch.clamp(x, *parameters),
    }
    return functions[activation_kind(name)](x)


def activate(x: torch.Tensor, name: str) -> torch.Tensor:
    """As :func:`activated`, in place: ``x`` holds the result and is returned."""
    parameters = activation_parameters(name)
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "none": lambda x: x,
        "relu": torch.relu_,
        "gelu": torch.ops.aten.gelu_,
        "gelu_tanh": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
        "silu": lambda x: functional.silu(x, inplace=True),
        "tanh": torch.tanh_,
        "sigmoid": torch.sigmoid_,
        "relu6": lambda x: functional.relu6(x, inplace=True),
        "hardswish": lambda x: functional.hardswish(x, inplace=True),
        "hardsigmoid": lambda x: functional.hardsigmoid(x, inplace=True),
        "leaky_relu": lambda x: functional.leaky_relu_(x, parameters[0]),
        "clamp": lambda x: x.clamp_(*parameters),
    }
    return functions[activation_kind(name)](x)


def gradient_from_result(dy: torch.Tensor, y: torch.Tensor, name: str) -> torch.Tensor:
    """The gradient before the activation ``name``, of which ``y`` is the result and ``dy`` the gradient after it.

    All have one shape. It has gradients itself. Raises ``KeyError`` for a name that is not in :data:`FROM_RESULT`.
    """
    aten = torch.ops.aten
    functions: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "relu": lambda dy, y: aten.threshold_backward(dy, y, 0),
        "tanh": aten.tanh_backward,
        "sigmoid": aten.sigmoid_backward,
    }
    return functions[name](dy, y)
