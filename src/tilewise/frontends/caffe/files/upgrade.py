"""Networks and solvers of older versions of Caffe in the form of the newest one.

What is read in a file is brought up to date at once, so that nothing else need know the older forms:

- ``layers`` with types in capitals (``V1LayerParameter``) become ``layer``, with ``blobs_lr`` and ``weight_decay`` in
  ``param``, and what they do to images (``scale``, ``mirror``, ``crop_size``, ``mean_file``) in ``transform_param``;
- ``input`` with ``input_dim`` or ``input_shape`` becomes a layer of type ``Input``;
- BatchNorm layers with three ``param`` do not learn them, as in Caffe;
- a solver's ``solver_type`` becomes its ``type``;
- the oldest networks, with a ``layer`` inside ``layers`` (2013), first become ``layers``
  (:mod:`~tilewise.frontends.caffe.files.oldest`).
"""

from __future__ import annotations

from typing import Any

from tilewise.frontends.caffe.errors import CaffeError, warn
from tilewise.frontends.caffe.files.oldest import upgrade_oldest
from tilewise.frontends.caffe.schema import LayerParameter, NetParameter, SolverParameter, V1LayerParameter

__all__ = ["upgrade_net", "upgrade_solver"]

_LAYER_TYPES = """
ABSVAL:AbsVal ACCURACY:Accuracy ARGMAX:ArgMax BNLL:BNLL CONCAT:Concat CONTRASTIVE_LOSS:ContrastiveLoss
CONVOLUTION:Convolution DATA:Data DECONVOLUTION:Deconvolution DROPOUT:Dropout DUMMY_DATA:DummyData
EUCLIDEAN_LOSS:EuclideanLoss ELTWISE:Eltwise EXP:Exp FLATTEN:Flatten HDF5_DATA:HDF5Data HDF5_OUTPUT:HDF5Output
HINGE_LOSS:HingeLoss IM2COL:Im2col IMAGE_DATA:ImageData INFOGAIN_LOSS:InfogainLoss INNER_PRODUCT:InnerProduct LRN:LRN
MEMORY_DATA:MemoryData MULTINOMIAL_LOGISTIC_LOSS:MultinomialLogisticLoss MVN:MVN POOLING:Pooling POWER:Power RELU:ReLU
SIGMOID:Sigmoid SIGMOID_CROSS_ENTROPY_LOSS:SigmoidCrossEntropyLoss SILENCE:Silence SLICE:Slice SOFTMAX:Softmax
SOFTMAX_LOSS:SoftmaxWithLoss SPLIT:Split TANH:TanH THRESHOLD:Threshold WINDOW_DATA:WindowData
"""
_TYPES = {"NONE": "", **dict(pair.split(":") for pair in _LAYER_TYPES.split())}
_SOLVERS = {
    "SGD": "SGD",
    "NESTEROV": "Nesterov",
    "ADAGRAD": "AdaGrad",
    "RMSPROP": "RMSProp",
    "ADADELTA": "AdaDelta",
    "ADAM": "Adam",
}
_IMAGE_SOURCES = {"Data": "data_param", "ImageData": "image_data_param", "WindowData": "window_data_param"}
_TRANSFORMS = ("scale", "mean_file", "crop_size", "mirror")
_SAME_IN_BOTH = sorted(
    name
    for name, field in LayerParameter.DESCRIPTOR.fields_by_name.items()
    if field.message_type is not None
    and name not in {"param", "blobs", "include", "exclude"}
    and name in V1LayerParameter.DESCRIPTOR.fields_by_name
)
"""The parameters of layers, whose messages the older form shares with the newer one."""


def upgrade_net(net: NetParameter, source: str) -> NetParameter:
    """Bring a network up to date, in place, and return it. ``source`` names it in messages.

    Raises :class:`CaffeError` for a mixture of older and newer forms, for fields that a layer of the oldest form does
    not take, and for inputs whose sizes are missing.
    """
    if net.layers:
        _upgrade_layers(net, source)
    if net.input:
        _upgrade_inputs(net, source)
    for layer in net.layer:
        if layer.type == "BatchNorm" and len(layer.param) == 3:
            for spec in layer.param:
                spec.lr_mult = spec.decay_mult = 0
        _warn_of_old_transforms(layer, source)
    return net


def upgrade_solver(solver: SolverParameter, source: str) -> SolverParameter:
    """Bring a solver and the networks inside it up to date, in place, and return it.

    Raises :class:`CaffeError` for a solver that gives its type in both ways, and where :func:`upgrade_net` does.
    """
    if solver.HasField("solver_type"):
        old = solver.SolverType.Name(solver.solver_type)
        if solver.HasField("type"):
            raise CaffeError(f"{source}: solver_type = {old} and type = {solver.type!r}; type alone would do")
        solver.type = _SOLVERS[old]
        solver.ClearField("solver_type")
    for name in ("net_param", "train_net_param"):
        if solver.HasField(name):
            upgrade_net(getattr(solver, name), f"{source}, {name}")
    for index, net in enumerate(solver.test_net_param):
        upgrade_net(net, f"{source}, test_net_param {index}")
    return solver


def _upgrade_layers(net: NetParameter, source: str) -> None:
    """Turn ``layers`` into ``layer``."""
    if net.layer:
        raise CaffeError(
            f"{source}: has layers of both forms, {len(net.layers)} in layers {{ }} and {len(net.layer)} in layer {{ }}"
            "; one form would do"
        )
    if any(old.HasField("layer") for old in net.layers):
        upgrade_oldest(net, source)
    for old in net.layers:
        _upgrade_layer(old, net.layer.add())
    net.ClearField("layers")


def _upgrade_layer(old: V1LayerParameter, new: LayerParameter) -> None:
    for name in ("bottom", "top", "loss_weight"):
        getattr(new, name).extend(getattr(old, name))
    for name in ("include", "exclude", "blobs"):
        getattr(new, name).MergeFrom(getattr(old, name))
    if old.HasField("name"):
        new.name = old.name
    if old.HasField("type"):
        new.type = _TYPES[old.LayerType.Name(old.type)]
    for name in _SAME_IN_BOTH:
        if old.HasField(name):
            getattr(new, name).CopyFrom(getattr(old, name))
    for old_name, name in (
        ("param", "name"),
        ("blob_share_mode", "share_mode"),
        ("blobs_lr", "lr_mult"),
        ("weight_decay", "decay_mult"),
    ):
        for index, value in enumerate(getattr(old, old_name)):
            if index == len(new.param):
                new.param.add()
            setattr(new.param[index], name, value)
    _move_transforms(new)


def _move_transforms(layer: LayerParameter) -> None:
    """Move what a source of images does to them from its own parameters to ``transform_param``."""
    own_name = _IMAGE_SOURCES.get(layer.type)
    if own_name is None or not layer.HasField(own_name):
        return
    own = getattr(layer, own_name)
    for name in _TRANSFORMS:
        if own.HasField(name):
            setattr(layer.transform_param, name, getattr(own, name))
            own.ClearField(name)


def _warn_of_old_transforms(layer: LayerParameter, source: str) -> None:
    """In the newer form Caffe reads these fields and does not use them."""
    own_name = _IMAGE_SOURCES.get(layer.type)
    if own_name is None or layer.type == "WindowData":
        return
    unused = [name for name in _TRANSFORMS if getattr(layer, own_name).HasField(name)]
    if unused:
        warn(
            f"{source}: layer {layer.name!r}: {own_name} has {', '.join(unused)}, which Caffe does not use there; "
            "transform_param would do"
        )


def _upgrade_inputs(net: NetParameter, source: str) -> None:
    """Put a layer of type ``Input`` in front that has the network's inputs as its tops."""
    shapes, sizes, count = net.input_shape, net.input_dim, len(net.input)
    if not shapes and not sizes and not net.layer:
        # A model without layers: nothing reads the inputs.
        net.ClearField("input")
        return
    dims: list[Any] = [list(shape.dim) for shape in shapes]
    if not dims:
        dims = [list(sizes[start : start + 4]) for start in range(0, len(sizes), 4)]
    given = f"{len(shapes)} input_shape" if shapes else f"{len(sizes)} input_dim"
    if len(dims) != count or (not shapes and len(sizes) % 4):
        raise CaffeError(
            f"{source}: {count} input and {given}; one input_shape or four input_dim for each input would do"
        )
    layer = LayerParameter(name="input", type="Input", top=list(net.input))
    for dim in dims:
        layer.input_param.shape.add(dim=dim)
    reordered = NetParameter(layer=[layer, *net.layer])
    net.ClearField("layer")
    net.layer.extend(reordered.layer)
    for name in ("input", "input_shape", "input_dim"):
        net.ClearField(name)
