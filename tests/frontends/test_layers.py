"""The convolution layers of a network: what they meet, and that looking leaves no trace."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from tilewise.frontends.layers import (
    LayerCall,
    convolution_layers,
    fake_forward,
    is_convolution,
    layout_of,
    real_forward,
)
from tilewise.frontends.networks import load_network


def small() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Conv2d(8, 4, 1))


def needs(calls: list[LayerCall]) -> list[bool]:
    return [call.needs_input_grad for call in calls]


class Twice(nn.Module):
    """One layer called twice, and known by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, stride=2)
        self.alias = self.conv

    def forward(self, x: Tensor) -> Tensor:
        return self.alias(self.conv(x))  # type: ignore[no-any-return]


class ReadsData(nn.Module):
    """Control flow that reads a value: fake tensors have none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x if x.sum().item() > 0 else x * 2)  # type: ignore[no-any-return]


class Caches(nn.Module):
    """Keeps a tensor it made in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(x.shape[-1])
        return self.conv(x * self.table)  # type: ignore[no-any-return]


class LeavesTorch(nn.Module):
    """Hands its data to numpy in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(torch.from_numpy(x.numpy() + 1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A recurrent layer holds its parameters in lists of its own too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 3, padding=1)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.up = nn.ConvTranspose1d(4, 2, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(self.conv(x.flatten(2)).transpose(1, 2))
        return self.up(y.transpose(1, 2))  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """Computes its forward again in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_layers_of_a_network() -> None:
    net = load_network("alexnet")
    calls = convolution_layers(net.module, net.example_inputs(4))
    assert [call.name for call in calls] == ["conv1", "conv2", "conv3", "conv4", "conv5"]
    assert [call.module for call in calls] == [net.module.get_submodule(call.name) for call in calls]
    assert calls[1] == LayerCall(
        "conv2", net.module.get_submodule("conv2"), (4, 64, 27, 27), torch.float32, "contiguous", True, 1
    )
    assert needs(calls) == [False, True, True, True, True]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["resnet18", "googlenet", "photonet"])
def test_fake_and_real_agree(name: str, memory_format: torch.memory_format) -> None:
    net = load_network(name)
    module = net.module
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=memory_format)
    x = net.example_inputs(2).to(memory_format=memory_format)
    fake = fake_forward(module, (x,), {})
    assert fake == real_forward(module, (x,), {})
    want = "contiguous" if memory_format is torch.contiguous_format else "channels_last"
    assert {call.layout for call in fake} <= {want, "contiguous"}
    assert fake[0].layout == want


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_fake_and_real_agree_on_a_gpu(memory_format: torch.memory_format, autocast: bool) -> None:
    net = load_network("resnet18")
    module, x = net.module.cuda(), net.example_inputs(2, "cuda").to(memory_format=memory_format)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        fake = fake_forward(module, (x,), {})
        assert fake == real_forward(module, (x,), {})
    assert {call.dtype for call in fake} == {torch.bfloat16 if autocast else torch.float32}


@pytest.mark.parametrize(("dims", "kind"), [(d, k) for d in (1, 2, 3) for k in ("Conv", "ConvTranspose")])
def test_every_kind_of_layer(dims: int, kind: str) -> None:
    layer = getattr(nn, f"{kind}{dims}d")(4, 6, 3)
    (call,) = convolution_layers(layer, torch.randn(2, 4, *[5] * dims))
    assert call == LayerCall("", layer, (2, 4, *[5] * dims), torch.float32, "contiguous", False, 1)
    (unbatched,) = convolution_layers(layer, torch.randn(4, *[5] * dims))
    assert unbatched.input_shape == (4, *[5] * dims)


def test_a_layer_called_twice() -> None:
    calls = convolution_layers(Twice(), torch.randn(1, 4, 8, 8))
    assert [(call.name, call.input_shape[-1], call.count) for call in calls] == [("conv", 8, 1), ("conv", 4, 2)]
    assert calls[0].module is calls[1].module


def test_input_gradients() -> None:
    module, x = small(), torch.randn(2, 3, 8, 8)
    assert needs(convolution_layers(module, x)) == [False, True]
    assert needs(convolution_layers(module, x.requires_grad_())) == [True, True]
    with torch.no_grad():
        assert needs(convolution_layers(module, x)) == [False, False]


def test_a_frozen_start_needs_no_input_gradient() -> None:
    module = small()
    module[:3].requires_grad_(False)
    assert needs(convolution_layers(module, torch.randn(2, 3, 8, 8))) == [False, False]


def test_layouts() -> None:
    conv, x = nn.Conv2d(4, 2, 3), torch.randn(2, 4, 8, 8)

    def layout(x: Tensor) -> str:
        return convolution_layers(conv, x)[0].layout

    assert layout(x) == "contiguous"
    assert layout(x.to(memory_format=torch.channels_last)) == "channels_last"
    assert layout(x[:, :, 1:, 1:]) == "view"
    assert layout(x.transpose(2, 3)) == "view"
    assert layout(x.to(memory_format=torch.channels_last)[..., ::2]) == "view"
    sequence = torch.randn(2, 8, 4).transpose(1, 2)
    assert convolution_layers(nn.Conv1d(4, 2, 3), sequence)[0].layout == "channels_last"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 3), min_size=4, max_size=5), st.permutations(range(4)), st.booleans())
def test_layout_is_torchs(shape: list[int], order: list[int], crop: bool) -> None:
    x = torch.empty(shape).permute(*order, *range(4, len(shape)))
    if crop and x.shape[-1] > 1:
        x = x[..., 1:]
    dense = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    want = "contiguous" if x.is_contiguous() else "channels_last" if x.is_contiguous(memory_format=dense) else "view"
    assert layout_of(x) == want


def test_inputs_as_sequence_and_mapping() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, image: Tensor, scale: float = 1.0, flip: bool = False) -> Tensor:
            image = image.flip(-1) if flip else image[:, :, ::2]
            return self.conv(input=image * scale)  # type: ignore[no-any-return]

    x = torch.randn(1, 3, 8, 8)
    assert convolution_layers(Net(), [x, 2.0])[0].input_shape == (1, 3, 4, 8)
    assert convolution_layers(Net(), {"image": x, "flip": True})[0].input_shape == (1, 3, 8, 8)


def test_which_layers_count() -> None:
    class Same(nn.Conv2d):
        """Only built differently."""

    class Other(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    class OtherInside(nn.Conv2d):
        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return nn.functional.conv2d(input, weight * 2, bias)

    patched = nn.Conv2d(3, 4, 3)
    patched.forward = lambda input: input  # type: ignore[method-assign]
    assert is_convolution(Same(3, 4, 3))
    assert is_convolution(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)))
    assert is_convolution(nn.LazyConv2d(4, 3))
    assert not any(map(is_convolution, (Other(3, 4, 3), OtherInside(3, 4, 3), patched, nn.Linear(3, 4))))
    module = nn.Sequential(Same(3, 4, 3), Other(4, 4, 3), nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)))
    assert [call.name for call in convolution_layers(module, torch.randn(1, 3, 9, 9))] == ["0", "2"]


def test_nothing_runs_without_convolutions() -> None:
    class Fails(nn.Module):
        def forward(self) -> Tensor:
            raise AssertionError

    assert convolution_layers(Fails(), ()) == []


def test_dtype_is_autocasts() -> None:
    module, x = small(), torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert {call.dtype for call in convolution_layers(module, x)} == {torch.bfloat16}
        assert {call.dtype for call in convolution_layers(module.double(), x.double())} == {torch.float64}
    assert {call.dtype for call in convolution_layers(module.half(), x.half())} == {torch.float16}


def test_no_memory_is_needed() -> None:
    """A batch that would take 600 GB."""
    net = load_network("photonet")
    batch = torch.zeros(1).expand(4_000_000, 3, 96, 96)
    assert [call.input_shape[0] for call in convolution_layers(net.module, batch)] == [4_000_000] * 5


def test_meta_modules() -> None:
    with torch.device("meta"):
        net = load_network("vgg16")
    assert len(convolution_layers(net.module, net.example_inputs(2, "meta"))) == 13


@pytest.mark.parametrize("kind", [small, ReadsData, LeavesTorch, Caches, Recurrent, Checkpointed, Twice])
def test_no_trace_is_left(kind: type[nn.Module]) -> None:
    module, x = kind(), torch.rand(2, 4 if kind is Twice else 3, 8, 8)
    state, random, training = copy.deepcopy(module.state_dict()), torch.get_rng_state(), module.training
    assert convolution_layers(module, x)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert module.training == training
    assert not any(child._forward_pre_hooks for child in module.modules())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not isinstance(module(x), FakeTensor)


@pytest.mark.parametrize("kind", [Caches, Recurrent, Checkpointed, Twice])
def test_fake_and_real_agree_on_odd_networks(kind: type[nn.Module]) -> None:
    module, x = kind(), torch.rand(2, 4 if kind is Twice else 3, 8, 8)
    assert fake_forward(module, (x,), {}) == real_forward(module, (x,), {})


@pytest.mark.parametrize("kind", [ReadsData, LeavesTorch])
def test_a_network_that_needs_data_runs_for_real(kind: type[nn.Module]) -> None:
    calls = convolution_layers(kind(), torch.rand(2, 3, 8, 8))
    assert [(call.name, call.input_shape) for call in calls] == [("body.0", (2, 3, 8, 8)), ("body.3", (2, 8, 6, 6))]


def test_lazy_layers_get_their_shapes() -> None:
    module = nn.Sequential(nn.LazyConv2d(4, 3), nn.Conv2d(4, 2, 1))
    calls = convolution_layers(module, torch.randn(1, 3, 8, 8))
    assert [call.module for call in calls] == list(module)
    assert module[0].weight.shape == (4, 3, 3, 3)


def test_compiled_modules_run_uncompiled() -> None:
    def never(*_: object) -> None:
        raise AssertionError("compiled")

    module = torch.compile(small(), backend=never)
    assert isinstance(module, nn.Module)
    assert [call.name for call in convolution_layers(module, torch.randn(1, 3, 8, 8))] == ["_orig_mod.0", "_orig_mod.3"]


def test_errors_are_the_networks_own() -> None:
    module = small()
    with pytest.raises(RuntimeError, match="channels"):
        convolution_layers(module, torch.randn(1, 5, 8, 8))
    assert not any(child._forward_pre_hooks for child in module.modules())
    assert dict(module.named_buffers())["1.num_batches_tracked"] == 0
