"""Names of the functions that are applied to every number of a result, without torch.

A name is one word, such as ``relu``. Where a function has parameters they follow behind colons, as in
``leaky_relu:0.01`` or ``clamp:0.0:6.0``: :func:`activation_name` writes such names, so that equal functions have equal
ones. What the functions do is in :mod:`tilewise.problems.activations`.
"""

from __future__ import annotations

import math
import re

__all__ = [
    "ACTIVATIONS",
    "CONV_ACTIVATIONS",
    "PARAMETERS",
    "activation_kind",
    "activation_name",
    "activation_parameters",
    "kernel_parameters",
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


def kernel_parameters(name: str) -> tuple[float, float]:
    """The parameters of an activation as kernels take them: always two numbers, 0 where it has fewer.

    >>> kernel_parameters("leaky_relu:0.1")
    (0.1, 0.0)
    """
    first, second, *_ = (*activation_parameters(name), 0.0, 0.0)
    return first, second


def require_activation(name: object) -> None:
    """Raise ``ValueError`` unless ``name`` is an activation of convolutions, written as :func:`activation_name` does.

    For example ``require_activation("clamp:0.0:6.0")`` does nothing, and ``"clamp:0:6"`` raises.
    """
    if not isinstance(name, str):
        words = f"its name would do: one of {', '.join(CONV_ACTIVATIONS)}"
        raise ValueError(f"activation={' '.join(repr(name).split()):.60}: {words}")
    if FORM.fullmatch(name) is None:
        raise ValueError(f"activation={name[:60]!r}: one of {', '.join(CONV_ACTIVATIONS)} would do")
    try:
        parameters = activation_parameters(name)
    except ValueError as error:
        raise ValueError(f"activation={name!r}: numbers behind the colons would do") from error
    written = activation_name(activation_kind(name), *parameters)
    if written != name:
        raise ValueError(f"activation={name!r}: {written!r} would do")
