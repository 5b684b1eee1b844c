"""What is wrong with a file or a network of Caffe's: an error, or a warning where work can go on."""

from __future__ import annotations

import sys
import warnings

__all__ = ["CaffeError", "CaffeWarning", "warn"]


class CaffeError(ValueError):
    """A file or a network of Caffe's is wrong, or asks for what is not here.

    The message names the file, the layer, the field and its value where they are known, and says what would do.

        >>> str(CaffeError("layer 'conv1': kernel_size = 0; a whole number of at least 1 would do"))
        "layer 'conv1': kernel_size = 0; a whole number of at least 1 would do"
    """


class CaffeWarning(UserWarning):
    """Something in a file of Caffe's was left out or read in another way than it may have been meant."""


def warn(text: str) -> None:
    """Give a :class:`CaffeWarning` at the line outside this library that led here."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "tilewise":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, CaffeWarning, stacklevel=level)
