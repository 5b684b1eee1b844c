"""A layer's three computations, and the names of tensors and axes that all of them share."""

from __future__ import annotations

import enum

__all__ = ["OPERANDS", "RESULTS", "ROLES", "SPACE", "Pass"]

ROLES = ("x", "w", "y")
"""Tensors of a convolution by place: image, filter, output. For DGRAD the result has the place ``x``."""
SPACE = {1: ("w",), 2: ("h", "w"), 3: ("d", "h", "w")}
"""Names of the spatial axes by their number."""


class Pass(enum.Enum):
    """Which of a layer's three computations (cuDNN's words; fbfft: fprop, bprop, accGrad).

    >>> [pass_.name for pass_ in tilewise.Pass]
    ['FPROP', 'DGRAD', 'WGRAD']
    """

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"

    __hash__ = object.__hash__  # members are single: problems are hashed often while planning, names in Python's code


OPERANDS = {Pass.FPROP: ("x", "w"), Pass.DGRAD: ("y", "w"), Pass.WGRAD: ("x", "y")}
"""Places of the two operands, in the order every solver takes them."""
RESULTS = {Pass.FPROP: ("y",), Pass.DGRAD: ("x",), Pass.WGRAD: ("w",)}
"""Place of the result."""
