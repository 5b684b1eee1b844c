"""Weights of networks: a caffemodel or an HDF5 file, in and out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.files.blobs import checked
from tilewise.frontends.caffe.files.caffemodel import read_caffemodel, write_caffemodel
from tilewise.frontends.caffe.files.hdf5 import read_weights_h5, write_weights_h5
from tilewise.frontends.caffe.files.mapped import HDF5, begins_with
from tilewise.frontends.caffe.schema import LayerParameter, NetParameter

__all__ = ["is_hdf5_name", "read_weights", "write_weights"]


def read_weights(path: str | os.PathLike[str]) -> dict[str, list[Any]]:
    """The blobs of a caffemodel or of an HDF5 file of weights, by the name of their layer, in the file's order.

    Each layer that has blobs has a list of NumPy arrays, in fp32 or fp64 as they were saved, with the shapes of the
    file: old files have four axes throughout, ``(1, 1, 1, n)`` for n biases. An array is a view of the mapped file: it
    takes no memory before it is used, cannot be written to, and may be unaligned. ``numpy.array(blob)`` copies it, and
    :func:`~tilewise.frontends.caffe.files.forget` then gives back the memory of what was read. In HDF5 the place of a
    blob that a layer shares with another one has ``None``, since Caffe leaves it out.

    The file may be replaced meanwhile, but not be made shorter. Raises
    :class:`~tilewise.frontends.caffe.errors.CaffeError` where it is damaged, and ``OSError`` where it cannot be read.

        >>> import numpy, tempfile
        >>> path = tempfile.mkdtemp() + "/net.caffemodel"
        >>> write_weights(path, {"ip": [numpy.ones((2, 3), numpy.float32), numpy.zeros(2, numpy.float32)]})
        >>> [blob.shape for blob in read_weights(path)["ip"]]
        [(2, 3), (2,)]
    """
    if begins_with(path, HDF5):
        return read_weights_h5(path)
    return read_caffemodel(path)


def write_weights(
    path: str | os.PathLike[str], weights: Mapping[str, Sequence[Any]], net: NetParameter | None = None
) -> None:
    """Write blobs by the name of their layer: HDF5 if ``path`` ends in ``.h5`` or ``.hdf5``, else a caffemodel.

    fp64 arrays are kept as such, all others in fp32. With ``net`` the file has the definitions of its layers too, as
    Caffe's own files do; its layers come first, in its order. An existing file stays as it was until the new one is
    complete on the disk.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` for what is no array of numbers and where there are no
    layers, and ``OSError`` where the file cannot be written.

    >>> import numpy, tempfile
    >>> path = tempfile.mkdtemp() + "/net.h5"
    >>> write_weights(path, {"ip": [numpy.ones((2, 3), numpy.float32)]})
    >>> list(read_weights(path))
    ['ip']
    """
    found = {
        name: [checked(blob, f"blob {index} of layer {name!r}") for index, blob in enumerate(blobs)]
        for name, blobs in weights.items()
    }
    if not found and (net is None or not net.layer):
        raise CaffeError("weights has no layers; at least one would do")
    if any(not name for name in found):
        raise CaffeError("weights has a layer without a name; a name for each would do")
    if is_hdf5_name(path):
        write_weights_h5(path, found, [layer.name for layer in net.layer] if net is not None else [])
        return
    layers = [(layer.name, _definition(layer)) for layer in net.layer] if net is not None else []
    write_caffemodel(path, found, layers, net.name if net is not None else "")


def is_hdf5_name(path: str | os.PathLike[str]) -> bool:
    """Whether a file is to be HDF5 by its name."""
    return os.fspath(path).lower().endswith((".h5", ".hdf5"))


def _definition(layer: LayerParameter) -> bytes:
    """A layer without its blobs in the binary format."""
    copy = LayerParameter()
    copy.CopyFrom(layer)
    copy.ClearField("blobs")
    return bytes(copy.SerializeToString())
