"""Layers other than convolutions on 2 to 5 ranks against one device in float64, with gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed import models
from tests.distributed.ranks import against_one_device, close, parallel, run
from tests.sampling import some
from torch import nn
from torch.nn import functional as F

from tilewise.distributed import Shard, UnknownLayer
from tilewise.distributed.shards.whole import scatter


def pools(ranks: int, count: int) -> None:
    draw = random.Random(f"pools {ranks}")
    for number in range(count):
        torch.manual_seed(number)
        against_one_device(models.pooling(draw, ranks), f"case {number}:")


class Of(nn.Module):
    """A function of an image and three parameters: one number a channel, one an element, and a linear layer's."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        super().__init__()
        self.name, self.function = name, function
        self.scale = nn.Parameter(torch.rand(1, 4, 1, 1) + 0.5)
        self.place = nn.Parameter(torch.rand(1, 4, 6, 8))
        self.weight = nn.Parameter(torch.rand(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.function(self, x)
        return found + 0 * (self.scale.sum() + self.place.sum() + self.weight.sum())

    def extra_repr(self) -> str:
        return self.name


def squeeze_and_excite(m: Of, x: torch.Tensor) -> torch.Tensor:
    pooled = F.adaptive_avg_pool2d(x, 1).flatten(1)
    return x * torch.sigmoid(F.linear(F.linear(pooled, m.weight), m.weight.mT)).view(-1, 4, 1, 1)


def in_place(m: Of, x: torch.Tensor) -> torch.Tensor:
    y = x * m.scale
    y += x
    y.mul_(2).clamp_(-3, 3)
    y -= m.place
    return F.leaky_relu(y, 0.2, inplace=True)


FUNCTIONS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "arithmetic": lambda m, x: (2 - x) * m.scale / (x.abs() + 1) + x**2 - 3 % (x.detach() + 9) + m.place,
    "activations": lambda m, x: F.silu(x) + F.gelu(x) + F.hardswish(x) + x.tanh() + torch.sigmoid(x) + F.elu(x),
    "prelu": lambda m, x: F.prelu(x, m.scale.flatten()) + torch.where(x > 0, x, m.place) + torch.maximum(x, m.scale),
    "in place": in_place,
    "squeeze": squeeze_and_excite,
    "cat": lambda m, x: torch.cat([x, x * m.scale, m.place.expand(2, -1, -1, -1)], dim=1),
    "chunks": lambda m, x: sum(x.chunk(2, 1)) * x[:, :2] * torch.stack([x, x], 1)[:, 1, 2:],
    "crop": lambda m, x: x[..., 1:5, 2:-1] * 2 + x[:, 1:2, :4, 1:-2],
    "views": lambda m, x: x.view(2, 2, 2, 6, 8).transpose(1, 2).reshape(2, 4, 6, 8)
    + x.flatten(0, 1).unflatten(0, (2, 4)),
    "channels last": lambda m, x: F.linear(x.permute(0, 2, 3, 1), m.weight).softmax(-1).permute(0, 3, 1, 2),
    "flatten": lambda m, x: F.linear(x.flatten(2).mean(2), m.weight),
    "means": lambda m, x: x.mean((2, 3)) + (x.square() * m.place).mean(dim=[-1, -2], keepdim=True).flatten(1) + x.sum(),
    "channel mean": lambda m, x: x - x.mean(1, keepdim=True) + x.sum((0, 1), keepdim=True),
    "softmax": lambda m, x: F.log_softmax(x, 1) + x.softmax(dim=1) * F.glu(torch.cat([x, x], 1), 1),
    "shapes": lambda m, x: x * x.shape[-1] + x.size(2) + x.size()[3] + x.numel() + len(x) + x.new_zeros(1)
    if not isinstance(x, Shard) else x * x.shape[-1] + x.size(2) + x.size()[3] + x.numel() + len(x),
    "used twice": lambda m, x: (x * m.scale).mean((2, 3)) * m.scale.flatten() + (x * m.scale).amax() * 0
    if not isinstance(x, Shard) else (x * m.scale).mean((2, 3)) * m.scale.flatten(),
}  # fmt: skip


def functions(ranks: int) -> None:
    draw = random.Random(f"functions {ranks}")
    meshes = models.MESHES[ranks]
    for i, (name, function) in enumerate(FUNCTIONS.items()):
        torch.manual_seed(i)
        case = models.placed(draw, ranks, Of(name, function), 4, (6, 8), meshes[i % len(meshes)])
        against_one_device(case, name)


def unpooling(ranks: int) -> None:
    """Indices are those of the whole plane, ties and infinities too, and values go back there."""
    draw = random.Random(f"unpooling {ranks}")
    for number in range(some(14)):
        torch.manual_seed(number)
        dims = draw.choice((1, 2, 2, 3))
        sizes = tuple(draw.randint(3, {1: 30, 2: 12, 3: 6}[dims]) for _ in range(dims))
        kernel, stride = draw.choice((1, 2, 3)), draw.choice((1, 2, 3))
        options = {"kernel_size": kernel, "stride": stride, "padding": draw.randint(0, kernel // 2)}
        dilation = 1 if number % 2 else 2
        case = models.placed(draw, ranks, nn.Identity(), 2, sizes)
        full = torch.randn(case.shape, dtype=torch.float64).mul(2).round().div(2)
        full[..., : number % 4] = -float("inf")
        p = parallel(case.layer, *case.mesh)
        x = p.scatter(full, case.cuts)
        what = f"{case.shape} {case.cuts} {options} {dilation}"
        pool, unpool = getattr(F, f"max_pool{dims}d"), getattr(F, f"max_unpool{dims}d")
        if min(sizes) + 2 * options["padding"] > dilation * (kernel - 1):
            y, where = pool(x, **options, dilation=dilation, return_indices=True)
            expected, places = pool(full, **options, dilation=dilation, return_indices=True)
            close(y.gather(), expected, what)
            close(where.gather(), places, what)
        expected, places = pool(full, **options, return_indices=True)
        _, where = pool(x, **options, return_indices=True)
        values = torch.randn(expected.shape, dtype=torch.float64)
        if stride < kernel:
            # Overlapping windows may have one maximum: then values for one place are to be one value.
            values = torch.ones_like(values)
        own, plain = values.clone().requires_grad_(), values.clone().requires_grad_()
        usual = tuple((n - 1) * stride + kernel - 2 * options["padding"] for n in expected.shape[-dims:])
        size = None if usual == sizes and number % 3 else sizes
        again = unpool(plain, places, **options, output_size=size)
        layout = p.layout(expected.shape, dict(zip(case.mesh[1], where.spatial.cuts, strict=True)))
        found = unpool(scatter(own, layout, p.space), where, **options, output_size=size)
        upstream = torch.randn_like(again)
        again.backward(upstream)
        whole = found.gather()
        whole.backward(upstream)
        close(whole, again, f"unpool {what}")
        close(own.grad, plain.grad, f"unpool's gradient {what}")


def randomness() -> tuple[float, float]:
    """Each rank drops other elements, and all draw the same numbers afterwards."""
    torch.manual_seed(3)
    p = parallel(nn.Sequential(nn.Dropout(0.3), nn.Dropout2d(0.25)), (dist.get_world_size(),), ("h",))
    x = p.scatter(torch.ones(8, 8, 7, 40), {"h": (0, 1, 7) if dist.get_world_size() == 2 else (0, 2, 2, 7)})
    whole = p(x).gather()
    kept = F.dropout(p.scatter(torch.ones(8, 8, 7, 40)), 0.3).gather()
    assert abs(kept.count_nonzero().item() / kept.numel() - 0.7) < 0.02
    assert not torch.equal(kept[:, :, 0], kept[:, :, -1])
    by_channel = whole.amax((2, 3))
    assert set(by_channel.unique().tolist()) <= {0.0, by_channel.max().item()}
    return whole.sum().item(), torch.rand(()).item()


def refusals() -> None:
    ranks = dist.get_world_size()

    class Strange(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(x)

    p = parallel(nn.Sequential(nn.ReLU(), nn.Sequential(Strange())), (ranks,), ("h",))
    x, w = p.scatter(torch.ones(1, 2, 8, 8)), torch.ones(2, 2, 1, 1)
    for call, error, words in (
        (lambda: Strange()(x), UnknownLayer, "fft_rfft in forward of Strange: .*gather"),
        (lambda: x + p.scatter(torch.ones(1, 2, 4, 8)), ValueError, "do not fit together"),
        (lambda: x + torch.ones(3, 1), ValueError, "does not fit"),
        (lambda: torch.cat([x, x], 2), ValueError, "dim=2 is cut across ranks"),
        (lambda: x.unfold(2, 2, 1), UnknownLayer, "Tensor.unfold"),
        (lambda: torch.add(x, x, out=torch.ones(1, 2, 8, 8)), ValueError, "out="),
        (lambda: torch.ones(1, 2, 8, 8).add_(x), ValueError, "whole tensor"),
        (lambda: p.scatter(torch.ones(3), None), ValueError, "no dimension 'h'"),
        (lambda: p.scatter(torch.ones(1, 1, 8, 8), {"h": (0, 9)}), ValueError, "cuts="),
        (lambda: F.conv2d(x, torch.ones(2, 3, 1, 1)), ValueError, "input has 2 channels"),
        (lambda: F.conv2d(x, w, stride=(1, 2), padding="same"), ValueError, r"for stride 1, not \(1, 2\)"),
        (lambda: F.conv2d(x, w, padding="some"), ValueError, "padding='some': a number, 'same' or 'valid' would do"),
        (lambda: F.conv2d(torch.ones(1, 2, 8, 8), x), ValueError, "conv2d: its weight is cut .* its input is not"),
        (lambda: F.group_norm(torch.ones(1, 2, 8), 1, x), ValueError, "group_norm: its weight is cut"),
        (lambda: F.layer_norm(torch.ones(2, 8), (8,), x), ValueError, "layer_norm: its weight is cut"),
        (lambda: F.rms_norm(torch.ones(2, 8), (8,), x), ValueError, "rms_norm: its weight is cut"),
        (lambda: F.linear(torch.ones(2, 8), x), ValueError, "linear: its weight is cut"),
        (lambda: F.max_unpool2d(x, x.long(), 2, output_size=(9, 20)), ValueError, r"output_size=\(9, 20\): \(16, 16\)"),
        (lambda: F.max_unpool2d(x, torch.ones(1, 2, 8, 8).long(), 2), ValueError, "indices are a whole tensor"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            call()
    if not x.is_cuda:  # there it is an assertion of the device, which ends its use
        with pytest.raises(RuntimeError, match="an index lies outside of its window"):
            F.max_unpool2d(x, x.long(), 2)


def changed_in_place() -> None:
    """As of a plain tensor: autograd's graph has no copies of views, and what held the shard before sees the change."""
    p = parallel(nn.BatchNorm2d(3).double(), (dist.get_world_size(),), ("h",))
    full = torch.randn(2, 3, 8, 6, dtype=torch.float64)
    for name, change in {
        "relu": lambda y: F.relu(y, inplace=True),
        "add": lambda y: y.__iadd__(1),
        "clamp, in turn": lambda y: y.mul_(2).clamp_(-1, 1),
        "dropout": lambda y: F.dropout(y, 0.5, inplace=True),
        "channels": lambda y: F.dropout2d(y, 0.5, inplace=True),
    }.items():
        before = p(p.scatter(full))
        after = change(before)
        assert isinstance(after, Shard), name
        assert not any("CopySlices" in node for node in nodes(after.local)), name
        assert after.local.data_ptr() == before.local.data_ptr(), name
        upstream = torch.randn_like(after.local)
        weight = p.module.weight
        by_after, by_before = (
            torch.autograd.grad(y.local, weight, upstream, retain_graph=True) for y in (after, before)
        )
        close(by_before[0], by_after[0], f"{name}: the gradient by what held the shard before")
        torch.testing.assert_close(before.local, after.local)
    leaf = p.scatter(full).local.detach().requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        p.shard(leaf, full.shape).relu_()
    plain = p.shard(full[:, :, : p.layout(full.shape).part(full.shape)[2]].clone(), full.shape)
    assert plain.requires_grad_().requires_grad
    assert not plain.detach().requires_grad
    with pytest.raises(RuntimeError, match="detach"):
        (plain * 2).detach_()


def nodes(tensor: torch.Tensor) -> set[str]:
    """Names in the tensor's graph."""
    found, left = set(), [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [parent for parent, _ in node.next_functions]
    return {node.name() for node in found}


def everything(ranks: int) -> Any:
    changed_in_place()
    pools(ranks, some(50))
    functions(ranks)
    unpooling(ranks)
    if ranks < 4:
        refusals()
        return randomness()
    return None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_layers(ranks: int) -> None:
    found = run(ranks, everything, ranks)
    assert len(set(found)) == 1
