"""Loads a network from Caffe's files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from tilewise.frontends.caffe.layers.base import Phase
from tilewise.frontends.caffe.net import Net

__all__ = ["load"]


def load(
    prototxt: str | os.PathLike[str],
    caffemodel: str | os.PathLike[str] | None = None,
    phase: Phase = "test",
    *,
    level: int | None = None,
    stages: Iterable[str] = (),
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Net:
    """The network of a prototxt file, or of its text, with the weights of a ``.caffemodel`` or ``.h5`` file.

    Without weights it has those of its fillers. ``phase``, ``level`` and ``stages`` say which layers it has.
    ``shapes`` are as for :class:`~tilewise.frontends.caffe.net.Net`. Weights match by layer name; a layer that one of
    the files does not have is left as it is.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` for whatever is wrong with the files.

    >>> TEXT = '''
    ... layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [1, 3, 8, 8] } } }
    ... layer { name: "score" type: "InnerProduct" bottom: "data" top: "score" inner_product_param { num_output: 4 } }
    ... '''
    >>> load(TEXT)(torch.zeros(2, 3, 8, 8))["score"].shape
    torch.Size([2, 4])
    """
    from tilewise.frontends.caffe.files import filtered, read_net

    net = Net(filtered(read_net(prototxt), phase, level, stages), phase, shapes=shapes)
    if caffemodel is not None:
        from tilewise.frontends.caffe.files import read_weights

        net.load_weights(read_weights(caffemodel))
    return net
