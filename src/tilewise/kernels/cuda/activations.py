"""C++ of a problem's activation (``activations.cu``), with its kind and parameters as constants."""

from __future__ import annotations

import struct

from tilewise.kernels.cuda.launch import read_source
from tilewise.kernels.cuda.operands import constants
from tilewise.problems.activation_names import CONV_ACTIVATIONS, activation_kind, activation_parameters

__all__ = ["activation_source"]


def activation_source(name: str) -> str:
    """The device function ``activated``, for a name as :func:`~tilewise.problems.activation_names.activation_name` has.

    For example that of ``"relu"`` returns 0 for a negative number, and that of ``"none"`` the number itself. The source
    needs the function ``float_of``.
    """
    first, second, *_ = (*activation_parameters(name), 0.0, 0.0)
    kinds = {kind.upper(): number for number, kind in enumerate(CONV_ACTIVATIONS)}
    chosen = {"ACTIVATION": CONV_ACTIVATIONS.index(activation_kind(name))}
    bits = (f"constexpr unsigned {what} = {_bits(value)}u;" for what, value in (("FIRST", first), ("SECOND", second)))
    return "\n".join((constants(kinds | chosen), *bits, read_source("activations.cu")))


def _bits(value: float) -> int:
    """The bits of the nearest single-precision number, as a whole number."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return int(bits)
