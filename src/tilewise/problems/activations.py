"""Functions that are applied to every number of a result: their names, values in torch, and derivatives.

A name is one word, such as ``relu``. Where a function has parameters they follow behind colons, as in
``leaky_relu:0.01`` or ``clamp:0.0:6.0``: :func:`activation_name` writes such names, so that equal functions have equal
ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch
from torch.nn import functional

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
    "require_activation",
]

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid")
"""The names of activations of products. ``gelu`` is that of the error function, ``gelu_tanh`` its approximation by tanh
(both: Hendrycks and Gimpel 2016, section 2); ``silu`` is x times its sigmoid."""

PARAMETERS = {"leaky_relu": ("negative_slope",), "clamp": ("min", "max")}
"""Activations with parameters, which follow the name behind colons, and what each is called in torch."""

CONV_ACTIVATIONS = (*ACTIVATIONS, "relu6", "hardswish", "hardsigmoid", *PARAMETERS)
"""The names of activations of convolutions, without parameters. ``relu6`` is x between 0 and 6 (Krizhevsky 2010),
``hardsigmoid`` is relu6(x + 3) / 6, ``hardswish`` x times that (Howard et al. 2019, section 5.2), ``leaky_relu`` scales
negative numbers (Maas et al. 2013), and ``clamp`` keeps numbers between two bounds."""

FROM_RESULT = ("relu", "tanh", "sigmoid")
"""Activations whose derivative follows from their result, so that no other tensor need be kept for it."""

FORM = re.compile(r"[a-z][a-z0-9_]*(?::[-+.0-9a-z]{1,32}){0,2}")


def activation_name(kind: str, *parameters: float) -> str:
    """The name of the activation ``kind``, one of :data:`CONV_ACTIVATIONS`, with ``parameters`` as torch has them.

    Raises ``ValueError`` for another kind, another number of parameters, or values that make no function. For example
    ``activation_name("leaky_relu", 0.2)`` is ``"leaky_relu:0.2"``, and ``activation_name("relu")`` is ``"relu"``.
    """
    if kind not in CONV_ACTIVATIONS:
        raise ValueError(f"activation={kind!r}: one of {', '.join(CONV_ACTIVATIONS)} would do")
    names = PARAMETERS.get(kind, ())
    if len(parameters) != len(names):
        wanted = ":".join([kind, *(name.upper() for name in names)])
        raise ValueError(f"activation={kind!r} with {len(parameters)} parameters: {wanted} would do")
    values = [float(value) for value in parameters]
    if kind == "clamp" and not values[0] <= values[1]:
        raise ValueError(f"activation='clamp' from {values[0]} to {values[1]}: bounds in rising order would do")
    if kind == "leaky_relu" and not math.isfinite(values[0]):
        raise ValueError(f"activation='leaky_relu' with slope {values[0]}: a finite number would do")
    return ":".join([kind, *map(repr, values)])


def activation_kind(name: str) -> str:
    """The first word of an activation's name, which names the function without its parameters."""
    return name.split(":", 1)[0]


def activation_parameters(name: str) -> tuple[float, ...]:
    """The parameters in an activation's name, in the order of :data:`PARAMETERS`; none for most."""
    return tuple(float(text) for text in name.split(":")[1:])


def require_activation(name: str) -> None:
    """Raise ``ValueError`` unless ``name`` is an activation of convolutions, written as :func:`activation_name` does.

    For example ``require_activation("clamp:0.0:6.0")`` does nothing, and ``"clamp:0:6"`` raises.
    """
    if FORM.fullmatch(name) is None:
        raise ValueError(f"activation={name[:60]!r}: one of {', '.join(CONV_ACTIVATIONS)} would do")
    try:
        parameters = activation_parameters(name)
    except ValueError as error:
        raise ValueError(f"activation={name!r}: numbers behind the colons would do") from error
    written = activation_name(activation_kind(name), *parameters)
    if written != name:
        raise ValueError(f"activation={name!r}: {written!r} would do")


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
