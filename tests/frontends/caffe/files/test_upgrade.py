"""Networks and solvers of older versions of Caffe."""

from __future__ import annotations

import math

import cv2
import numpy as np
import pytest
from google.protobuf import text_format

from tilewise.frontends.caffe.errors import CaffeError, CaffeWarning
from tilewise.frontends.caffe.files import read_net, read_solver
from tilewise.frontends.caffe.files import upgrade as upgrade_module
from tilewise.frontends.caffe.schema import BlobProto, LayerParameter, NetParameter, V1LayerParameter

OLD_NET = """
name: "old"
input: "data" input_dim: 1 input_dim: 3 input_dim: 9 input_dim: 7
layers { name: "conv" type: CONVOLUTION bottom: "data" top: "conv" blobs_lr: 1 blobs_lr: 2 weight_decay: 1
  weight_decay: 0 convolution_param { num_output: 4 kernel_size: 3 pad: 1 } }
layers { name: "relu" type: RELU bottom: "conv" top: "conv" }
layers { name: "lrn" type: LRN bottom: "conv" top: "lrn" lrn_param { local_size: 3 alpha: 0.5 } }
layers { name: "pool" type: POOLING bottom: "lrn" top: "pool" pooling_param { pool: AVE kernel_size: 3 stride: 2 } }
layers { name: "prob" type: SOFTMAX bottom: "pool" top: "prob" }
"""


def test_old_layers_get_new_types_and_keep_all_else() -> None:
    net = read_net(OLD_NET)
    assert [layer.type for layer in net.layer] == ["Input", "Convolution", "ReLU", "LRN", "Pooling", "Softmax"]
    assert not net.layers
    assert not net.input
    assert not net.input_dim
    conv = net.layer[1]
    assert [(spec.lr_mult, spec.decay_mult) for spec in conv.param] == [(1, 1), (2, 0)]
    assert (list(conv.bottom), list(conv.top), list(conv.convolution_param.pad)) == (["data"], ["conv"], [1])
    assert net.layer[3].lrn_param.alpha == 0.5
    assert list(net.layer[0].input_param.shape[0].dim) == [1, 3, 9, 7]
    assert list(net.layer[0].top) == ["data"]


def test_opencv_reads_the_old_text_and_ours_of_today_alike() -> None:
    rng = np.random.default_rng(5)
    image = rng.standard_normal((1, 3, 9, 7), np.float32)
    old, new = V1LayerParameter(name="conv", type="CONVOLUTION"), LayerParameter(name="conv", type="Convolution")
    for shape in ((4, 3, 3, 3), (1, 1, 1, 4)):
        blob = BlobProto(data=rng.standard_normal(math.prod(shape)))
        blob.num, blob.channels, blob.height, blob.width = shape
        old.blobs.append(blob)
        new.blobs.append(blob)
    results = []
    for text, model in (
        (OLD_NET, NetParameter(layers=[old])),
        (text_format.MessageToString(read_net(OLD_NET)), NetParameter(layer=[new])),
    ):
        buffers = [np.frombuffer(data, np.uint8) for data in (text.encode(), model.SerializeToString())]
        net = cv2.dnn.readNetFromCaffe(*buffers)
        net.setInput(image)
        results.append(net.forward())
    assert results[0].shape == (1, 4, 4, 3)
    np.testing.assert_array_equal(results[0], results[1])


def test_every_old_type_has_a_new_name() -> None:
    names = V1LayerParameter.DESCRIPTOR.enum_types_by_name["LayerType"].values_by_name
    assert set(upgrade_module._TYPES) == set(names)


@pytest.mark.parametrize(
    ("kind", "field"),
    [("DATA", "data_param"), ("IMAGE_DATA", "image_data_param"), ("WINDOW_DATA", "window_data_param")],
)
def test_what_old_sources_do_to_images_moves_to_their_transform(kind: str, field: str) -> None:
    own = 'source: "s" scale: 0.25 mean_file: "m" crop_size: 5 mirror: true batch_size: 2'
    layer = read_net(f'layers {{ name: "d" type: {kind} {field} {{ {own} }} }}').layer[0]
    transform, rest = layer.transform_param, getattr(layer, field)
    assert (transform.scale, transform.mean_file, transform.crop_size, transform.mirror) == (0.25, "m", 5, True)
    assert (rest.source, rest.batch_size) == ("s", 2)
    assert not any(rest.HasField(name) for name in ("scale", "mean_file", "crop_size", "mirror"))


def test_a_source_of_today_with_old_fields_is_warned_of() -> None:
    with pytest.warns(CaffeWarning, match=r"layer 'd': data_param has crop_size, which Caffe does not use there"):
        net = read_net('layer { name: "d" type: "Data" data_param { crop_size: 5 } }')
    assert net.layer[0].transform_param.crop_size == 0


def test_names_and_modes_of_shared_blobs() -> None:
    layer = read_net('layers { type: INNER_PRODUCT param: "w" param: "b" blob_share_mode: PERMISSIVE }').layer[0]
    assert [(spec.name, spec.share_mode) for spec in layer.param] == [("w", 1), ("b", 0)]
    assert not layer.param[1].HasField("share_mode")
    assert not layer.param[0].HasField("lr_mult")


def test_inputs_with_shapes_become_one_layer_in_front() -> None:
    net = read_net('input: "a" input: "b" input_shape { dim: 2 dim: 3 } input_shape { dim: 7 }\nlayer { name: "x" }')
    assert [layer.name for layer in net.layer] == ["input", "x"]
    assert list(net.layer[0].top) == ["a", "b"]
    assert [list(shape.dim) for shape in net.layer[0].input_param.shape] == [[2, 3], [7]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layers { type: RELU } layer { }", "layers of both forms, 1 in layers { } and 1 in layer { }"),
        ('input: "a" layer { }', "1 input and 0 input_dim; one input_shape or four input_dim for each"),
        ('input: "a" input_dim: 1 input_dim: 2 input_dim: 3\n', "1 input and 3 input_dim"),
        ('input: "a" input: "b" input_shape { dim: 2 }\n', "2 input and 1 input_shape"),
        ('input: "a" input_dim: 1 input_dim: 2 input_dim: 3 input_dim: 4 input_dim: 5\n', "1 input and 5 input_dim"),
    ],
)
def test_what_cannot_be_brought_up_to_date_is_said(text: str, words: str) -> None:
    with pytest.raises(CaffeError, match=words):
        read_net(text)


def test_batch_norm_with_three_parameters_learns_none() -> None:
    net = read_net('layer { type: "BatchNorm" param { lr_mult: 1 } param { } param { decay_mult: 2 } }')
    assert [(spec.lr_mult, spec.decay_mult) for spec in net.layer[0].param] == [(0, 0)] * 3
    net = read_net('layer { type: "BatchNorm" param { lr_mult: 1 } param { } }')
    assert [(spec.lr_mult, spec.decay_mult) for spec in net.layer[0].param] == [(1, 1)] * 2


@pytest.mark.parametrize(
    ("old", "new"), [("SGD", "SGD"), ("NESTEROV", "Nesterov"), ("ADAGRAD", "AdaGrad"), ("1", "Nesterov"), ("5", "Adam")]
)
def test_the_old_type_of_a_solver(old: str, new: str) -> None:
    solver = read_solver(f"solver_type: {old}\n")
    assert solver.type == new
    assert not solver.HasField("solver_type")


def test_networks_inside_a_solver_are_brought_up_to_date() -> None:
    old = 'layers { type: RELU name: "r" }'
    solver = read_solver(f"net_param {{ {old} }} train_net_param {{ {old} }} test_net_param {{ {old} }}")
    for net in (solver.net_param, solver.train_net_param, solver.test_net_param[0]):
        assert [(layer.type, layer.name) for layer in net.layer] == [("ReLU", "r")]
    with pytest.raises(CaffeError, match="test_net_param 0: layer '' has the type ''"):
        read_solver("test_net_param { layers { layer { } } }")
    with pytest.raises(CaffeError, match="solver_type = ADAM and type = 'SGD'; type alone would do"):
        read_solver('solver_type: ADAM type: "SGD"\n')
