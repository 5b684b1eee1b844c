"""Norms, interpolation, padding, shuffles and whole networks on 2 to 5 ranks against one device in float64."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tests.distributed import drawn, nets
from tests.distributed.models import MESHES, Case, placed
from tests.distributed.ranks import close, parallel, run
from tests.sampling import EVERY, some
from torch import nn
from torch.nn import functional as F

from tilewise.distributed import Shard


def compare(case: Case, what: str, training: bool, offset: float = 0.0, steps: int = 1) -> None:
    """Outputs, all gradients and buffers of a number of steps."""
    plain, layer = case.layer.train(training), copy.deepcopy(case.layer)
    p = parallel(layer, *case.mesh)
    what = f"{what} {type(plain).__name__} {plain.extra_repr()} training={training} {case.shape} {case.cuts}"
    for _ in range(steps):
        full = (torch.randn(case.shape, dtype=torch.float64) + offset).requires_grad_()
        own = full.detach().clone().requires_grad_()
        expected = plain(full)
        upstream = torch.randn_like(expected)
        expected.backward(upstream)
        y = p(p.scatter(own, case.cuts))
        assert tuple(y.shape) == tuple(expected.shape), what
        found = p.gather(y) if isinstance(y, Shard) else y
        close(found, expected, what)
        found.backward(upstream)
        assert full.grad is not None
        assert own.grad is not None
        close(own.grad, full.grad, f"dx of {what}")
    for (name, a), (_, b) in zip(layer.named_parameters(), plain.named_parameters(), strict=True):
        assert a.grad is not None, f"{name} of {what} has no gradient"
        assert b.grad is not None
        close(a.grad, b.grad, f"d {name} of {what}")
    for (name, a), (_, b) in zip(layer.named_buffers(), plain.named_buffers(), strict=True):
        close(a, b, f"{name} of {what}")


def many(kind: Callable[[random.Random, int], Case], ranks: int, count: int) -> None:
    draw = random.Random(f"{kind.__name__} {ranks}")
    for number in range(count):
        torch.manual_seed(number)
        case = kind(draw, ranks)
        steps = 2 if kind is drawn.norm else 1
        compare(case, f"case {number}:", draw.random() < 0.75, draw.choice((0.0, 0.0, 30.0)), steps)


def networks(ranks: int) -> None:
    draw = random.Random(f"networks {ranks}")
    for number, (kind, sizes) in enumerate(nets.NETS):
        torch.manual_seed(number)
        net = kind()
        meshes = [mesh for mesh in MESHES[ranks] if len(sizes) < 3 or mesh[1] != ("w",)]
        for training in (True, False) if number % 2 == ranks % 2 else (True,):
            case = placed(draw, ranks, copy.deepcopy(net), net.channels, sizes, draw.choice(meshes))
            compare(case, kind.__name__, training)


def far_from_zero(ranks: int) -> None:
    """In float32 with a mean of a thousand deviations, variances are as good as on one device."""
    torch.manual_seed(5)
    x = torch.randn(2, 3, 40, 50) * 0.1 + 100
    exact = F.batch_norm(x.double(), None, None, training=True)
    p = parallel(nn.BatchNorm2d(3), (ranks,), ("h",))
    found = p(p.scatter(x)).gather()
    on_one = (nn.BatchNorm2d(3)(x) - exact).abs().max()
    assert (found - exact).abs().max() < 2 * on_one


def refusals(ranks: int) -> None:
    p = parallel(nn.Identity(), (ranks,), ("h",))
    x = p.scatter(torch.ones(1, 6, 8, 8))
    for call, words in (
        (lambda: F.group_norm(x, 4), "num_groups=4: a divisor of its 6 channels"),
        (lambda: F.layer_norm(x, (7,)), "does not fit"),
        (lambda: F.batch_norm(x.permute(2, 1, 0, 3), None, None, training=True), "cut along its batch"),
        (lambda: F.interpolate(x, 4, 2), "only one of size or scale_factor"),
        (lambda: F.unfold(x.transpose(2, 3), 2), "unfold: its image is not cut in rows alone, .* gather"),
        (lambda: F.fold(x, (9, 9), 2), "fold: its patches are not cut along the last dimension alone: gather"),
        (lambda: F.fold(F.unfold(x, 2), (8, 9), 2), r"are not patches of 2x2 of an image of \(8, 9\): 56 would do"),
        (lambda: F.pixel_shuffle(x, 4), "square would divide"),
        (lambda: F.pixel_unshuffle(x, 3), "downscale_factor=3"),
        (lambda: torch.channel_shuffle(x, 4), "groups=4"),
        (lambda: F.instance_norm(p.scatter(torch.ones(1, 6, 1, 1))), "more than 1 value"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(RuntimeError, match="less than the corresponding input dimension"):
        F.pad(x, (8, 0, 0, 0), "reflect")


def everything(ranks: int) -> None:
    assert dist.get_world_size() == ranks
    many(drawn.norm, ranks, some(25))
    many(drawn.interpolation, ranks, some(30))
    many(drawn.padding, ranks, some(25))
    many(drawn.shuffle, ranks, some(15))
    many(drawn.patches, ranks, some(15))
    if EVERY or ranks < 4:
        networks(ranks)
    if ranks == 2:
        far_from_zero(ranks)
        refusals(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_norms_and_networks(ranks: int) -> None:
    run(ranks, everything, ranks)


def on_gpus(ranks: int) -> None:
    many(drawn.norm, ranks, 60)
    many(drawn.padding, ranks, 30)
    many(drawn.shuffle, ranks, 10)
    networks(ranks)
    far_from_zero(ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_gpus(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    run(ranks, on_gpus, ranks, device="cuda", timeout=120)
