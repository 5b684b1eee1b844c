"""Sums of norms over GPUs by kernels: between two of them, and through each other's memory."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.distributed import norm_cases
from tests.distributed.graphs import captured_step
from tests.distributed.norm_cases import WAYS, kernels_of, near
from tests.distributed.ranks import parallel, run
from torch import nn

from tilewise.distributed import optimize
from tilewise.distributed.norms.choice import NormChoice
from tilewise.distributed.planned import PlannedPasses
from tilewise.machine.torch_state import fp32_precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not 1 < torch.cuda.device_count() < 5, reason="2 to 4 GPUs, one a rank"),
]


def ranks() -> int:
    return torch.cuda.device_count()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_norms_are_those_of_one_device(way: str, dtype: torch.dtype) -> None:
    assert min(run(ranks(), norm_cases.many, way, dtype, device="cuda", timeout=120)) > 0


@pytest.mark.parametrize("way", WAYS)
def test_a_trial_finds_what_is_wrong(way: str) -> None:
    for right, wrong, differing in run(ranks(), norm_cases.tried, way, device="cuda", timeout=120):
        assert right == ""
        assert "relative L2 error" in wrong
        assert "ranks have different statistics" in differing


def test_a_silent_rank_is_named() -> None:
    found = run(ranks(), norm_cases.silent, device="cuda", may_die=True, without=1)
    assert any(text is not None and "rank 1" in text for text in found)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 130, 1),
        nn.SyncBatchNorm(130),
    )


def replayed(way: str, order: torch.memory_format) -> None:
    """Steps as one CUDA graph, replayed on other images while ranks are late by turns, beside one device."""
    torch.manual_seed(0)
    layer = network().to(memory_format=order)  # type: ignore[call-overload]
    p = parallel(layer, (ranks(),), ("h",))
    p.space.norms = kernels_of(p.space.link, way)
    static = torch.zeros(2, 3, 16, 10).contiguous(memory_format=order).requires_grad_()
    work = torch.randn(2048, 2048)

    def step() -> list[torch.Tensor]:
        y = p.gather(p(p.scatter(static)))
        return [y.detach(), *torch.autograd.grad(y.square().mean() + y[:, 0].mean(), [static, *p.parameters()])]

    graph, found = captured_step(step)
    exact = copy.deepcopy(layer).double()
    for seed in range(12):
        torch.manual_seed(seed)
        x = torch.randn_like(static)
        static.detach().copy_(x)
        if seed % ranks() == p.space.link.index:
            for _ in range(20):
                work = work @ work * 1e-3
        graph.replay()
        full = x.double().requires_grad_()
        exact.load_state_dict({k: v.double() for k, v in layer.state_dict().items()})
        exact.train()
        y = exact(full)
        expected = [y, *torch.autograd.grad(y.square().mean() + y[:, 0].mean(), [full, *exact.parameters()])]
        for got, want in zip(found, expected, strict=True):
            near(got, want, f"{way} replay {seed}", 1e-4)
    p.space.norms = p.space.link.peer_sums = None


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("way", WAYS)
def test_replays(way: str, order: torch.memory_format) -> None:
    run(ranks(), replayed, way, order, device="cuda", timeout=120)


def chosen() -> NormChoice:
    """What :func:`optimize` chooses, and that it computes the same. Plans in TF32, torch's default, would differ."""
    with fp32_precision("cuda", "conv", "ieee"):
        return _chosen()


def _chosen() -> NormChoice:
    torch.manual_seed(0)
    layer = network()
    exact = copy.deepcopy(layer).double()
    p = parallel(layer, (ranks(),), ("h",))
    x = torch.randn(2, 3, 32, 16)
    optimize(p, p.scatter(x.clone().requires_grad_()), cuda_graphs=True)
    passes = p.space.passes
    assert isinstance(passes, PlannedPasses)
    assert passes.norms is not None
    for _ in range(3):
        full, own = x.double().requires_grad_(), x.clone().requires_grad_()
        expected, found = exact(full), p.gather(p(p.scatter(own)))
        expected.square().mean().backward()
        found.square().mean().backward()
        near(found, expected, "results", 1e-4)
        near(own.grad, full.grad, "images' gradients", 1e-4)
    for a, b in zip(layer.buffers(), exact.buffers(), strict=True):
        near(a, b.double(), "running statistics", 1e-4)
    return passes.norms


def test_what_is_right_and_faster_is_chosen() -> None:
    found = run(ranks(), chosen, device="cuda", timeout=200)
    print(found[0])
    assert all(one == found[0] for one in found)
    assert not any("raised" in reason or "error" in reason for reason in found[0].reasons)
