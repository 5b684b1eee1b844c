"""A reader in the shape of OpenCV's ``cv2.dnn.readNetFromCaffe``, which OpenCV 5 no longer has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.loading import load
from tilewise.frontends.caffe.net import Net

__all__ = ["CaffeReader", "read_net_from_caffe"]

Array = np.ndarray[Any, np.dtype[Any]]


class CaffeReader:
    """A network that takes and gives NumPy arrays, by the methods that OpenCV's ``Net`` has.

    :attr:`net` is the module. No gradients are kept.

    >>> TEXT = '''
    ... layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [1, 3, 8, 8] } } }
    ... layer { name: "score" type: "InnerProduct" bottom: "data" top: "score" inner_product_param { num_output: 4 } }
    ... '''
    >>> import numpy
    >>> reader = read_net_from_caffe(TEXT)
    >>> reader.setInput(numpy.zeros((2, 3, 8, 8), numpy.float32))
    >>> reader.forward().shape
    (2, 4)
    """

    def __init__(self, net: Net) -> None:
        self.net = net.eval()
        self._given: dict[str, torch.Tensor] = {}

    def setInput(self, blob: Any, name: str = "") -> None:
        """Let an array be the input ``name``, the first one where the name is empty. It is copied, as float32.

        Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` for a name that is no input's.
        """
        inputs = self.net.inputs
        if not inputs or (name and name not in inputs):
            raise CaffeError(f"name = {name!r} is no input; one of {', '.join(inputs) or 'none'} would do")
        place = self.net.get_buffer("_place")
        array = np.array(blob, dtype=np.float32)
        self._given[name or inputs[0]] = torch.from_numpy(array).to(place.device, place.dtype)

    def forward(self, names: str | Sequence[str] | None = None) -> Any:
        """Run up to a layer, by its name, and return its first top; for a list of names a list of them.

        A name may also be that of a tensor. Without one it is the last layer's. Raises
        :class:`~tilewise.frontends.caffe.errors.CaffeError` for other names.
        """
        wanted = [names] if isinstance(names, str) else list(names) if names is not None else [self.net.nodes[-1].name]
        tops = [self._top(name or self.net.nodes[-1].name) for name in wanted]
        with torch.no_grad():
            self.net(**self._given)
        found: list[Array] = [self.net.blobs[top].to(device="cpu", dtype=torch.float32).numpy() for top in tops]
        return found if names is not None and not isinstance(names, str) else found[0]

    def _top(self, name: str) -> str:
        for node in reversed(self.net.nodes):
            if node.name == name and node.tops:
                return node.tops[0]
        if any(name in node.tops for node in self.net.nodes):
            return name
        known = ", ".join(node.name for node in self.net.nodes)
        raise CaffeError(f"name = {name!r} is no layer; one of {known} would do")

    def getLayerNames(self) -> tuple[str, ...]:
        """The names of all layers but those of inputs, in order."""
        return tuple(node.name for node in self.net.nodes if node.module)

    def getUnconnectedOutLayersNames(self) -> tuple[str, ...]:
        """The names of the layers that make the outputs."""
        outputs = set(self.net.outputs)
        return tuple(node.name for node in self.net.nodes if node.module and outputs & set(node.tops))

    def empty(self) -> bool:
        """Whether there is no layer."""
        return not self.net.nodes


def read_net_from_caffe(
    prototxt: str | os.PathLike[str], caffemodel: str | os.PathLike[str] | None = None
) -> CaffeReader:
    """What ``cv2.dnn.readNetFromCaffe`` reads, for programs that were written for it.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` for whatever is wrong with the files.

    >>> TEXT = '''
    ... layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [1, 3, 8, 8] } } }
    ... layer { name: "score" type: "InnerProduct" bottom: "data" top: "score" inner_product_param { num_output: 4 } }
    ... '''
    >>> read_net_from_caffe(TEXT).getLayerNames()
    ('score',)
    """
    return CaffeReader(load(prototxt, caffemodel))
