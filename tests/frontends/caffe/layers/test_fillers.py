"""What blobs hold before training, by its distribution, and the layer that is nothing but a blob."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from google.protobuf import text_format
from tests.frontends.caffe.layers.nets import layer, net
from torch import Tensor

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.layers.fillers import FILLERS, fill
from tilewise.frontends.caffe.schema import FillerParameter

SHAPE = (200, 60, 3, 3)
COUNT = math.prod(SHAPE)
FAN_IN, FAN_OUT = 60 * 9, 200 * 9


def fail(text: str) -> Any:
    raise CaffeError(text)


def filled(text: str, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """A blob in float64, filled as a ``FillerParameter`` says."""
    tensor = torch.full(shape, math.nan, dtype=torch.float64, device="cpu")
    fill(tensor, text_format.Parse(text, FillerParameter()), fail)
    return tensor


def check_moments(x: Tensor, mean: float, deviation: float) -> None:
    """Whether mean and deviation are within six of their own standard deviations, of a kurtosis of 3 at most."""
    count = x.numel()
    assert abs(float(x.mean()) - mean) < 6 * deviation / math.sqrt(count)
    assert abs(float(x.std()) - deviation) < 6 * deviation / math.sqrt(2 * count) + 1e-12


def test_constant() -> None:
    assert (filled('type: "constant" value: 0.25') == 0.25).all()
    assert (filled("") == 0).all()


def test_uniform() -> None:
    x = filled('type: "uniform" min: -0.5 max: 2')
    assert -0.5 <= float(x.min()) < -0.49
    assert 1.99 < float(x.max()) <= 2
    check_moments(x, 0.75, 2.5 / math.sqrt(12))


def test_gaussian() -> None:
    x = filled('type: "gaussian" mean: 0.3 std: 0.02')
    check_moments(x, 0.3, 0.02)
    inside = float(((x - 0.3).abs() < 0.02).to(torch.float64).mean())
    assert abs(inside - math.erf(1 / math.sqrt(2))) < 6 * 0.5 / math.sqrt(COUNT)


@pytest.mark.parametrize("sparse", [0, 5, 50, 200])
def test_sparse_gaussian_keeps_so_many_weights_of_each_input(sparse: int) -> None:
    x = filled(f'type: "gaussian" std: 2 sparse: {sparse}')
    share = sparse / SHAPE[0]
    kept = float((x != 0).to(torch.float64).mean())
    assert abs(kept - share) <= 6 * math.sqrt(share * (1 - share) / COUNT)
    if sparse:
        check_moments(x[x != 0], 0, 2)


@pytest.mark.parametrize(("norm", "fan"), [("", FAN_IN), ("FAN_IN", FAN_IN), ("FAN_OUT", FAN_OUT), ("AVERAGE", 0)])
def test_xavier_and_msra_divide_by_the_number_that_they_are_told(norm: str, fan: int) -> None:
    fan = fan or (FAN_IN + FAN_OUT) / 2
    more = f"variance_norm: {norm}" if norm else ""
    x = filled(f'type: "xavier" {more}')
    limit = math.sqrt(3 / fan)
    assert 0.99 * limit < float(x.abs().max()) <= limit
    check_moments(x, 0, limit / math.sqrt(3))
    check_moments(filled(f'type: "msra" {more}'), 0, math.sqrt(2 / fan))


def test_fans_of_blobs_of_other_numbers_of_axes() -> None:
    # Of a vector each element is an output with one input; all of it counts as outputs' other side, as in Caffe.
    for shape, limit in (((100_000,), math.sqrt(3)), ((400, 300), math.sqrt(3 / 300))):
        x = filled('type: "xavier"', shape)
        assert 0.99 * limit < float(x.abs().max()) <= limit


@pytest.mark.parametrize("shape", [(7, 5, 2), (4,), (3, 50)])
def test_positive_unitball_rows_are_positive_and_sum_to_one(shape: tuple[int, ...]) -> None:
    x = filled('type: "positive_unitball"', shape)
    assert (x >= 0).all()
    sums = x.reshape(shape[0], -1).sum(1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_bilinear_makes_a_deconvolution_that_interpolates(factor: int) -> None:
    size, pad = 2 * factor - factor % 2, math.ceil((factor - 1) / 2)
    fields = f"num_output: 3 group: 3 kernel_size: {size} stride: {factor} pad: {pad} bias_term: false"
    made = layer(
        "Deconvolution",
        f'convolution_param {{ {fields} weight_filler {{ type: "bilinear" }} }}',
        (2, 3, 6, 5),
        random=False,
    )
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64, device="cpu")
    want = F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=False)
    inside = (slice(None), slice(None), slice(factor, -factor), slice(factor, -factor))
    torch.testing.assert_close(made(x)[inside], want[inside], rtol=1e-6, atol=1e-6)


def test_every_filler_has_a_test() -> None:
    assert set(FILLERS) == {"bilinear", "constant", "gaussian", "msra", "positive_unitball", "uniform", "xavier"}


@pytest.mark.parametrize("kind", sorted(FILLERS))
def test_nothing_is_filled_where_there_is_nothing(kind: str) -> None:
    assert filled(f'type: "{kind}"', (0, 3, 2, 2)).numel() == 0


@pytest.mark.parametrize("kind", ["gaussian", "uniform", "xavier", "msra", "positive_unitball"])
def test_the_same_seed_gives_the_same_numbers(kind: str) -> None:
    torch.manual_seed(4)
    one = filled(f'type: "{kind}"')
    assert not torch.equal(one, filled(f'type: "{kind}"'))
    torch.manual_seed(4)
    assert torch.equal(one, filled(f'type: "{kind}"'))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('type: "normal"', "filler type = 'normal'; one of bilinear, constant"),
        ('type: "uniform" min: 2 max: 1', r"min = 2\.0 is above max = 1\.0"),
        ('type: "gaussian" std: -1', r"std = -1\.0; 0 or more"),
        ('type: "gaussian" std: nan', "std = nan; 0 or more"),
        ('type: "gaussian" sparse: 4', "sparse = 4; at most 3"),
        ('type: "bilinear"', "needs 4 axes and a square kernel"),
    ],
)
def test_what_no_filler_can_do_names_layer_and_blob(text: str, words: str) -> None:
    with pytest.raises(CaffeError, match=rf"'it' \(InnerProduct\): blob 0 of shape \(3, 8\): filler {words}|{words}"):
        layer("InnerProduct", f"inner_product_param {{ num_output: 3 weight_filler {{ {text} }} }}", (2, 8))


PARAMETER = """
layer { name: "p" type: "Parameter" top: "p" param { name: "shared" lr_mult: 2 }
  parameter_param { shape { dim: [2, 3] } } }
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: [2, 3] } } }
layer { name: "sum" type: "Eltwise" bottom: "p" bottom: "x" top: "sum" }
layer { name: "q" type: "Parameter" top: "q" param { name: "shared" } parameter_param { shape { dim: [2, 3] } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "sum" bottom: "q" top: "loss" loss_weight: 4 }
layer { name: "own" type: "Power" bottom: "p" top: "own" }
"""


def test_a_parameter_layer_is_learned_shared_saved_and_begins_with_zeros() -> None:
    made = net(PARAMETER, "train")
    blob = made.layers["p"].blobs[0]
    assert (blob == 0).all()
    assert blob is made.layers["q"].blobs[0]
    assert [(found.name, found.lr_mult) for found in made.learnable] == [("shared", 2)]
    x = torch.randn(2, 3, dtype=torch.float32, device="cpu")
    made(x)
    assert made.loss is not None
    torch.testing.assert_close(made.loss.detach(), x.square().sum())
    made(x)["own"].sum().backward()
    assert (blob.grad == 1).all()
    assert list(made.weights()) == ["p", "q"]
    made.load_weights({"p": [x.numpy()]})
    torch.testing.assert_close(made(x)["own"], x)


def test_a_parameter_layer_without_axes_is_one_number() -> None:
    made = net('layer { name: "p" type: "Parameter" top: "p" parameter_param { shape { } } }')
    assert made()["p"].shape == ()


@pytest.mark.parametrize("dims", ["-1", "70000, 70000", ", ".join(["1"] * 33)])
def test_a_parameter_of_no_possible_shape_is_an_error(dims: str) -> None:
    with pytest.raises(CaffeError, match=r"'p' \(Parameter\): shape = \["):
        net(f'layer {{ name: "p" type: "Parameter" top: "p" parameter_param {{ shape {{ dim: [{dims}] }} }} }}')
