"""Caffe's layers as torch modules, by family; each file registers the types that it has."""

from __future__ import annotations

from tilewise.frontends.caffe.layers import (
    activations,
    arithmetic,
    convolution,
    detection,
    evaluation,
    inputs,
    losses,
    multibox,
    normalization,
    outputs,
    pooling,
    products,
    recurrent,
    shaping,
)
from tilewise.frontends.caffe.layers.base import Layer
from tilewise.frontends.caffe.layers.registry import layer_types, register, register_python

__all__ = [
    "Layer", "activations", "arithmetic", "convolution", "detection", "evaluation", "inputs", "layer_types", "losses",
    "multibox", "normalization", "outputs", "pooling", "products", "recurrent", "register",
    "register_python", "shaping",
]  # fmt: skip
