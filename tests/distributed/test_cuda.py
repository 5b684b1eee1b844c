"""The same on GPUs, by NCCL."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.distributed import test_convolution, test_dtensor, test_failures, test_layers, test_losses
from tests.distributed.ranks import close, parallel, run
from torch import nn

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
