"""Networks of layers that OpenCV reads too, with the same weights, against OpenCV's results."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from tilewise.frontends.caffe import read_net_from_caffe
from tilewise.frontends.caffe.files import write_weights

INPUT = 'name: "n" layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [2, 6, 13, 11] } } }\n'
LAYERS = {
    "convolution": 'type: "Convolution" convolution_param { num_output: 4 kernel_size: 3 stride: 2 pad: 1 group: 2 }',
    "dilation": 'type: "Convolution" convolution_param { num_output: 4 kernel_size: 3 dilation: 2 bias_term: false }',
    "deconvolution": 'type: "Deconvolution" convolution_param { num_output: 4 kernel_size: 4 stride: 2 pad: 1 }',
    "relu": 'type: "ReLU" relu_param { negative_slope: 0.1 }',
    "prelu": 'type: "PReLU"',
    "max": 'type: "Pooling" pooling_param { kernel_size: 3 stride: 2 }',
    "max_padded": 'type: "Pooling" pooling_param { kernel_size: 2 stride: 2 pad: 1 }',
    "mean": 'type: "Pooling" pooling_param { pool: AVE kernel_size: 3 stride: 2 }',
    "global": 'type: "Pooling" pooling_param { pool: AVE global_pooling: true }',
    "inner": 'type: "InnerProduct" inner_product_param { num_output: 5 }',
    "softmax": 'type: "Softmax"',
    "lrn": 'type: "LRN" lrn_param { local_size: 5 alpha: 0.3 beta: 0.75 }',
    "batchnorm": 'type: "BatchNorm" batch_norm_param { use_global_stats: true }',
    "scale": 'type: "Scale" scale_param { bias_term: true }',
    "permute": 'type: "Permute" permute_param { order: [0, 2, 3, 1] }',
    "flatten": 'type: "Flatten"',
    "reshape": 'type: "Reshape" reshape_param { shape { dim: [0, 3, -1, 11] } }',
    "power": 'type: "Power" power_param { power: 2 scale: 0.5 shift: 1 }',
    "elu": 'type: "ELU"',
    "sigmoid": 'type: "Sigmoid"',
    "tanh": 'type: "TanH"',
    "absval": 'type: "AbsVal"',
    "bnll": 'type: "BNLL"',
    "shuffle": 'type: "ShuffleChannel" shuffle_channel_param { group: 3 }',
    "normalize": 'type: "Normalize" norm_param { across_spatial: false channel_shared: false }',
    "priorbox": (
        'type: "PriorBox" bottom: "data" prior_box_param { min_size: [3, 5] max_size: [4, 7] aspect_ratio: [2, 3] '
        "variance: [0.1, 0.1, 0.2, 0.2] clip: true }"
    ),
    "concat": 'type: "Concat" bottom: "data" concat_param { axis: 2 }',
    "eltwise": 'type: "Eltwise" bottom: "data" eltwise_param { coeff: [2, -0.5] }',
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_gives_opencvs_numbers(name: str, tmp_path: Path) -> None:
    text = INPUT + f'layer {{ name: "it" bottom: "data" top: "it" {LAYERS[name]} }}'
    mine = read_net_from_caffe(text)
    weights = mine.net.weights()
    generator = np.random.default_rng(1)
    for arrays in weights.values():
        for array in arrays:
            array[...] = generator.uniform(0.25, 1, array.shape)
    (tmp_path / "n.prototxt").write_text(text)
    files = [str(tmp_path / "n.prototxt")]
    if weights:
        files.append(str(tmp_path / "n.caffemodel"))
        write_weights(files[1], weights)
    theirs = cv2.dnn.readNetFromCaffe(*files)
    x = generator.standard_normal((2, 6, 13, 11)).astype(np.float32)
    mine.setInput(x)
    theirs.setInput(x)
    found, wanted = mine.forward(), theirs.forward()
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


DETECTION = """
layer { name: "loc" type: "Input" top: "loc" input_param { shape { dim: [1, 80] } } }
layer { name: "conf" type: "Input" top: "conf" input_param { shape { dim: [1, 60] } } }
layer { name: "prior" type: "Input" top: "prior" input_param { shape { dim: [1, 2, 80] } } }
layer { name: "out" type: "DetectionOutput" bottom: "loc" bottom: "conf" bottom: "prior" top: "out"
  detection_output_param { num_classes: 3 share_location: true background_label_id: 0
    nms_param { nms_threshold: 0.3 top_k: 15 } code_type: CENTER_SIZE
    keep_top_k: 9 confidence_threshold: 0.2 } }
"""


@pytest.mark.parametrize("seed", range(4))
def test_detections_are_opencvs(seed: int, tmp_path: Path) -> None:
    (tmp_path / "n.prototxt").write_text(DETECTION)
    mine, theirs = read_net_from_caffe(DETECTION), cv2.dnn.readNetFromCaffe(str(tmp_path / "n.prototxt"))
    generator = np.random.default_rng(seed)
    corners = generator.uniform(0, 0.6, (20, 2))
    boxes = np.concatenate([corners, corners + generator.uniform(0.1, 0.4, (20, 2))], 1)
    inputs = {
        "loc": generator.uniform(-0.5, 0.5, (1, 80)),
        "conf": generator.uniform(0, 1, (1, 60)),
        "prior": np.stack([boxes.ravel(), np.tile([0.1, 0.1, 0.2, 0.2], 20)])[None],
    }
    for name, value in inputs.items():
        mine.setInput(value.astype(np.float32), name)
        theirs.setInput(value.astype(np.float32), name)
    found, wanted = mine.forward(), theirs.forward()
    assert found.shape[2] > 1

    def rows(boxes: np.ndarray) -> np.ndarray:
        return np.array(sorted(map(tuple, boxes.reshape(-1, 7).round(4))))

    np.testing.assert_allclose(rows(found), rows(wanted), rtol=0, atol=2e-4)


def test_the_readers_methods_name_layers_and_take_arrays() -> None:
    reader = read_net_from_caffe(INPUT + 'layer { name: "it" bottom: "data" top: "out" type: "ReLU" }')
    assert reader.getLayerNames() == reader.getUnconnectedOutLayersNames() == ("it",)
    reader.setInput(-np.ones((1, 6, 2, 2)))
    assert not reader.forward("it").any()
    first, second = reader.forward(["data", "out"])
    assert (first.min(), second.max()) == (-1, 0)
    with pytest.raises(ValueError, match="no input"):
        reader.setInput(first, "other")
    with pytest.raises(ValueError, match="no layer"):
        reader.forward("other")
    assert not reader.empty()
    assert torch.is_grad_enabled()
