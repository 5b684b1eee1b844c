"""Functions that are applied to every number of a product's result: their values in torch, and their derivatives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

__all__ = ["ACTIVATIONS", "FROM_RESULT", "activate", "activated", "gradient_from_result"]

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid")
"""The names of activations. ``gelu`` is that of the error function, ``gelu_tanh`` its approximation by tanh (both:
Hendrycks and Gimpel 2016, section 2); ``silu`` is x times its sigmoid."""

FROM_RESULT = ("relu", "tanh", "sigmoid")
"""Activations whose derivative follows from their result, so that no other tensor need be kept for it."""


def activated(x: torch.Tensor, name: str) -> torch.Tensor:
    """``x`` after the activation ``name``, in its own type; ``x`` itself for ``none``.

    Raises ``KeyError`` for a name that is not in :data:`ACTIVATIONS`.
    """
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "none": lambda x: x,
        "relu": torch.relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "silu": functional.silu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
    }
    return functions[name](x)


def activate(x: torch.Tensor, name: str) -> torch.Tensor:
    """As :func:`activated`, in place: ``x`` holds the result and is returned."""
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "none": lambda x: x,
        "relu": torch.relu_,
        "gelu": torch.ops.aten.gelu_,
        "gelu_tanh": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
        "silu": lambda x: functional.silu(x, inplace=True),
        "tanh": torch.tanh_,
        "sigmoid": torch.sigmoid_,
    }
    return functions[name](x)


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
