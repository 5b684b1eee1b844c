"""Models of 8-bit whole numbers: their layers are left exactly as they are, and floating-point ones beside them run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tilewise

pytestmark = [
    pytest.mark.skipif(
        "x86" not in torch.backends.quantized.supported_engines, reason="torch has no int8 kernels here"
    ),
    pytest.mark.filterwarnings("ignore"),
]


def quantized(first: nn.Module) -> nn.Module:
    """A network whose ``first`` module computes in fp32, and all others in int8."""
    from torch.ao import quantization

    layers = [nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(), nn.Linear(512, 10)]
    model = nn.Sequential(first, quantization.QuantStub(), *layers, quantization.DeQuantStub()).eval()
    for module in list(model)[1:]:
        module.qconfig = quantization.get_default_qconfig("x86")
    prepared = quantization.prepare(model)
    with torch.no_grad():
        prepared(images())
    converted: nn.Module = quantization.convert(prepared)
    return converted


def images() -> torch.Tensor:
    return torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("first", [nn.Identity(), nn.Conv2d(4, 4, 1)], ids=("int8 alone", "fp32 before"))
def test_layers_of_whole_numbers_are_left_alone(first: nn.Module) -> None:
    model, x = quantized(first), images()
    classes = [type(module) for module in model.modules()][2:]
    with torch.no_grad():
        want = model(x)
        again = tilewise.optimize(model, x, training=False, rigor="estimate")(x)
    assert [type(module) for module in model.modules()][2:] == classes
    if isinstance(first, nn.Identity):
        assert torch.equal(again, want)
    torch.testing.assert_close(again, want, rtol=0, atol=0.1)  # a step of the last layer's numbers


def test_a_dynamically_quantized_layer_is_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)).eval()
    model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    before = type(model[3])
    with torch.no_grad():
        want = model(images())
        got = tilewise.optimize(model, images(), training=False, rigor="estimate")(images())
    assert type(model[3]) is before
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
