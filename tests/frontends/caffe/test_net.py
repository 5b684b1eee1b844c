"""Networks of Caffe's layers: what they check, share, load and return."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from tests.frontends.caffe.layers.nets import net
from torch import nn

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.files import read_weights
from tilewise.frontends.layers import convolution_layers
from tilewise.frontends.networks import load_network

DATA = 'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [2, 3, 8, 8] } } }\n'
LABEL = 'layer { name: "label" type: "Input" top: "label" input_param { shape { dim: 2 } } }\n'
CONV = """
layer { name: "conv.1" type: "Convolution" bottom: "data" top: "conv" param { lr_mult: 1 }
  param { lr_mult: 2 decay_mult: 0 }
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
"""
SCORES = """
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param { pool: AVE global_pooling: true } }
layer { name: "ip" type: "InnerProduct" bottom: "pool" top: "ip"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
"""
LOSS = 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" loss_weight: 0.5 }\n'


def relu(name: str, bottom: str, top: str) -> str:
    return f'layer {{ name: "{name}" type: "ReLU" bottom: "{bottom}" top: "{top}" }}\n'


def test_a_network_computes_loss_and_gradients_for_any_size() -> None:
    made = net(DATA + LABEL + CONV + SCORES + LOSS, "train")
    for size in ((2, 3, 8, 8), (5, 3, 11, 6)):
        x, y = torch.randn(*size), torch.zeros(size[0])
        outputs = made(x, label=y)
        assert list(outputs) == ["loss"]
        conv, linear = made.layers["conv.1"].get_submodule("conv"), made.layers["ip"].get_submodule("linear")
        wanted = nn.functional.cross_entropy(linear(conv(x).relu().mean((2, 3))), y.long())
        torch.testing.assert_close(outputs["loss"], wanted)
        torch.testing.assert_close(made.loss, 0.5 * wanted)
        assert (made.blobs["conv"] >= 0).all()
        made.zero_grad()
        assert made.loss is not None
        made.loss.backward()
        assert all(each.parameter.grad is not None for each in made.learnable)
    assert [(each.name, each.lr_mult, each.decay_mult) for each in made.learnable] == [
        ("conv.1[0]", 1, 1),
        ("conv.1[1]", 2, 0),
        ("ip[0]", 1, 1),
        ("ip[1]", 1, 1),
    ]


def test_a_layer_that_reads_a_tensor_before_an_in_place_one_sees_it_as_it_was() -> None:
    made = net(DATA + relu("a", "data", "a") + 'layer { name: "p" type: "Power" bottom: "a" top: "p" }'
               + 'layer { name: "neg" type: "Power" bottom: "a" top: "a" power_param { scale: -1 } }')  # fmt: skip
    x = torch.randn(2, 3, 8, 8)
    made(x)
    torch.testing.assert_close(made.blobs["p"], x.relu())
    torch.testing.assert_close(made.blobs["a"], -x.relu())


def test_layers_share_parameters_by_name_and_count_once() -> None:
    def product(name: str, bottom: str, extra: str = "") -> str:
        return (
            f'layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{name}" param {{ name: "w" }} '
            f"inner_product_param {{ num_output: 192 bias_term: false {extra} }} }}"
        )

    made = net(DATA + product("a", "data") + product("b", "a", "transpose: true"))
    assert [each.name for each in made.learnable] == ["w"]
    assert made.layers["a"].blob(0) is made.layers["b"].blob(0)
    assert len(list(made.parameters())) == 1
    twin = copy.deepcopy(made)
    assert twin.layers["a"].blob(0) is twin.layers["b"].blob(0) is twin.learnable[0].parameter
    with pytest.raises(CaffeError, match="'b': blob 0 of shape"):
        net(DATA + product("a", "data") + product("b", "a", "axis: 0"))


def test_propagate_down_and_lr_mult_of_zero_stop_gradients() -> None:
    stop = 'layer { name: "p" type: "Power" bottom: "conv" top: "p" propagate_down: false }'
    made = net(DATA + CONV + stop)
    made(torch.randn(2, 3, 8, 8))
    assert made.blobs["conv"].requires_grad
    assert not made.blobs["p"].requires_grad
    frozen = net(DATA + CONV.replace("lr_mult: 1", "lr_mult: 0"))
    assert [each.parameter.requires_grad for each in frozen.learnable] == [False, True]


def test_weights_go_in_and_out_by_name_whatever_axes_of_one_they_have() -> None:
    made, other = net(DATA + CONV + SCORES), net(DATA + CONV + SCORES)
    weights = {name: [array.copy() for array in arrays] for name, arrays in made.weights().items()}
    weights["ip"] = [array.reshape((1,) * (4 - array.ndim) + array.shape) for array in weights["ip"]]
    weights["gone"] = [np.zeros(3, np.float32)]
    del weights["conv.1"]
    report = other.load_weights(weights)
    assert (report.matched, report.unused, report.missing) == (("ip",), ("gone",), ("conv.1",))
    torch.testing.assert_close(other.layers["ip"].blob(0), made.layers["ip"].blob(0))
    with pytest.raises(CaffeError, match=r"layer 'ip'.*blob 0 has shape \(5, 3\)"):
        other.load_weights({"ip": [np.zeros((5, 3)), np.zeros(5)]})
    with pytest.raises(CaffeError, match="the file has 1 blobs"):
        other.load_weights({"ip": [np.zeros((5, 4))]})


def test_a_net_for_tests_shares_the_parameters_that_are_trained() -> None:
    trained, tested = net(DATA + CONV, "train"), net(DATA + CONV + SCORES, "test")
    tested.share_weights(trained)
    assert tested.layers["conv.1"].blob(0) is trained.layers["conv.1"].blob(0)
    assert trained.training
    assert not tested.training


def test_a_run_may_end_early_and_go_on() -> None:
    made = net(DATA + CONV + SCORES)
    x = torch.randn(2, 3, 8, 8)
    whole = made(x)["ip"]
    assert list(made(x, end="relu")) == ["conv"]
    torch.testing.assert_close(made(start="pool")["ip"], whole)
    with pytest.raises(CaffeError, match="start = 'none'"):
        made(x, start="none")


def test_copies_and_pickles_compute_the_same() -> None:
    made = net(DATA + CONV + SCORES)
    x = torch.randn(2, 3, 8, 8)
    wanted = made(x)["ip"]
    torch.testing.assert_close(copy.deepcopy(made)(x)["ip"], wanted)
    torch.testing.assert_close(pickle.loads(pickle.dumps(made))(x)["ip"], wanted)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (relu("a", "b", "a"), "bottom 'b' is made by no layer"),
        (relu("a", "b", "a") + relu("b", "a", "b"), "made only later, by layer 'b'"),
        (DATA + relu("a", "data", "x") + relu("b", "data", "x"), "top 'x' is already made by layer 'a'"),
        (DATA + 'layer { name: "a" type: "Relu" bottom: "data" top: "a" }', "did you mean 'ReLU'"),
        (DATA + relu("a", "data", "x").replace('top: "x"', 'top: "x" loss_weight: [1, 2]'), "2 loss_weight for 1 tops"),
        (DATA + relu("a", "data", "x").replace('top: "x"', 'top: "x" param { lr_mult: 1 }'), "1 param are given; 0"),
        (
            DATA + CONV + CONV.replace('top: "conv"', 'top: "other"').split("layer {")[1].join(["layer {", ""]),
            "same name",
        ),
    ],
)
def test_what_is_wrong_with_a_network_is_named(text: str, message: str) -> None:
    with pytest.raises(CaffeError, match=message):
        net(text)


def test_unknown_layers_are_listed_at_once() -> None:
    text = 'layer { name: "a" type: "Odd" } layer { name: "b" type: "Python" python_param { module: "m" layer: "L" } }'
    with pytest.raises(CaffeError, match=r"layer 'a' .*'Odd'.*layer 'b' .*register_python\('m', 'L'\)"):
        net(text)


def test_a_call_that_does_not_fit_names_inputs_and_layers() -> None:
    made = net(DATA + CONV + SCORES)
    with pytest.raises(CaffeError, match=r"layer 'conv.1' .*5 channels; 3"):
        made(torch.zeros(1, 5, 8, 8))
    with pytest.raises(CaffeError, match="the inputs are data"):
        made(torch.zeros(1), torch.zeros(1))
    with pytest.raises(CaffeError, match="'other' is no tensor"):
        made(other=torch.zeros(1))


def test_a_prototxt_is_a_network_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "n.prototxt"
    path.write_text(DATA + CONV)
    network = load_network(str(path))
    assert network.input_shape == (3, 8, 8)
    calls = convolution_layers(network.module, network.example_inputs(2))
    assert [(call.name, call.input_shape) for call in calls] == [("conv_1.conv", (2, 3, 8, 8))]


SHARED = """
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: [2, 3] } } }
layer { name: "a" type: "InnerProduct" bottom: "x" top: "a" param { name: "w" } param { name: "ab" }
  inner_product_param { num_output: 3 } }
layer { name: "b" type: "InnerProduct" bottom: "a" top: "b" param { } param { name: "ab" }
  inner_product_param { num_output: 3 } }
layer { name: "c" type: "InnerProduct" bottom: "b" top: "c" param { name: "w" } param { }
  inner_product_param { num_output: 3 } }
layer { name: "d" type: "InnerProduct" bottom: "c" top: "d" param { name: "w" } param { name: "ab" }
  inner_product_param { num_output: 3 } }
"""


def test_hdf5_weights_leave_out_what_layers_share(tmp_path: Path) -> None:
    """As Caffe writes them: each blob once, under the layer that has it first."""
    path = tmp_path / "net.h5"
    weights = {"a/0": np.full((3, 3), 1), "a/1": np.full(3, 2), "b/0": np.full((3, 3), 3), "c/1": np.full(3, 4)}
    with h5py.File(path, "w") as file:
        file.create_group("data/d")
        for name, values in weights.items():
            file.create_dataset(f"data/{name}", data=values.astype(np.float32))
    made = net(SHARED)
    report = made.load_weights(read_weights(path))
    assert (sorted(report.matched), report.unused, report.missing) == (["a", "b", "c"], (), ())
    found = {name: [float(blob.detach().flatten()[0]) for blob in layer.blobs] for name, layer in made.layers.items()}
    assert found == {"a": [1, 2], "b": [3, 2], "c": [1, 4], "d": [1, 2]}
    with h5py.File(path, "a") as file:
        del file["data/a/1"]
    with pytest.raises(CaffeError, match=r"layer '[ab]' .*the file has 1 blobs of shapes \[\(3, 3\)\]; 2 would do"):
        net(SHARED).load_weights(read_weights(path))
    with h5py.File(path, "a") as file:
        del file["data/c/1"], file["data/a/0"]
        file.create_dataset("data/a/1", data=np.zeros(3, np.float32))
    with pytest.raises(CaffeError, match=r"layer 'a' .*the file has 2 blobs of shapes \[None, \(3,\)\]; 2 would do"):
        net(SHARED).load_weights(read_weights(path))


def test_losses_without_a_top_count_under_their_own_names() -> None:
    text = """
layer { name: "data" type: "Input" top: "x" top: "y" input_param { shape { dim: [2, 3] } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "a" inner_product_param { num_output: 3 } }
layer { name: "a" type: "EuclideanLoss" bottom: "a" bottom: "y" }
layer { name: "b" type: "EuclideanLoss" bottom: "x" bottom: "y" loss_weight: 2 }
"""
    made = net(text, "train")
    x, y = (torch.randn(2, 3, dtype=torch.float32, device="cpu") for _ in range(2))
    found = made(x, y)
    assert list(found) == ["a_", "b"]
    assert made.loss is not None
    torch.testing.assert_close(made.loss, found["a_"] + 2 * (x - y).square().sum() / 4)


def test_layers_of_data_that_nothing_reads_are_inputs_where_their_shapes_are_given() -> None:
    text = """
layer { name: "data" type: "AnnotatedData" top: "data" top: "label" }
layer { name: "pool" type: "Pooling" bottom: "data" top: "pool" pooling_param { kernel_size: 2 } }
layer { name: "label" type: "Silence" bottom: "label" }
"""
    with pytest.raises(CaffeError, match=r"'AnnotatedData'.*shapes=\{'data': \(\.\.\.\), 'label': \(\.\.\.\)\}"):
        net(text)
    with pytest.raises(CaffeError, match="'AnnotatedData'"):
        net(text, shapes={"data": (1, 3, 4, 4)})
    made = net(text, shapes={"data": (1, 3, 4, 4), "label": (1, 1, 1, 8)})
    assert made.inputs == ("data", "label")
    x = torch.zeros(1, 3, 4, 4, dtype=torch.float32, device="cpu")
    assert made(x, x)["pool"].shape == (1, 3, 3, 3)
    with pytest.raises(CaffeError, match="input 'label' was not given; the inputs are data, label"):
        made(x)
