"""What is wrong with a file or a network of Caffe's."""

from __future__ import annotations

__all__ = ["CaffeError"]


class CaffeError(ValueError):
    """A file or a network of Caffe's is wrong, or asks for what is not here.

    The message names the file, the layer, the field and its value where they are known, and says what would do.

        >>> raise CaffeError("net.prototxt: layer 'conv1': kernel_size = 0; a whole number of at least 1 would do")
        Traceback (most recent call last):
        ...
        tilewise.frontends.caffe.errors.CaffeError: net.prototxt: layer 'conv1': kernel_size = 0; ...
    """
