"""Networks of 2013 in the form of 2014: ``layers { layer { } }``, where one message has the fields of all types.

The oldest form has layers of type ``padding`` before convolutions. They become the ``pad`` of the layers that read
them, as in Caffe's own tool.
"""

from __future__ import annotations

from typing import Any

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.schema import NetParameter, V1LayerParameter

__all__ = ["upgrade_oldest"]

_TYPES = {
    "accuracy": "ACCURACY", "bnll": "BNLL", "concat": "CONCAT", "conv": "CONVOLUTION", "data": "DATA",
    "dropout": "DROPOUT", "euclidean_loss": "EUCLIDEAN_LOSS", "flatten": "FLATTEN", "hdf5_data": "HDF5_DATA",
    "hdf5_output": "HDF5_OUTPUT", "im2col": "IM2COL", "images": "IMAGE_DATA", "infogain_loss": "INFOGAIN_LOSS",
    "innerproduct": "INNER_PRODUCT", "lrn": "LRN", "multinomial_logistic_loss": "MULTINOMIAL_LOGISTIC_LOSS",
    "pool": "POOLING", "relu": "RELU", "sigmoid": "SIGMOID", "softmax": "SOFTMAX", "softmax_loss": "SOFTMAX_LOSS",
    "split": "SPLIT", "tanh": "TANH", "window_data": "WINDOW_DATA",
}  # fmt: skip
PADDING = "padding"

_PARAMETERS = {
    "conv": "convolution_param", "im2col": "convolution_param", "innerproduct": "inner_product_param",
    "pool": "pooling_param", "dropout": "dropout_param", "lrn": "lrn_param", "data": "data_param",
    "hdf5_data": "hdf5_data_param", "images": "image_data_param", "window_data": "window_data_param",
    "infogain_loss": "infogain_loss_param", "concat": "concat_param",
}  # fmt: skip
"""Which message has a type's fields."""
_WEIGHTS = {"num_output": "num_output", "biasterm": "bias_term", "weight_filler": "weight_filler"}
_WEIGHTS |= {"bias_filler": "bias_filler"}
_WINDOWS = {"pad": "pad", "kernelsize": "kernel_size", "group": "group", "stride": "stride"}
_BATCHES = {"source": "source", "batchsize": "batch_size"}
_FIELDS: dict[str, dict[str, str]] = {
    "conv": {**_WEIGHTS, **_WINDOWS},
    "im2col": _WINDOWS,
    "innerproduct": _WEIGHTS,
    "pool": {"pad": "pad", "kernelsize": "kernel_size", "stride": "stride", "pool": "pool"},
    "dropout": {"dropout_ratio": "dropout_ratio"},
    "lrn": {"local_size": "local_size", "alpha": "alpha", "beta": "beta", "k": "k"},
    "data": {**_BATCHES, "rand_skip": "rand_skip"},
    "hdf5_data": _BATCHES,
    "images": {**_BATCHES, "rand_skip": "rand_skip", "shuffle_images": "shuffle", "new_height": "new_height",
               "new_width": "new_width"},
    "window_data": {**_BATCHES, "det_fg_threshold": "fg_threshold", "det_bg_threshold": "bg_threshold",
                    "det_fg_fraction": "fg_fraction", "det_context_pad": "context_pad", "det_crop_mode": "crop_mode"},
    "infogain_loss": {"source": "source"},
    "concat": {"concat_dim": "concat_dim"},
}  # fmt: skip
"""What the fields of a type are called since."""
_TRANSFORMS = {"scale": "scale", "meanfile": "mean_file", "cropsize": "crop_size", "mirror": "mirror"}
_IMAGES = ("data", "images", "window_data")
_OF_ALL = ("name", "type", "blobs", "blobs_lr", "weight_decay")


def upgrade_oldest(net: NetParameter, source: str) -> None:
    """Bring ``layers { layer { } }`` into the form of ``layers { }``, in place.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` for a type or a field that no network of that form has
    there, for layers of both forms, and for padding that no convolution or pooling reads, with the layer.
    """
    old = list(net.layers)
    for index, each in enumerate(old):
        if not each.HasField("layer"):
            raise CaffeError(
                f"{source}: layer {index} is no layers {{ layer {{ }} }} as others are; one form for all would do"
            )
    padding = _padding(old, source)
    found = [
        _upgraded(each, f"{source}: layer {each.layer.name!r}", padding) for each in old if each.layer.type != PADDING
    ]
    net.ClearField("layers")
    net.layers.extend(found)


def _padding(old: list[Any], source: str) -> dict[str, tuple[str, int]]:
    """The tensors that padding layers make: which tensor each of them pads, and by how much."""
    found = {}
    for each in old:
        if each.layer.type == PADDING:
            if len(each.bottom) != 1 or len(each.top) != 1:
                raise CaffeError(
                    f"{source}: layer {each.layer.name!r} (padding) has {len(each.bottom)} bottoms and "
                    f"{len(each.top)} tops; one of each would do"
                )
            found[str(each.top[0])] = (str(each.bottom[0]), int(each.layer.pad))
    return found


def _upgraded(each: Any, what: str, padding: dict[str, tuple[str, int]]) -> V1LayerParameter:
    """A layer in the newer of the two forms."""
    old, new = each.layer, V1LayerParameter()
    kind = str(old.type)
    if kind not in _TYPES:
        known = ", ".join(sorted([*_TYPES, PADDING]))
        raise CaffeError(f"{what} has the type {kind!r}, which networks of 2013 do not have; one of {known} would do")
    new.name, new.type = old.name, _TYPES[kind]
    new.blobs.extend(old.blobs)
    new.blobs_lr.extend(old.blobs_lr)
    new.weight_decay.extend(old.weight_decay)
    new.top.extend(each.top)
    for descriptor, value in old.ListFields():
        _set(new, kind, descriptor.name, value, what)
    for bottom in each.bottom:
        pads = 0
        while bottom in padding:
            bottom, pad = padding[bottom]
            pads += pad
        if pads and kind not in ("conv", "pool"):
            raise CaffeError(f"{what} ({kind}) reads a padding layer; a layer of type conv or pool would do")
        new.bottom.append(bottom)
        if pads and kind == "conv":
            new.convolution_param.pad[:] = [pads]
        elif pads:
            new.pooling_param.pad = pads
    return new


def _set(new: Any, kind: str, name: str, value: Any, what: str) -> None:
    """Put the value of a field to where it is since."""
    if name in _OF_ALL:
        return
    if name in _FIELDS.get(kind, {}):
        parameter = getattr(new, _PARAMETERS[kind])
        field = _FIELDS[kind][name]
        if name in ("weight_filler", "bias_filler"):
            getattr(parameter, field).CopyFrom(value)
        elif kind in ("conv", "im2col") and name in ("pad", "kernelsize", "stride"):
            getattr(parameter, field).append(value)
        else:
            setattr(parameter, field, value)
    elif name in _TRANSFORMS and kind in _IMAGES:
        setattr(new.transform_param, _TRANSFORMS[name], value)
    elif name == "hdf5_output_param" and kind == "hdf5_output":
        new.hdf5_output_param.CopyFrom(value)
    else:
        known = ", ".join([*_FIELDS.get(kind, {}), *(_TRANSFORMS if kind in _IMAGES else ())]) or "none"
        raise CaffeError(f"{what} ({kind}) has the field {name}, which its type does not take; it takes {known}")
