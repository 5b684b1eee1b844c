"""Convolutions on 2 to 5 ranks against one device in float64, with all gradients."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.distributed as dist
from tests.distributed import models
from tests.distributed.ranks import against_one_device, close, parallel, run
from tests.sampling import some

from tilewise.distributed.parts import replicated
from tilewise.distributed.passes import share as share_module


def many(ranks: int, seed: int, count: int) -> None:
    draw = random.Random(f"{seed} {ranks}")
    decide = share_module._assembles
    for number in range(count):
        torch.manual_seed(number)
        form = draw.choice(("terms", "assembled", "auto"))
        share_module.share_of.cache_clear()
        share_module._assembles = lambda _, *rest, form=form: decide(form, *rest)
        case = models.convolution(draw, ranks, transposed=number % 3 == 2)
        against_one_device(case, f"case {number} by {form}:")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_convolutions(ranks: int) -> None:
    run(ranks, many, ranks, 0, some(70 - 8 * ranks))


def network() -> None:
    ranks = dist.get_world_size()
    for seed in range(len(models.MESHES[ranks])):
        for sizes in ((16, 12), (6, 10), (8, 22)):
            torch.manual_seed(seed)
            draw = random.Random(seed)
            net = models.Net()
            case = models.placed(draw, ranks, net, 2, sizes)
            against_one_device(case, "net")


def tail() -> None:
    ranks = dist.get_world_size()
    for shape, dims in models.MESHES[ranks]:
        torch.manual_seed(1)
        sizes = {"h": 8, "w": 6}
        cuts = {d: (*(sizes[d] * r // n for r in range(n)), sizes[d]) for d, n in zip(dims, shape, strict=True)}
        plain = models.Tailed().double()
        layer = copy.deepcopy(plain)
        full = torch.randn(3, 2, 8, 6, dtype=torch.float64, requires_grad=True)
        own = full.detach().clone().requires_grad_()
        plain(full).square().sum().backward()
        p = parallel(layer, shape, dims)
        p(p.scatter(own, cuts)).square().sum().backward()
        close(own.grad, full.grad, "dx")
        for (name, a), (_, b) in zip(layer.named_parameters(), plain.named_parameters(), strict=True):
            close(a.grad, b.grad, name)


def networks() -> None:
    whole = replicated.BUCKET
    for replicated.BUCKET in (whole, 200):  # all gradients in one message, and large ones alone
        network()
        tail()
    replicated.BUCKET = whole
    modes()


def modes() -> None:
    """Without gradients, and under autocast, as on one device."""
    torch.manual_seed(2)
    net = models.Net()
    p = parallel(copy.deepcopy(net), (dist.get_world_size(),), ("h",))
    x = torch.randn(1, 2, 12, 8)
    expected = net(x).detach()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            torch.testing.assert_close(p(p.scatter(x)).gather(), expected)
    with torch.autocast(x.device.type, torch.bfloat16):
        half = net(x)
        found = p(p.scatter(x)).gather()
    assert found.dtype is half.dtype is torch.bfloat16
    torch.testing.assert_close(found, half, rtol=0.05, atol=0.05)
    found.float().square().mean().backward()
    half.float().square().mean().backward()
    for a, b in zip(p.parameters(), net.parameters(), strict=True):
        assert (a.grad - b.grad).norm() < 0.03 * b.grad.norm() + 1e-3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [3, 4])
def test_networks(ranks: int) -> None:
    run(ranks, networks)
