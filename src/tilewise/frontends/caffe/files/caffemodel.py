"""Weights in a caffemodel: a network in the binary format, of which the layers' names and blobs are read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

from tilewise.frontends.caffe.errors import CaffeError, warn
from tilewise.frontends.caffe.files.blobs import Array, blob_of, blob_size, write_blob
from tilewise.frontends.caffe.files.mapped import message_of
from tilewise.frontends.caffe.files.wire import BYTES, Message, encoded_varint, key, length_prefixed
from tilewise.machine.files import replacing

__all__ = ["read_caffemodel", "write_caffemodel"]

MOST_BLOBS = 100_000
"""Blobs, and layers, of a file at most. Large networks have thousands."""
LARGEST_FOR_CAFFE = 2**31 - 1

_NET_NAME, _LAYERS, _LAYER = 1, 2, 100
_OF_FORM = {_LAYER: {"name": 1, "blobs": 7}, _LAYERS: {"name": 4, "blobs": 6, "oldest": 1}}
"""The numbers of a layer's fields in the newest form and in the older one."""
_OLDEST = {"name": 1, "blobs": 50}
"""The same within the message that is a layer in files of 2013."""


def read_caffemodel(path: str | os.PathLike[str]) -> dict[str, list[Any]]:
    """The blobs of each layer that has some, by the layer's name, as views of the mapped file.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError`.
    """
    message = message_of(path)
    weights: dict[str, list[Any]] = {}
    blobs = layers = 0
    for number, kind, start, end in message.fields():
        if number not in _OF_FORM or kind != BYTES:
            continue
        name, arrays = _layer(message.part(start, end), _OF_FORM[number], MOST_BLOBS - blobs)
        layers, blobs = layers + 1, blobs + len(arrays)
        if layers > MOST_BLOBS:
            raise CaffeError(f"{message.source} has over {MOST_BLOBS} layers; up to {MOST_BLOBS} would do")
        if arrays and name in weights:
            warn(f"{message.source}: several layers with blobs are named {name!r}; the last one counts")
        if arrays:
            weights[name] = arrays
    if not layers:
        raise CaffeError(f"{message.source} has no layers; a caffemodel or an HDF5 file of weights would do")
    return weights


def _layer(message: Message, numbers: Mapping[str, int], most: int) -> tuple[str, list[Any]]:
    """The name and the blobs of a layer."""
    name = ""
    found: list[Message] = []
    for number, kind, start, end in message.fields():
        if kind != BYTES:
            continue
        if number == numbers["name"]:
            name = message.text(start, end)
        elif number == numbers["blobs"]:
            found.append(message.part(start, end))
            if len(found) > most:
                raise CaffeError(f"{message.source} has over {MOST_BLOBS} blobs; up to {MOST_BLOBS} would do")
        elif number == numbers.get("oldest"):
            return _layer(message.part(start, end), _OLDEST, most)
    return name, [blob_of(blob, f"blob {place} of layer {name!r}") for place, blob in enumerate(found)]


def write_caffemodel(
    path: str | os.PathLike[str],
    weights: Mapping[str, Sequence[Array]],
    layers: Iterable[tuple[str, bytes]] = (),
    name: str = "",
) -> None:
    """Write blobs, one after the other, in the newest form. They must have been checked.

    ``layers`` has the name of each layer of the network, in its order, and its definition without blobs, as a message
    in the binary format. Layers of ``weights`` that are not there follow with their names alone. ``name`` is the
    network's.
    """
    left = dict(weights)
    numbers = _OF_FORM[_LAYER]
    with replacing(path, CaffeError) as partial, partial.open("wb") as file:
        file.write(length_prefixed(_NET_NAME, name.encode("utf-8")) if name else b"")
        for layer, definition in layers:
            _write_layer(file, definition, left.pop(layer, ()))
        for layer, blobs in left.items():
            _write_layer(file, length_prefixed(numbers["name"], layer.encode("utf-8")), blobs)
        total = file.tell()
    if total > LARGEST_FOR_CAFFE:
        warn(f"{os.fspath(path)} has {total} bytes, and Caffe reads none above 2 GiB; a name that ends in .h5 would do")


def _write_layer(file: BinaryIO, definition: bytes, blobs: Sequence[Array]) -> None:
    number = _OF_FORM[_LAYER]["blobs"]
    sizes = [blob_size(blob) for blob in blobs]
    total = len(definition) + sum(len(key(number, BYTES)) + len(encoded_varint(size)) + size for size in sizes)
    file.write(key(_LAYER, BYTES) + encoded_varint(total) + definition)
    for blob in blobs:
        write_blob(file, number, blob)
