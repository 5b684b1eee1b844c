"""Networks that are wrong in one place: the error names its line, its column, and the field."""

from __future__ import annotations

import re

import pytest

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.files import read_net

NET = """name: "net"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [1, 3, 8, 8] } } }
layer {
  name: "conv" type: "Convolution" bottom: "data" top: "conv"
  %s
}
layer { name: "prob" type: "Softmax" bottom: "conv" top: "prob" }
"""
MALFORMED = [
    ("convolution_param { num_output: -4 }", 5, 35, "layer 'conv', convolution_param, num_output"),
    ("convolution_param { num_output: 4.5 }", 5, 35, "layer 'conv', convolution_param, num_output"),
    ('convolution_param { num_output: "4" }', 5, 35, "layer 'conv', convolution_param, num_output"),
    ("convolution_param { num_output: four }", 5, 35, "layer 'conv', convolution_param, num_output"),
    ("convolution_param { num_output: 99999999999 }", 5, 35, "layer 'conv', convolution_param, num_output"),
    ("convolution_param { num_output 4 }", 5, 34, "layer 'conv', convolution_param, num_output"),
    ("convolution_param { num_output: }", 5, 35, "layer 'conv', convolution_param, num_output"),
    ("convolution_param { bias_term: maybe }", 5, 34, "layer 'conv', convolution_param, bias_term"),
    ("convolution_param { weight_filler { std: big } }", 5, 44, "layer 'conv', convolution_param, weight_filler, std"),
    (
        "convolution_param { weight_filler { type: gaussian } }",
        5,
        45,
        "layer 'conv', convolution_param, weight_filler, type",
    ),
    (
        "convolution_param { weight_filler { variance_norm: FAN } }",
        5,
        54,
        "layer 'conv', convolution_param, weight_filler, variance_norm",
    ),
    ("convolution_param { engine: FAST }", 5, 31, "layer 'conv', convolution_param, engine"),
    ("convolution_param: 3", 5, 22, "layer 'conv', convolution_param"),
    ("convolution_param { kernel_size: [3, ] }", 5, 40, "layer 'conv', convolution_param, kernel_size"),
    ("convolution_param { kernel_size: [3 3] }", 5, 39, "layer 'conv', convolution_param, kernel_size"),
    ("convolution_param { kernel_size: [3, 3 }", 5, 42, "layer 'conv', convolution_param, kernel_size"),
    ("convolution_param { num_output: 4 ]", 5, 37, "layer 'conv', convolution_param, num_output"),
    ("convolution_param [ num_output: 4 ]", 5, 21, "layer 'conv', convolution_param"),
    ("convolution_param { num_output: 4 num_output: 5 }", 5, 49, "layer 'conv', convolution_param, num_output"),
    ("bottom: data", 5, 11, "layer 'conv', bottom"),
    ('top: "a', 5, 8, "layer 'conv', top"),
    ("loss_weight: heavy", 5, 16, "layer 'conv', loss_weight"),
    ("propagate_down: 2", 5, 19, "layer 'conv', propagate_down"),
    ("phase: VALIDATE", 5, 10, "layer 'conv', phase"),
    ("include { phase: TRAIN", 7, 65, "layer 'conv', layer 'prob', top"),
    ("param { lr_mult: }", 5, 20, "layer 'conv', param, lr_mult"),
    ("param { lr_mult: 1,, }", 5, 22, "layer 'conv', param, lr_mult"),
    ("param: { lr_mult = 1 }", 5, 20, "layer 'conv', param, lr_mult"),
    ("blobs { data: x }", 5, 17, "layer 'conv', blobs, data"),
    ("3", 6, 1, "layer 'conv', 3"),
    ("include { stage: 5 }", 5, 20, "layer 'conv', include, stage"),
    ("param { share_mode: LAX }", 5, 23, "layer 'conv', param, share_mode"),
    ("dropout_param { dropout_ratio: .5.5 }", 5, 34, "layer 'conv', dropout_param, dropout_ratio"),
    ("inner_product_param { axis: 1e3 }", 5, 31, "layer 'conv', inner_product_param, axis"),
    ("type: 'x\" ", 5, 9, "layer 'conv', type"),
]
"""What stands in line 5, where the error is, and in which field."""


def test_without_the_fault_the_network_is_read() -> None:
    assert len(read_net(NET % "convolution_param { num_output: 4 }").layer) == 3


@pytest.mark.parametrize(("fault", "line", "column", "field"), MALFORMED)
def test_a_fault_is_found_at_its_place(fault: str, line: int, column: int, field: str) -> None:
    with pytest.raises(CaffeError) as caught:
        read_net(NET % fault)
    found = re.match(r"the text, line (\d+), column (\d+): (.*?): ", str(caught.value))
    assert found is not None, str(caught.value)
    assert (int(found[1]), int(found[2]), found[3]) == (line, column, field)
