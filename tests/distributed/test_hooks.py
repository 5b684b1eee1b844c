"""Hooks of modules, tensors and parameters: they see what one device's would, of images this rank's stripe."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.ranks import close, local, parallel, run
from torch import nn
from torch.nn.modules import module as global_hooks

from tilewise.distributed import Shard

Seen = dict[str, list[torch.Tensor | None]]


class Branches(nn.Module):
    """Several inputs and outputs, a value that is no tensor, and one output that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, scale: float, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.conv(x) * scale + other, other.tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())
        self.down = nn.Conv2d(3, 3, 3, stride=2, padding=1)
        self.branches = Branches()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x.register_hook(lambda gradient: gradient * 1.25)
        x = self.down(x)
        y, _ = self.branches(x, 0.5, x.sigmoid())
        return self.head(self.pool(y).flatten(1))


def tensors(values: Any) -> list[torch.Tensor | None]:
    entries = values if isinstance(values, tuple) else (values,)
    return [local(entry).detach().clone() if isinstance(entry, torch.Tensor) else None for entry in entries]


def watch(model: nn.Module, seen: Seen) -> None:
    """Every kind of hook on every module, of which some change what goes on."""
    for name, module in model.named_modules():

        def pre(_: nn.Module, inputs: Any, name: str = name) -> None:
            seen[f"pre {name}"] = tensors(inputs)

        def forward(_: nn.Module, __: Any, output: Any, name: str = name) -> Any:
            seen[f"forward {name}"] = tensors(output)
            return output * 1.5 if name == "down" else None

        def back(_: nn.Module, inputs: Any, outputs: Any, name: str = name) -> Any:
            seen[f"backward {name}"] = [*tensors(inputs), *tensors(outputs)]
            return (inputs[0] * 2,) if name == "first.1" else None

        def back_pre(_: nn.Module, outputs: Any, name: str = name) -> Any:
            seen[f"backward pre {name}"] = tensors(outputs)
            return (outputs[0] * 3,) if name == "pool" else None

        module.register_forward_pre_hook(pre)
        module.register_forward_hook(forward)
        module.register_full_backward_hook(back)
        module.register_full_backward_pre_hook(back_pre)
    for name, parameter in model.named_parameters():

        def graded(gradient: torch.Tensor, name: str = name) -> torch.Tensor:
            seen[f"gradient {name}"] = tensors(gradient)
            return gradient * 0.5

        def summed(parameter: torch.Tensor, name: str = name) -> None:
            seen[f"accumulated {name}"] = tensors(parameter.grad)

        parameter.register_hook(graded)
        parameter.register_post_accumulate_grad_hook(summed)


def step(model: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)
    y = model(x)
    y.backward(torch.randn(y.shape, dtype=y.dtype))
    return y


def same_as_one_device() -> None:
    torch.manual_seed(0)
    plain = Net().double()
    layer = copy.deepcopy(plain)
    expected: Seen = {}
    found: Seen = {}
    watch(plain, expected)
    watch(layer, found)
    full = torch.randn(2, 2, 12, 6, dtype=torch.float64, requires_grad=True)
    own = full.detach().clone().requires_grad_()
    close(step(parallel(layer, (dist.get_world_size(),), ("h",)), _cut(layer, own)), step(plain, full), "result")
    assert full.grad is not None
    assert own.grad is not None
    close(own.grad, full.grad, "dx")
    assert set(found) == set(expected)
    assert len([name for name in found if name.startswith("backward ")]) == 2 * len(list(plain.modules()))
    for name, wanted in expected.items():
        assert len(found[name]) == len(wanted), name
        for got, want in zip(found[name], wanted, strict=True):
            assert (got is None) == (want is None), name
            if got is not None and want is not None:
                close(got, _stripe(want), name)


def _cut(layer: nn.Module, full: torch.Tensor) -> torch.Tensor:
    return parallel(layer, (dist.get_world_size(),), ("h",)).scatter(full, multiple=2)


def _stripe(want: torch.Tensor) -> torch.Tensor:
    """This rank's rows of an image; anything else whole."""
    if want.dim() < 4 or want.shape[-2] == 1 or want.shape[0] == 3:
        return want
    ranks, rank = dist.get_world_size(), dist.get_rank()
    units = want.shape[-2] // (2 if want.shape[-2] == 12 else 1)
    rows = want.shape[-2] // units
    first, last = (rows * (units * r // ranks) for r in (rank, rank + 1))
    return want[..., first:last, :]


def hooks_of_all_modules() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
        seen.append((type(module).__name__, tuple(outputs[0].shape)))

    handle = global_hooks.register_module_full_backward_hook(hook)
    try:
        layer = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh())
        p = parallel(layer, (dist.get_world_size(),), ("h",))
        y = p(p.scatter(torch.randn(1, 2, 3 * dist.get_world_size(), 4, requires_grad=True)))
    finally:
        handle.remove()
    assert isinstance(y, Shard)
    y.sum().backward()
    kinds = ["Tanh", "Conv2d", "Sequential", "SpatialParallel"]  # innermost first, as they end
    assert seen == [(kind, (1, 2, 3, 4)) for kind in kinds]


def images_of_one_row() -> None:
    """Where each dimension has size one, which of them is cut is not to be guessed from shapes."""
    layer = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False))
    shapes = []
    layer[0].register_full_backward_hook(lambda _, __, outputs: shapes.append(tuple(outputs[0].shape)))
    p = parallel(layer, (dist.get_world_size(),), ("h",))
    x = torch.ones(1, 1, 1, 1, requires_grad=True)
    p(p.scatter(x)).gather().sum().backward()
    assert x.grad is not None
    close(x.grad, layer[0].weight.detach(), "dx")
    assert shapes == [(1, 1, int(dist.get_rank() == dist.get_world_size() - 1), 1)]


def of_the_input() -> None:
    """A leaf that is a shard."""
    p = parallel(nn.Conv2d(1, 1, 3, padding=1), (dist.get_world_size(),), ("h",))
    x = p.scatter(torch.ones(1, 1, 6, 4)).requires_grad_()
    seen = []
    x.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append(tuple(leaf.grad.shape)))
    p(x).sum().backward()
    assert seen == [(1, 1, 6 // dist.get_world_size(), 4)] * 2


def views() -> None:
    p = parallel(nn.Identity(), (dist.get_world_size(),), ("h",))
    full = torch.arange(2 * 12 * 4, dtype=torch.float64).view(1, 2, 12, 4)
    x = p.scatter(full)
    close(x.view_as(x).gather(), full, "view")
    close(x.view_as(torch.empty(2, 12, 4)).gather(), full[0], "another shape")
    assert full.view_as(x).shape == full.shape


def everything() -> None:
    same_as_one_device()
    hooks_of_all_modules()
    images_of_one_row()
    of_the_input()
    views()


def test_hooks_see_what_they_see_on_one_device() -> None:
    run(3, everything)
