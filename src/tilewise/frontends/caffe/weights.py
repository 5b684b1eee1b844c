"""Weights in and out of a network's layers, by layer name and in Caffe's order and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.files.mapped import forget
from tilewise.frontends.caffe.layers.base import Layer

__all__ = ["Learnable", "LoadReport", "load_into", "share_parameter", "weights_of"]

PART = 1 << 21
"""Numbers of a blob that are copied together: 8 MiB."""


@dataclass(frozen=True, slots=True)
class Learnable:
    """A parameter of a network with the factors of its learning rate and of its weight decay.

    ``name`` is that of the layer with the blob's place, as ``conv1[0]``, or the one that layers share it by.

    >>> TEXT = '''
    ... layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [1, 3, 8, 8] } } }
    ... layer { name: "score" type: "InnerProduct" bottom: "data" top: "score" inner_product_param { num_output: 4 } }
    ... '''
    >>> from tilewise.frontends.caffe import load
    >>> [(learnable.name, learnable.lr_mult) for learnable in load(TEXT, phase="train").learnable]
    [('score[0]', 1.0), ('score[1]', 1.0)]
    """

    name: str
    parameter: nn.Parameter
    lr_mult: float
    decay_mult: float


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What became of weights that were loaded, as names of layers.

    ``matched`` were found on both sides. ``unused`` are only in the file, as layers that training alone has.
    ``missing`` are only in the network, and keep what they had. A layer that shares all of its blobs with layers that
    were found is not among them.

    >>> TEXT = '''
    ... layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [1, 3, 8, 8] } } }
    ... layer { name: "score" type: "InnerProduct" bottom: "data" top: "score" inner_product_param { num_output: 4 } }
    ... '''
    >>> from tilewise.frontends.caffe import load
    >>> net = load(TEXT)
    >>> net.load_weights(net.weights()).matched
    ('score',)
    """

    matched: tuple[str, ...]
    unused: tuple[str, ...]
    missing: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{len(self.matched)} layers loaded; not in the network: {', '.join(self.unused) or 'none'}; "
            f"not in the file: {', '.join(self.missing) or 'none'}"
        )


def load_into(layers: Mapping[str, Layer], weights: Mapping[str, Sequence[Any]]) -> LoadReport:
    """Copy arrays into the blobs of layers of the same name.

    Axes of size 1 do not count, since old files have four axes for every blob. Raises
    :class:`~tilewise.frontends.caffe.errors.CaffeError` for another number of blobs or other shapes, before anything is
    copied.
    """
    copies = []
    matched = tuple(name for name in weights if name in layers)
    for name in matched:
        blobs, arrays = layers[name].blobs, weights[name]
        if len(arrays) > len(blobs):
            _wrong_count(layers[name], arrays)
        for place, (blob, array) in enumerate(zip(blobs, arrays, strict=False)):
            if array is None:
                continue
            if _without_ones(array.shape) != _without_ones(blob.shape):
                layers[name].fail(
                    f"blob {place} has shape {tuple(array.shape)} in the file; {tuple(blob.shape)} would do. "
                    "Another name for the layer would leave it as it is"
                )
            copies.append((blob, array))
    given = {id(blob) for blob, _ in copies}
    for name in matched:
        # HDF5 files leave out a blob that another layer has as well. A layer that stores nothing may still be named.
        arrays = weights[name]
        absent = [p for p, blob in enumerate(layers[name].blobs) if p >= len(arrays) or arrays[p] is None]
        if len(arrays) and any(id(layers[name].blobs[place]) not in given for place in absent):
            _wrong_count(layers[name], arrays)
    with torch.no_grad():
        for blob, array in copies:
            _copy(np.asarray(array), blob)
    return LoadReport(
        matched,
        tuple(name for name, arrays in weights.items() if name not in layers and len(arrays)),
        tuple(
            name
            for name, layer in layers.items()
            if name not in weights and any(id(blob) not in given for blob in layer.blobs)
        ),
    )


def _wrong_count(layer: Layer, arrays: Sequence[Any]) -> NoReturn:
    shapes = [None if array is None else tuple(array.shape) for array in arrays]
    layer.fail(f"the file has {len(arrays)} blobs of shapes {shapes}; {len(layer.blob_names)} would do")


def _copy(array: np.ndarray[Any, Any], blob: torch.Tensor) -> None:
    """Copy an array into a blob, a part at a time: of a file that is mapped no more than that is in memory."""
    source = array.reshape(-1)
    on_host = blob.device.type == "cpu" and blob.dtype is torch.float32 and blob.is_contiguous()
    target = blob.detach().view(-1) if on_host else torch.empty(source.shape, dtype=torch.float32, device="cpu")
    for start in range(0, len(source), PART):
        part = source[start : start + PART]
        np.copyto(target[start : start + PART].numpy(), part, casting="unsafe")
        forget(part)
    if not on_host:
        blob.copy_(target.view(blob.shape))


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(size) for size in shape if size != 1)


def weights_of(layers: Mapping[str, Layer]) -> dict[str, list[np.ndarray[Any, np.dtype[np.float32]]]]:
    """float32 arrays of the blobs of each layer that has some. They may share the memory of the parameters."""
    return {
        name: [blob.detach().to(device="cpu", dtype=torch.float32).numpy() for blob in layer.blobs]
        for name, layer in layers.items()
        if layer.blob_names
    }


def share_parameter(layer: Layer, place: int, other: nn.Parameter, whose: str) -> None:
    """Let a layer have ``other`` as its blob at ``place``. Raises ``CaffeError`` for another shape."""
    own = layer.blob(place)
    if own.shape != other.shape:
        raise CaffeError(
            f"layer {layer.caffe_name!r}: blob {place} of shape {tuple(own.shape)} cannot be that of {whose}, of shape "
            f"{tuple(other.shape)}; equal shapes would do"
        )
    layer.set_blob(place, other)
