"""The same on GPUs, by NCCL."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.distributed import test_convolution, test_dtensor, test_failures, test_layers, test_losses
from tests.distributed.ranks import close, parallel, run
from torch import nn

from tilewise.distributed import optimize
from tilewise.distributed.halo_choice import Chosen
from tilewise.distributed.halo_terms import HaloTerms
from tilewise.distributed.planned import PlannedPasses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not 1 < torch.cuda.device_count() < 5, reason="2 to 4 GPUs, one a rank"),
]


def ranks() -> int:
    return torch.cuda.device_count()


def test_convolutions() -> None:
    run(ranks(), test_convolution.many, ranks(), 1, 40, device="cuda", timeout=300)


def test_networks() -> None:
    run(ranks(), test_convolution.networks, device="cuda", timeout=120)


def test_layers_too() -> None:
    run(ranks(), test_layers.everything, ranks(), device="cuda", timeout=300)


def test_losses_too() -> None:
    run(ranks(), test_losses.everything, ranks(), device="cuda", timeout=300)


def test_dtensor_too() -> None:
    run(ranks(), test_dtensor.everything, ranks(), device="cuda", timeout=120)


def captured() -> None:
    """A step as one CUDA graph, replayed on other images, beside the same by one device."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 5, stride=2, padding=2),
        nn.MaxPool2d(2), nn.ConvTranspose2d(4, 2, 2, stride=2),
    ).double()  # fmt: skip
    p = parallel(copy.deepcopy(plain), (ranks(),), ("h",))
    static = torch.zeros(2, 3, 24, 10, dtype=torch.float64, requires_grad=True)
    wanted = [static, *p.parameters()]

    def step() -> list[torch.Tensor]:
        y = p.gather(p(p.scatter(static)))
        return [y.detach(), *torch.autograd.grad(y.square().sum(), wanted)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        x = torch.randn_like(static).requires_grad_()
        with torch.no_grad():
            static.copy_(x)
        graph.replay()
        y = plain(x)
        expected = [y, *torch.autograd.grad(y.square().sum(), [x, *plain.parameters()])]
        for got, want in zip(found, expected, strict=True):
            close(got, want, f"replay {seed}")


def test_cuda_graphs() -> None:
    run(ranks(), captured, device="cuda", timeout=120)


def planned() -> list[str]:
    """Plans for a rank's own convolutions, and fused kernels for the halos whether they were faster or not."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 5, stride=2, padding=2),
        nn.ConvTranspose2d(24, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, padding=2, dilation=2),
    )  # fmt: skip
    layer = copy.deepcopy(plain)
    exact = plain.double()
    x = torch.randn(4, 3, 48, 20)
    full = x.double().requires_grad_()
    expected = exact(full)
    expected.square().sum().backward()
    p = parallel(layer, (ranks(),), ("h",))
    optimize(p, p.scatter(x.clone().requires_grad_()))
    passes = p.space.passes
    assert isinstance(passes, PlannedPasses)
    assert passes.halos
    reasons = [chosen.reason for _, chosen in passes.halos.values()]
    assert not any("raised" in reason or "error" in reason for reason in reasons), reasons
    for forced in (False, True):
        if forced:
            passes.halos = {k: (c, Chosen(HaloTerms(c.share, "ieee"))) for k, (c, _) in passes.halos.items()}
        own = x.clone().requires_grad_()
        layer.zero_grad()
        y = p.gather(p(p.scatter(own)))
        y.square().sum().backward()
        pairs = [(y, expected), (own.grad, full.grad)]
        pairs += [(a.grad, b.grad) for a, b in zip(layer.parameters(), exact.parameters(), strict=True)]
        for got, want in pairs:
            assert (got.double() - want).norm() <= 1e-5 * want.norm(), forced
    return reasons


def test_plans_and_fused_halos() -> None:
    run(ranks(), planned, device="cuda", timeout=200)


@pytest.mark.parametrize("kind", ["model", "size", "raises", "dies", "hangs"])
def test_failures_too(kind: str) -> None:
    found: list[Any] = run(
        ranks(), test_failures.step, kind, 4.0, device="cuda", timeout=60, may_die=True,
        without=1 if kind == "hangs" else None,
    )  # fmt: skip
    heard = [pair for pair in found if pair is not None]
    assert heard
    other = ranks() - 1 if kind == "model" else 1
    for seconds, text in heard:
        assert f"rank {other}" in text or "OSError" in text, text
        assert seconds < 12, text
