"""Classes of Caffe's protobuf messages, made when this package is imported.

The names are Caffe's: ``NetParameter``, ``LayerParameter`` with ``convolution_param.num_output``, and so on. The
messages have Caffe's own fields and those of common forks, so that a network in text may use any of them. Where forks
gave one number to different fields, the binary form of Caffe's own field is read. :func:`profile` has the classes of
one fork, with its numbers. The tables hold facts of the format, as BVLC's Caffe of 2020 and the forks define it.

    >>> from tilewise.frontends.caffe.schema import LayerParameter
    >>> layer = LayerParameter(name="conv1", type="Convolution")
    >>> layer.convolution_param.kernel_size.append(3)
    >>> layer.convolution_param.group
    1
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.schema.build import message_classes
from tilewise.frontends.caffe.schema.forks import FORKS
from tilewise.frontends.caffe.schema.layers import LAYERS
from tilewise.frontends.caffe.schema.nets import NETS

__all__ = [
    "TEST",
    "TRAIN",
    "BlobProto",
    "BlobProtoVector",
    "BlobShape",
    "Datum",
    "FillerParameter",
    "LayerParameter",
    "NetParameter",
    "NetState",
    "NetStateRule",
    "ParamSpec",
    "SolverParameter",
    "SolverState",
    "TransformationParameter",
    "V1LayerParameter",
    "message",
    "profile",
    "profiles",
]

TRAIN, TEST = 0, 1
"""The phases."""

_CLASSES = message_classes((NETS, LAYERS, *FORKS.values()))


def message(name: str) -> Any:
    """The class of a message by its name, such as ``"PoolingParameter"``. Raises :class:`CaffeError`."""
    if name not in _CLASSES:
        raise CaffeError(f"name = {name!r} is no message of Caffe's; one of {', '.join(sorted(_CLASSES))} would do")
    return _CLASSES[name]


def profiles() -> tuple[str, ...]:
    """The names of what :func:`profile` takes: ``"bvlc"``, Caffe itself, and the forks."""
    return "bvlc", *FORKS


@functools.cache
def profile(name: str) -> dict[str, Any]:
    """The classes of one fork's messages by name, with that fork's numbers. Binary files of the fork need them.

    ``name`` is one of :func:`profiles`. Raises :class:`CaffeError` for another.

        >>> profile("pspnet")["LayerParameter"].DESCRIPTOR.fields_by_name["interp_param"].number
        143
    """
    if name not in profiles():
        raise CaffeError(f"name = {name!r} is no known fork of Caffe; one of {', '.join(profiles())} would do")
    return dict(message_classes((FORKS[name], NETS, LAYERS) if name in FORKS else (NETS, LAYERS)))


if TYPE_CHECKING:
    from google.protobuf.message import Message

    BlobProto = Message
    BlobProtoVector = Message
    BlobShape = Message
    Datum = Message
    FillerParameter = Message
    LayerParameter = Message
    NetParameter = Message
    NetState = Message
    NetStateRule = Message
    ParamSpec = Message
    SolverParameter = Message
    SolverState = Message
    TransformationParameter = Message
    V1LayerParameter = Message
else:
    BlobProto = _CLASSES["BlobProto"]
    BlobProtoVector = _CLASSES["BlobProtoVector"]
    BlobShape = _CLASSES["BlobShape"]
    Datum = _CLASSES["Datum"]
    FillerParameter = _CLASSES["FillerParameter"]
    LayerParameter = _CLASSES["LayerParameter"]
    NetParameter = _CLASSES["NetParameter"]
    NetState = _CLASSES["NetState"]
    NetStateRule = _CLASSES["NetStateRule"]
    ParamSpec = _CLASSES["ParamSpec"]
    SolverParameter = _CLASSES["SolverParameter"]
    SolverState = _CLASSES["SolverState"]
    TransformationParameter = _CLASSES["TransformationParameter"]
    V1LayerParameter = _CLASSES["V1LayerParameter"]
