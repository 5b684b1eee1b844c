"""Built-in networks: sizes against the papers and against published parameter counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tilewise.frontends.layers import convolution_layers
from tilewise.frontends.networks import load_network
from tilewise.frontends.zoo import BUILDERS
from tilewise.frontends.zoo.densenet import DenseNet
from tilewise.frontends.zoo.googlenet import INCEPTIONS
from tilewise.frontends.zoo.photonet import PhotoNet
from tilewise.frontends.zoo.replknet import RepLKNetStage


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return BUILDERS[name]()


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def layer_sizes(name: str) -> list[tuple[int, int, int, int, int, int]]:
    """(image, in channels, out channels, kernel, padding, stride) of each convolution, in order."""
    net = load_network(name)
    sizes = []
    for call in convolution_layers(net.module, net.example_inputs(2)):
        conv = call.module
        assert isinstance(conv, nn.Conv2d)
        assert isinstance(conv.padding, tuple)
        sizes.append(
            (
                call.input_shape[-1],
                conv.in_channels,
                conv.out_channels,
                conv.kernel_size[0],
                conv.padding[0],
                conv.stride[0],
            )
        )
    return sizes


def densenet_parameters(depth: int, growth: int, classes: int = 10) -> int:
    """Weights of a plain CIFAR DenseNet: 3x3 convolutions, BN before each, two transitions, BN and a linear layer."""
    total, channels = 3 * 16 * 9, 16
    for block in range(3):
        if block:
            total += 2 * channels + channels * channels
        for _ in range((depth - 4) // 3):
            total += 2 * channels + channels * growth * 9
            channels += growth
    return total + 2 * channels + channels * classes + classes


@pytest.mark.parametrize("name", BUILDERS)
def test_output_shape(name: str) -> None:
    module = on_meta(name)
    shape = module.input_shape
    assert isinstance(shape, tuple)
    outputs = module(torch.empty(2, *shape, device="meta"))
    classes = {"densenet40": 10, "photonet": 2}.get(name, 1000)
    assert outputs.shape == ((2, 128, 56, 56) if name == "replknet31_stage" else (2, classes))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # torchvision's one-column AlexNet, with 384 in place of 256 outputs of the fourth convolution.
        ("alexnet", 61_100_840 + 128 * (384 * 9 + 1) + 256 * 128 * 9),
        # The paper's Table 3 has 145 million; these are Table 1's layers one by one.
        ("overfeat_fast", 34_944 + 614_656 + 1_180_160 + 4_719_616 + 9_438_208 + 113_249_280 + 12_587_008 + 4_097_000),
        ("vgg16", 138_357_544),
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("densenet40", densenet_parameters(40, 40)),
        ("googlenet", 6_998_552),
        ("replknet31_stage", 2 * (2 * 128**2 + 128 * (31**2 + 5**2) + 5 * 256 + 8 * 128**2 + 256 + 1024 + 256)),
        ("photonet", 16 * 75 + 64 * 256 + 64 * 961 + 96 * 576 + 128 * 864 + 2 * (16 + 64 + 64 + 96 + 128) + 258),
    ],
)
def test_parameter_count(name: str, count: int) -> None:
    assert parameters(on_meta(name)) == count


def test_densenet_of_the_paper() -> None:
    """Table 2 of the paper: 1.0M at depth 40 and growth 12, 7.0M at 100 and 12, 27.2M at 100 and 24."""
    for depth, growth, millions in ((40, 12, 1.0), (100, 12, 7.0), (100, 24, 27.2)):
        with torch.device("meta"):
            count = parameters(DenseNet(depth, growth))
        assert count == densenet_parameters(depth, growth)
        assert round(count / 1e6, 1) == millions


def test_densenet_depth_must_fit() -> None:
    with pytest.raises(ValueError, match="depth is 41"):
        DenseNet(depth=41)


def test_googlenet_differs_from_torchvisions_as_documented() -> None:
    """torchvision's 6,624,904 has 3x3 for 5x5, and two numbers of normalisation a channel in place of one bias."""
    module = on_meta("googlenet")
    channels = sum(child.out_channels for child in module.modules() if isinstance(child, nn.Conv2d))
    fives = sum(reduce5 * five * (25 - 9) for _, _, _, reduce5, five, _ in INCEPTIONS.values())
    assert parameters(module) - fives + channels == 6_624_904


def test_alexnet_convolutions() -> None:
    """The sizes mu-cuDNN benchmarked."""
    assert layer_sizes("alexnet") == [
        (224, 3, 64, 11, 2, 4),
        (27, 64, 192, 5, 2, 1),
        (13, 192, 384, 3, 1, 1),
        (13, 384, 384, 3, 1, 1),
        (13, 384, 256, 3, 1, 1),
    ]


def test_overfeat_fast_convolutions() -> None:
    """Table 1 of the paper."""
    assert layer_sizes("overfeat_fast") == [
        (231, 3, 96, 11, 0, 4),
        (28, 96, 256, 5, 0, 1),
        (12, 256, 512, 3, 1, 1),
        (12, 512, 1024, 3, 1, 1),
        (12, 1024, 1024, 3, 1, 1),
    ]


def test_vgg16_images() -> None:
    assert [size[0] for size in layer_sizes("vgg16")] == [224] * 2 + [112] * 2 + [56] * 3 + [28] * 3 + [14] * 3


@pytest.mark.parametrize(
    ("name", "images"),
    [
        # A stage's first shortcut sees the image its first convolution saw.
        ("resnet18", [224] + [56] * 4 + ([56, 28, 56, 28, 28] + [28, 14, 28, 14, 14] + [14, 7, 14, 7, 7])),
        ("densenet40", [32] * 14 + [16] * 13 + [8] * 12),
    ],
)
def test_images(name: str, images: list[int]) -> None:
    assert [size[0] for size in layer_sizes(name)] == images


def test_resnet50_strides_are_in_the_first_convolution_of_a_block() -> None:
    strided = [size[3] for size in layer_sizes("resnet50") if size[5] == 2]
    assert strided == [7, 1, 1, 1, 1, 1, 1]


def test_googlenet_images() -> None:
    sizes = layer_sizes("googlenet")
    assert [size[0] for size in sizes] == [224, 56, 56] + [28] * 12 + [14] * 30 + [7] * 12
    assert {size[3] for size in sizes} == {1, 3, 5, 7}


def test_large_kernels_are_depthwise() -> None:
    for module in (RepLKNetStage(channels=8, blocks=1), PhotoNet()):
        large = [m for m in module.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (31, 31)]
        assert len(large) == 1
        assert large[0].groups == large[0].in_channels == large[0].out_channels
        assert large[0].padding == (15, 15)


def test_patch_layer_has_kernel_equal_to_stride() -> None:
    conv = PhotoNet().patches[0]
    assert isinstance(conv, nn.Conv2d)
    assert conv.kernel_size == conv.stride == (4, 4)


def test_signal_survives_without_normalisation() -> None:
    """Activations of GoogLeNet, 22 layers deep, neither vanish nor blow up at the start."""
    torch.manual_seed(0)
    net = load_network("googlenet")
    with torch.no_grad():
        scores = net.module.eval()(net.example_inputs(1))
    assert 1e-2 < float(scores.std()) < 1e2


@pytest.mark.slow
def test_photonet_trains() -> None:
    """A few steps on two kinds of crop, a smooth one and a noisy one, halve the loss."""
    torch.manual_seed(0)
    model = PhotoNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    targets = torch.arange(8) % 2
    crops = torch.randn(8, 3, 96, 96)
    crops[targets == 0] = nn.functional.avg_pool2d(crops[targets == 0], 5, stride=1, padding=2) * 5
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(model(crops), targets)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
