"""What the benchmarks of Caffe con Troll compute: the same numbers on all sides, and prices."""

from __future__ import annotations

import copy

import cct_fig3_network
import cct_layers
import cct_price
import pytest
import torch
from cct_fig4 import step_of
from harness.caffenet import caffenet
from harness.settings import BadInput, Settings
from torch import nn

from tilewise.frontends.caffe.files import read_net
from tilewise.frontends.caffe.net import Net


def network() -> nn.Module:
    made = nn.Sequential(
        nn.Conv2d(3, 8, (5, 3), stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=2, bias=False),
        nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(5),
    ).double()  # fmt: skip
    made(images(1))
    return made


def images(count: int) -> torch.Tensor:
    generator = torch.Generator(device="cpu").manual_seed(3)
    return torch.randn(count, 3, 17, 15, dtype=torch.float64, device="cpu", generator=generator)


def test_lowering_the_whole_batch_is_the_same_convolution() -> None:
    own = network()
    other = cct_fig3_network.lowered(copy.deepcopy(own))
    assert sum(isinstance(each, cct_fig3_network.LoweredConv2d) for each in other.modules()) == 2
    for module in (own, other):
        step_of(module, images(4))()
    torch.testing.assert_close(other(images(4)), own(images(4)))
    for mine, its in zip(other.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


def test_caffenet_has_the_parameters_that_it_is_known_for() -> None:
    net = Net(read_net(caffenet(2)), "train")
    assert sum(blob.numel() for blob in net.parameters()) == 60_965_224
    assert net.reshape({"data": (2, 3, 227, 227), "label": (2,)})["pool5"] == (2, 256, 6, 6)
    small = Net(read_net(caffenet(2, 67, 16, 10)), "train")
    assert small.reshape({"data": (2, 3, 67, 67), "label": (2,)})["fc8"] == (2, 10)


def test_ten_iterations_of_the_check_are_caffes_rule() -> None:
    """One step by hand: 0.01 for 256 images, times gradient and 0.0005 of the weight; biases twice, without decay."""
    net = Net(read_net(caffenet(2, 67, 16, 10)), "train").double()
    weight, bias = net.layers["fc8"].blobs
    first = weight.detach().clone(), bias.detach().clone()
    data = torch.randn(2, 3, 67, 67, dtype=torch.float64, device="cpu"), torch.tensor([1.0, 2.0], dtype=torch.float64)
    net(*data)
    assert net.loss is not None
    gradients = torch.autograd.grad(net.loss, [weight, bias])
    cct_layers.train(net, [data])
    rate = 0.01 * 2 / 256
    torch.testing.assert_close(weight, first[0] - rate * (gradients[0] + 0.0005 * first[0]))
    torch.testing.assert_close(bias, first[1] - 2 * rate * gradients[1])


def test_a_thousand_iterations_of_a_second_cost_a_thousand_seconds() -> None:
    assert cct_price.price_of(1000.0, 3.6) == pytest.approx(1.0)


def test_the_papers_ratio_of_prices_follows_from_its_ratio_of_times() -> None:
    """Section 3.2: the GPU is 1.86 times as fast, and an iteration on the CPU instance 2.6 times as expensive."""
    hours = 1.4  # what an hour of the CPU instance cost in units of one of the GPU instance's, by these two numbers
    gpu, cpu = cct_price.price_of(1000.0, 1.0), cct_price.price_of(1860.0, hours)
    assert round(cpu / gpu, 1) == 2.6


@pytest.mark.parametrize("shared", [False, True])
def test_prices_are_those_of_the_times_on_a_cpu_alone_and_of_devices_together(shared: bool) -> None:
    took = {"torch": 40.0, "planned": 30.0} | ({"shared by cuda:0 and cpu": 20.0} if shared else {})
    settings = Settings(torch.device("cpu"), True, True, {**cct_price.DEFAULTS, "batch": "2"})
    rows = cct_price.rows_of(settings, took, 0.9, (0.5, 36.0))
    assert [row.name.partition(": ")[2] for row in rows] == [*list(took)[1:], "another machine"]
    prices = [(0.01, 0.0075), *([(0.01, 0.005)] if shared else []), (0.005, 0.005 if shared else 0.0075)]
    for row, (baseline, ours) in zip(rows, prices, strict=True):
        assert (row.baseline.value, row.ours.value) == (pytest.approx(baseline), pytest.approx(ours))
    assert rows[0].details["planned_ms"] == 30.0


@pytest.mark.parametrize("text", ["-1", "0", "nan", "inf", "cheap"])
def test_a_price_is_a_positive_number(text: str) -> None:
    settings = Settings(torch.device("cpu"), True, True, {"price": text, "none": ""})
    assert cct_price.positive(settings, "none") is None
    with pytest.raises(BadInput, match="price="):
        cct_price.positive(settings, "price")
