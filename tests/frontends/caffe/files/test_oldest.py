"""Networks of 2013: ``layers { layer { } }``, with layers for padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from google.protobuf import text_format

from tilewise.frontends import caffe
from tilewise.frontends.caffe.errors import CaffeError, CaffeWarning
from tilewise.frontends.caffe.files import read_net, read_weights
from tilewise.frontends.caffe.schema import BlobProto, NetParameter

FILL = 'weight_filler { type: "gaussian" std: 0.01 } bias_filler { type: "constant" value: 1 }'
OLD = f"""
name: "CaffeNet"
layers {{ layer {{ name: "data" type: "data" source: "train-leveldb" meanfile: "mean" batchsize: 5 cropsize: 27
  mirror: true scale: 0.5 rand_skip: 3 }} top: "data" top: "label" }}
layers {{ layer {{ name: "conv1" type: "conv" num_output: 6 kernelsize: 3 stride: 2 {FILL} blobs_lr: 1. blobs_lr: 2.
  weight_decay: 1. weight_decay: 0. }} bottom: "data" top: "conv1" }}
layers {{ layer {{ name: "relu1" type: "relu" }} bottom: "conv1" top: "conv1" }}
layers {{ layer {{ name: "pool1" type: "pool" pool: MAX kernelsize: 3 stride: 2 }} bottom: "conv1" top: "pool1" }}
layers {{ layer {{ name: "norm1" type: "lrn" local_size: 5 alpha: 0.0001 beta: 0.75 }} bottom: "pool1" top: "norm1" }}
layers {{ layer {{ name: "pad2" type: "padding" pad: 2 }} bottom: "norm1" top: "pad2" }}
layers {{ layer {{ name: "conv2" type: "conv" num_output: 4 group: 2 kernelsize: 5 biasterm: false }}
  bottom: "pad2" top: "conv2" }}
layers {{ layer {{ name: "pad3" type: "padding" pad: 1 }} bottom: "conv2" top: "pad3" }}
layers {{ layer {{ name: "pool2" type: "pool" pool: AVE kernelsize: 3 stride: 2 }} bottom: "pad3" top: "pool2" }}
layers {{ layer {{ name: "fc" type: "innerproduct" num_output: 3 {FILL} blobs_lr: 1. blobs_lr: 2. }}
  bottom: "pool2" top: "fc" }}
layers {{ layer {{ name: "drop" type: "dropout" dropout_ratio: 0.25 }} bottom: "fc" top: "fc" }}
layers {{ layer {{ name: "loss" type: "softmax_loss" }} bottom: "fc" bottom: "label" }}
"""
NEW = f"""
name: "CaffeNet"
layer {{ name: "data" type: "Data" top: "data" top: "label"
  data_param {{ source: "train-leveldb" batch_size: 5 rand_skip: 3 }}
  transform_param {{ scale: 0.5 mirror: true crop_size: 27 mean_file: "mean" }} }}
layer {{ name: "conv1" type: "Convolution" bottom: "data" top: "conv1" param {{ lr_mult: 1 decay_mult: 1 }}
  param {{ lr_mult: 2 decay_mult: 0 }} convolution_param {{ num_output: 6 kernel_size: 3 stride: 2 {FILL} }} }}
layer {{ name: "relu1" type: "ReLU" bottom: "conv1" top: "conv1" }}
layer {{ name: "pool1" type: "Pooling" bottom: "conv1" top: "pool1"
  pooling_param {{ pool: MAX kernel_size: 3 stride: 2 }} }}
layer {{ name: "norm1" type: "LRN" bottom: "pool1" top: "norm1"
  lrn_param {{ local_size: 5 alpha: 0.0001 beta: 0.75 }} }}
layer {{ name: "conv2" type: "Convolution" bottom: "norm1" top: "conv2"
  convolution_param {{ num_output: 4 group: 2 kernel_size: 5 pad: 2 bias_term: false }} }}
layer {{ name: "pool2" type: "Pooling" bottom: "conv2" top: "pool2"
  pooling_param {{ pool: AVE kernel_size: 3 stride: 2 pad: 1 }} }}
layer {{ name: "fc" type: "InnerProduct" bottom: "pool2" top: "fc" param {{ lr_mult: 1 }} param {{ lr_mult: 2 }}
  inner_product_param {{ num_output: 3 {FILL} }} }}
layer {{ name: "drop" type: "Dropout" bottom: "fc" top: "fc" dropout_param {{ dropout_ratio: 0.25 }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "fc" bottom: "label" }}
"""


def test_each_layer_becomes_what_it_is_today_and_padding_goes_into_its_readers() -> None:
    assert text_format.MessageToString(read_net(OLD)) == text_format.MessageToString(read_net(NEW))


def test_images_windows_and_hdf5_keep_their_fields() -> None:
    net = read_net("""
layers { layer { name: "i" type: "images" source: "list" batchsize: 2 shuffle_images: true new_height: 8 new_width: 9
  cropsize: 4 } top: "i" }
layers { layer { name: "w" type: "window_data" source: "windows" batchsize: 2 cropsize: 4 det_fg_threshold: 0.6
  det_bg_threshold: 0.4 det_fg_fraction: 0.3 det_context_pad: 16 det_crop_mode: "square" meanfile: "m" } top: "w" }
layers { layer { name: "h" type: "hdf5_data" source: "files" batchsize: 2 } top: "h" }
layers { layer { name: "o" type: "hdf5_output" hdf5_output_param { file_name: "out.h5" } } bottom: "h" bottom: "i" }
layers { layer { name: "c" type: "concat" concat_dim: 0 } bottom: "h" bottom: "i" top: "c" }
""")
    images, windows, rows, output, joined = net.layer
    assert (images.image_data_param.shuffle, images.image_data_param.new_width) == (True, 9)
    assert images.transform_param.crop_size == 4
    p = windows.window_data_param
    assert (p.context_pad, p.crop_mode, windows.transform_param.mean_file) == (16, "square", "m")
    assert [p.fg_threshold, p.bg_threshold, p.fg_fraction] == pytest.approx([0.6, 0.4, 0.3])
    assert (rows.hdf5_data_param.source, rows.hdf5_data_param.batch_size) == ("files", 2)
    assert output.hdf5_output_param.file_name == "out.h5"
    assert joined.concat_param.concat_dim == 0


def test_weights_of_2013_are_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    shapes = {"conv1": [(6, 3, 3, 3), (1, 1, 1, 6)], "conv2": [(4, 3, 5, 5)], "fc": [(1, 1, 3, 64), (1, 1, 1, 3)]}
    model, arrays = NetParameter(), {}
    for name, found in shapes.items():
        layer = model.layers.add().layer
        layer.name, layer.type = name, "conv"
        arrays[name] = [rng.standard_normal(shape).astype(np.float32) for shape in found]
        for array in arrays[name]:
            blob = BlobProto(data=array.reshape(-1))
            blob.num, blob.channels, blob.height, blob.width = array.shape
            layer.blobs.append(blob)
    path = tmp_path / "net.caffemodel"
    path.write_bytes(model.SerializeToString())
    for name, blobs in read_weights(path).items():
        for mine, theirs in zip(blobs, arrays[name], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    net = caffe.load(OLD, path, shapes={"data": (2, 3, 27, 27), "label": (2,)})
    x = torch.from_numpy(rng.standard_normal((2, 3, 27, 27)).astype(np.float32))
    assert list(net(x, torch.zeros(2, dtype=torch.float32, device="cpu"))) == ["loss"]
    assert net.blobs["pool2"].shape == (2, 4, 4, 4)
    conv1 = torch.nn.functional.conv2d(x, torch.from_numpy(arrays["conv1"][0]), None, 2)
    conv1 = (conv1 + torch.from_numpy(arrays["conv1"][1]).reshape(6, 1, 1)).relu()
    torch.testing.assert_close(net.blobs["conv1"], conv1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('layers { layer { name: "a" type: "convolution" } }', "layer 'a' has the type 'convolution', .* 2013 do not"),
        (
            'layers { layer { name: "a" type: "relu" stride: 2 } }',
            r"'a' \(relu\) has the field stride, .*it takes none",
        ),
        (
            'layers { layer { name: "a" type: "relu" } } layers { name: "b" type: RELU }',
            "layer 1 is no layers { layer {",
        ),
        ('layers { layer { name: "p" type: "padding" pad: 1 } top: "p" }', r"'p' \(padding\) has 0 bottoms and 1 tops"),
        (
            'layers { layer { name: "p" type: "padding" pad: 1 } bottom: "x" top: "p" } '
            'layers { layer { name: "r" type: "relu" } bottom: "p" top: "r" }',
            r"'r' \(relu\) reads a padding layer; a layer of type conv or pool would do",
        ),
    ],
)
def test_what_no_network_of_2013_has_is_an_error(text: str, words: str) -> None:
    with pytest.raises(CaffeError, match=words):
        read_net(text)


def test_unknown_fields_of_the_oldest_layers_are_named() -> None:
    with pytest.warns(CaffeWarning, match=r"layers, layer 'a', colour \(line 1\)"):
        read_net('layers { layer { name: "a" type: "relu" colour: 3 } bottom: "x" top: "x" }')
