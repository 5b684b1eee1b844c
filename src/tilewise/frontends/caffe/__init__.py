"""Caffe's networks and weights as torch modules: the same files in, the same numbers out.

:func:`load` reads a network and its weights. :func:`read_net_from_caffe` does in the shape of OpenCV's function. Files
alone are read and written by :mod:`tilewise.frontends.caffe.files`.
"""

from __future__ import annotations

import importlib

try:
    importlib.import_module("google.protobuf")
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "tilewise.frontends.caffe needs protobuf, which is not installed: pip install 'tilewise[caffe]' would do",
        name=error.name,
    ) from error

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.layers.base import Layer
from tilewise.frontends.caffe.layers.registry import layer_types, register, register_python
from tilewise.frontends.caffe.loading import load
from tilewise.frontends.caffe.net import Learnable, LoadReport, Net
from tilewise.frontends.caffe.opencv import CaffeReader, read_net_from_caffe

__all__ = [
    "CaffeError", "CaffeReader", "Layer", "Learnable", "LoadReport", "Net", "layer_types", "load",
    "read_net_from_caffe", "register", "register_python",
]  # fmt: skip
