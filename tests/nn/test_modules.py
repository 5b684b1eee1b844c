"""Modules with swapped computation stay torch's modules in every other respect."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nn.dividing import Dividing, assert_same
from torch import nn
from torch.nn.utils import prune

import tilewise
from tilewise.nn import report


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2, bias=False),
        nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1),
    )


def example(batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, 3, 9, 9, generator=torch.Generator().manual_seed(1))


def optimized(model: nn.Module, x: torch.Tensor, **options: Any) -> nn.Module:
    return tilewise.optimize(model, x, planner=Dividing(), **options)


def assert_equal_models(got: nn.Module, want: nn.Module, x: torch.Tensor) -> None:
    """Same result and gradients, of the input too."""
    results = []
    for model in (got, want):
        model.zero_grad()
        xi = x.clone().requires_grad_()
        y = model(xi)
        y.square().sum().backward()
        results.append([y, xi.grad, *(p.grad for p in model.parameters())])
        with torch.no_grad():
            results[-1].append(model(x))
    for mine, its in zip(*results, strict=True):
        assert_same(mine, its)


def test_results_and_gradients_are_torchs() -> None:
    want = network()
    got = optimized(copy.deepcopy(want), example())
    assert all(layer.replaced for layer in report(got).layers)
    assert_equal_models(got, want, example())
    assert_equal_models(got, want, example(2))


def test_nothing_else_changes() -> None:
    plain, model = network(), network()
    seen: list[str] = []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[0].register_forward_pre_hook(lambda *_: seen.append("pre"))
    model[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    parameters = dict(model.named_parameters())
    assert optimized(model, example()) is model
    seen.clear()
    assert [type(m) for m in model] == [type(m) for m in plain]
    assert repr(model) == repr(plain)
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    model(example()).sum().backward()
    assert seen == ["pre", "forward", "backward"]
    assert model[0].forward.__name__ == "forward"


def test_deepcopy_is_planned_and_its_own() -> None:
    model = optimized(network(), example())
    twin = copy.deepcopy(model)
    assert twin[0].forward.__self__ is twin[0]
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    planned_before = model(example())
    plain = network()
    plain.load_state_dict(twin.state_dict())
    assert_equal_models(twin, plain, example())
    assert torch.equal(model(example()), planned_before)


@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_pickles_are_plain_torch(way: str, tmp_path: Path) -> None:
    model = optimized(network(), example())
    if way == "pickle":
        data = pickle.dumps(model)
        loaded = pickle.loads(data)
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        data = buffer.getvalue()
        loaded = torch.load(io.BytesIO(data), weights_only=False)
    assert b"tilewise" not in data
    assert_equal_models(loaded, network(), example())
    assert loaded[0].forward.__func__ is nn.Conv2d.forward
    again = optimized(loaded, example())  # the loaded bound method does not stand in the way
    assert all(layer.replaced for layer in report(again).layers)
    (tmp_path / "model").write_bytes(data)
    script = (
        "import sys, torch\nsys.modules['tilewise'] = None\n"
        "m = torch.load(sys.argv[1], weights_only=False) if sys.argv[2] != 'pickle' "
        "else __import__('pickle').load(open(sys.argv[1], 'rb'))\nprint(tuple(m(torch.randn(2, 3, 9, 9)).shape))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model"), way], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "(2, 4, 16, 16)", done.stderr


def test_restore() -> None:
    model = optimized(network(), example())
    before = {name: set(m.__dict__) for name, m in network().named_modules()}
    assert tilewise.restore(model) is model
    assert {name: set(m.__dict__) for name, m in model.named_modules()} == before
    with pytest.raises(ValueError, match="undone"):
        report(model)


def test_modules_where_torch_wins_are_untouched() -> None:
    model = network()
    tilewise.optimize(model, example(), planner=Dividing(passes=()))
    assert all("forward" not in m.__dict__ for m in model)
    rows = list(report(model).passes())
    assert rows
    assert not any(one.replaced for _, _, one in rows)


def test_optimizing_again_replaces() -> None:
    model = optimized(network(), example())
    tilewise.optimize(model, example(), planner=Dividing(passes=()))
    assert all("forward" not in m.__dict__ for m in model)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_padding_modes(mode: str, kind: Any) -> None:
    want = kind(3, 5, 3, padding=2, padding_mode=mode)
    x = torch.randn(3, 3, *([6] * len(want.kernel_size)))
    got = optimized(copy.deepcopy(want), x)
    assert report(got).layers[0].replaced
    assert_equal_models(got, want, x)
    assert_equal_models(got, want, x[0])


@pytest.mark.parametrize("kernel", [3, 4])
def test_padding_same(kernel: int) -> None:
    want = nn.Conv2d(3, 5, kernel, padding="same", dilation=2)
    x = torch.randn(3, 3, 9, 9)
    got = optimized(copy.deepcopy(want), x)
    assert report(got).layers[0].replaced
    assert_equal_models(got, want, x)


@pytest.mark.parametrize("kind", [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d])
def test_output_size(kind: Any) -> None:
    want = kind(4, 6, 3, stride=3, padding=1, groups=2)
    dims = len(want.kernel_size)
    x = torch.randn(3, 4, *([5] * dims))
    got = optimized(copy.deepcopy(want), {"input": x, "output_size": [14] * dims})
    assert report(got).layers[0].replaced
    for size in (None, [14] * dims, [15] * dims, [3, 6] + [13] * dims):
        assert_same(got(x, size), want(x, size))
        assert_same(got(x, output_size=size), want(x, output_size=size))
    with pytest.raises(ValueError, match="requested an output size"):
        got(x, [99] * dims)


def test_every_kind_of_module() -> None:
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
        want = kind(4, 6, 3, stride=2, padding=1, dilation=2, groups=2)
        x = torch.randn(3, 4, *([7] * len(want.kernel_size)))
        got = optimized(copy.deepcopy(want), x)
        assert report(got).layers[0].replaced
        assert_equal_models(got, want, x)
        assert_equal_models(got, want, x[0])


class Louder(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Rounded(nn.Conv2d):
    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        return super()._conv_forward(input, weight.round(), bias)


class Renamed(nn.Conv2d):
    pass


def test_what_cannot_be_swapped_says_why() -> None:
    model = nn.Sequential(Louder(3, 3, 3), Rounded(3, 3, 3), Renamed(3, 3, 3), nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 1))
    own = model[3].forward
    model[3].forward = lambda input: own(input)
    want = [type(m).forward for m in model]
    optimized(model, torch.randn(2, 3, 9, 9), filter_fn=lambda name, module: name != "4")
    reasons = [layer.reason for layer in report(model).layers]
    assert reasons[0] == "Louder has a forward of its own"
    assert reasons[1] == "Rounded has a _conv_forward of its own"
    assert reasons[2] == ""
    assert reasons[3] == "has a forward set on the instance"
    assert reasons[4] == "left out by filter_fn"
    assert [report(model).layers[i].replaced for i in range(5)] == [False, False, True, False, False]
    assert [type(m).forward for m in model] == want
    assert model(torch.randn(2, 3, 9, 9)).shape == (2, 3, 1, 1)


def test_parametrized_and_pruned_weights_are_read_every_time() -> None:
    torch.manual_seed(0)
    want = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
        nn.Conv2d(4, 4, 3),
    )
    prune.random_unstructured(want[1], "weight", 0.5)
    got = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
        nn.Conv2d(4, 4, 3),
    )
    prune.identity(got[1], "weight")
    got.load_state_dict(want.state_dict())
    x = torch.randn(3, 3, 9, 9)
    optimized(got, x)
    assert all(layer.replaced for layer in report(got).layers)
    assert_equal_models(got, want, x)
    with torch.no_grad():
        for model in (got, want):
            for p in model.parameters():
                p.mul_(1.5)
    assert_equal_models(got, want, x)


def test_parametrizing_afterwards() -> None:
    got, want = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    got.load_state_dict(want.state_dict())
    x = torch.randn(3, 3, 9, 9)
    optimized(got, x)
    for conv in (got, want):
        nn.utils.parametrizations.weight_norm(conv)
    assert_equal_models(got, want, x)


def test_arguments_changed_afterwards_are_heeded() -> None:
    got, want = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
    got.load_state_dict(want.state_dict())
    x = torch.randn(3, 3, 9, 9)
    optimized(got, x)
    for conv in (got, want):
        conv.stride, conv.padding = (2, 2), (0, 0)
    assert_equal_models(got, want, x)


def test_parameters_moved_afterwards_are_heeded() -> None:
    got, want = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    got.load_state_dict(want.state_dict())
    x = torch.randn(3, 3, 9, 9)
    optimized(got, x)
    for change in (
        lambda m: m.to(memory_format=torch.channels_last),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.double(),
        lambda m: m.float(),
    ):
        change(got), change(want)
        assert_equal_models(got, want, x.to(want.weight.dtype))
    for conv in (got, want):
        conv.bias = None
    assert_equal_models(got, want, x)


def test_lazy_modules_are_planned_once_they_have_sizes() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyConvTranspose2d(5, 3))
    x = torch.randn(3, 2, 9, 9)
    optimized(model, x)
    assert [type(m) for m in model] == [nn.Conv2d, nn.ConvTranspose2d]
    assert all(layer.replaced for layer in report(model).layers)
    plain = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 5, 3))
    plain.load_state_dict(model.state_dict())
    assert_equal_models(model, plain, x)


def test_channels_last_in_is_channels_last_out() -> None:
    for layout in (torch.channels_last, torch.contiguous_format):
        want = network().to(memory_format=layout)
        x = example().contiguous(memory_format=layout).requires_grad_()
        got = optimized(copy.deepcopy(want), x)
        assert all(layer.replaced for layer in report(got).layers)
        mine, its = got(x), want(x)
        assert mine.stride() == its.stride()
        mine.sum().backward()
        its.sum().backward()
        assert [p.grad.stride() for p in got.parameters()] == [p.grad.stride() for p in want.parameters()]
        assert_equal_models(got, want, x.detach())


def test_layout_follows_torch_where_sizes_of_one_leave_it_open() -> None:
    for shape, kernel in (((2, 1, 8, 8), 3), ((2, 4, 1, 1), 1), ((2, 1, 1, 8), 1), ((3, 1, 1, 1), 1)):
        for layout in (torch.channels_last, torch.contiguous_format):
            conv = nn.Conv2d(shape[1], 5, kernel)
            x = torch.randn(shape).to(memory_format=layout)
            got = optimized(copy.deepcopy(conv), x)
            with torch.no_grad():
                mine, its = got(x), conv(x)
            assert_same(mine, its)
            for memory_format in (torch.channels_last, torch.contiguous_format):
                assert mine.is_contiguous(memory_format=memory_format) == its.is_contiguous(memory_format=memory_format)


def test_layers_hold_no_tensor() -> None:
    model = optimized(network(), example())
    x = example()
    y = model(x)
    held = [weakref.ref(t) for t in (x, y, model[0].weight)]
    forward = model[0].__dict__["forward"].__func__
    del x, y, model
    gc.collect()  # a module and its bound method are a cycle
    assert forward.__name__ == "forward"
    assert [ref() for ref in held] == [None] * 3


def test_data_parallel_replicas_use_their_own_weights() -> None:
    model = optimized(network(), example())
    replica = model[0]._replicate_for_data_parallel()
    assert replica.forward.__self__ is replica
    replica.weight, replica.bias = model[0].weight.detach() * 2, model[0].bias.detach() * 2
    with torch.no_grad():
        assert_same(replica(example()), model[0](example()) * 2)
