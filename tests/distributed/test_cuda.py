"""The same on GPUs, by NCCL."""

from __future__ import annotations

import contextlib
import copy
import time
from typing import Any

import pytest
import torch
from tests.distributed import (
    test_convolution,
    test_double_backward,
    test_dtensor,
    test_failures,
    test_layers,
    test_losses,
)
from tests.distributed.graphs import captured_step
from tests.distributed.ranks import close, parallel, run
from torch import nn

from tilewise.comm import peer_choice
from tilewise.comm.link import Link, Noted, PeerError
from tilewise.comm.peer_choice import PeerChoice, choose_peers
from tilewise.distributed import optimize
from tilewise.distributed.passes.halo_choice import Chosen
from tilewise.distributed.passes.halo_kernels import BLOCKS, HaloTerms, Kernels
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


def test_gradients_of_gradients() -> None:
    run(ranks(), test_double_backward.everything, ranks(), device="cuda", timeout=300)


def test_layers_too() -> None:
    run(ranks(), test_layers.everything, ranks(), device="cuda", timeout=300)


def test_losses_too() -> None:
    run(ranks(), test_losses.everything, ranks(), device="cuda", timeout=300)


def test_dtensor_too() -> None:
    run(ranks(), test_dtensor.everything, ranks(), device="cuda", timeout=120)


def captured(order: torch.memory_format = torch.contiguous_format) -> None:
    """A step as one CUDA graph, replayed on other images, beside the same by one device."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 5, stride=2, padding=2),
        nn.MaxPool2d(2), nn.ConvTranspose2d(4, 2, 2, stride=2),
    ).double()  # fmt: skip
    plain = plain.to(memory_format=order)  # type: ignore[call-overload]
    p = parallel(copy.deepcopy(plain), (ranks(),), ("h",))
    static = torch.zeros(2, 3, 24, 10, dtype=torch.float64).contiguous(memory_format=order).requires_grad_()
    wanted = [static, *p.parameters()]

    def step() -> list[torch.Tensor]:
        y = p.gather(p(p.scatter(static)))
        return [y.detach(), *torch.autograd.grad(y.square().sum(), wanted)]

    graph, found = captured_step(step)
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


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_cuda_graphs(order: torch.memory_format) -> None:
    run(ranks(), captured, order, device="cuda", timeout=120)


def connect(link: Link) -> PeerChoice:
    """All messages of ``link`` through peers' memory from now on, whether that is faster or not."""
    device = torch.device("cuda", torch.cuda.current_device())
    noted = Noted(dict.fromkeys(link.others, 1 << 22))
    found = choose_peers(link, noted, device, graphs=True)
    assert found.times, found.reason
    if link.peers is None:
        peer_choice.GAIN = 1e9
        choose_peers(link, noted, device, graphs=False)
    assert link.peers is not None
    link.peers.largest = link.peers.places.capacity
    return found


def through_memory() -> Link:
    """The link of models on all ranks, which uses memory."""
    link = parallel(nn.Identity(), (ranks(),), ("h",)).space.link
    connect(link)
    return link


def straight() -> PeerChoice:
    """Convolutions and networks of every kind, and a graph's replays, whose halos go through memory."""
    found = connect(parallel(nn.Identity(), (ranks(),), ("h",)).space.link)
    test_convolution.many(ranks(), 2, 30)
    test_convolution.modes()
    captured()
    captured(torch.channels_last)
    return found


def test_through_memory() -> None:
    for found in run(ranks(), straight, device="cuda", timeout=200):
        print(found)


def skewed() -> None:
    """Messages of all sizes and views in turn, while ranks are late by turns, again and again in a graph."""
    link = through_memory()
    assert link.peers is not None
    for near in (False, True):
        link.peers.near = near
        link.peers._programs.clear()
        skewed_once(link)


def skewed_once(link: Link) -> None:
    torch.manual_seed(0)
    whole = [torch.empty(40, 33, 70) for _ in range(3)]
    product = torch.randn(2048, 2048)

    def exchanged() -> list[torch.Tensor]:
        found = []
        for number, tensor in enumerate(whole):
            if number % ranks() == link.index:
                product @ product  # late
            sent = (tensor, tensor[:, 4:5], tensor[:, 1:, ::2].mT)[number]
            others = link.others
            pending = link.exchange("skew", [(o, sent) for o in others], [(o, sent.shape) for o in others], sent)
            found.append(torch.stack(pending.wait()))
            targets = [torch.ones_like(sent) for _ in others]
            pending = link.exchange("sum", [(o, sent) for o in others], [(o, sent.shape) for o in others], sent)
            pending.add_to(targets)
            found.append(torch.stack(targets) - 1)
        return found

    exchanged()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = exchanged()
    for seed in range(20):
        everyones = []
        for rank in range(ranks()):
            torch.manual_seed(1000 * seed + rank)
            everyones.append([torch.randint(-99, 99, t.shape).float() for t in whole])
        for tensor, value in zip(whole, everyones[link.index], strict=True):
            tensor.copy_(value)
        for result in found:
            result.fill_(torch.nan)
        graph.replay()
        for number in range(len(whole)):
            sent = [
                (one[number], one[number][:, 4:5], one[number][:, 1:, ::2].mT)[number]
                for index, one in enumerate(everyones)
                if index != link.index
            ]
            for result in found[2 * number : 2 * number + 2]:
                assert torch.equal(result, torch.stack(sent)), (seed, number)


def test_messages_keep_their_order_in_replays() -> None:
    run(ranks(), skewed, device="cuda", timeout=120)


def hanging(seconds: float) -> tuple[float, str] | None:
    """Replays of which rank 1 makes one less than the others."""
    link = through_memory()
    assert link.peers is not None
    link.peers.rounds = int(seconds / 1e-3)
    sent = torch.ones(1000)

    def exchanged() -> None:
        others = link.others
        link.exchange("a layer", [(o, sent) for o in others], [(o, sent.shape) for o in others], sent).wait()

    exchanged()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exchanged()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    start = time.monotonic()
    if link.index == 1:
        with contextlib.suppress(PeerError):  # the others', of which it hears
            time.sleep(12)
        return None
    try:
        graph.replay()
        torch.cuda.synchronize()
        time.sleep(3)
    except PeerError as error:
        return time.monotonic() - start, str(error)
    raise AssertionError("nobody noticed")


def test_a_rank_that_replays_no_more_is_named() -> None:
    for heard in run(ranks(), hanging, 2.0, device="cuda", timeout=60):
        if heard is not None:
            assert heard[0] < 11, heard
            assert "rank 1" in heard[1], heard


def planned(precision: str, bound: float) -> list[str]:
    """Plans for a rank's own convolutions, and fused kernels for the halos whether they were faster or not."""
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
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
            kernels = Kernels.alike(BLOCKS[0])
            passes.halos = {
                k: (c, Chosen(HaloTerms(c.share, precision, kernels))) for k, (c, _) in passes.halos.items()
            }
        own = x.clone().requires_grad_()
        layer.zero_grad()
        y = p.gather(p(p.scatter(own)))
        y.square().sum().backward()
        pairs = [(y, expected), (own.grad, full.grad)]
        pairs += [(a.grad, b.grad) for a, b in zip(layer.parameters(), exact.parameters(), strict=True)]
        for got, want in pairs:
            assert (got.double() - want).norm() <= bound * want.norm(), forced
    return reasons


@pytest.mark.parametrize(("precision", "bound"), [("ieee", 1e-5), ("tf32", 3e-3)])
def test_plans_and_fused_halos(precision: str, bound: float) -> None:
    run(ranks(), planned, precision, bound, device="cuda", timeout=200)


@pytest.mark.parametrize(
    ("kind", "memory"),
    [(kind, False) for kind in ("model", "size", "raises", "dies", "hangs")]
    + [(kind, True) for kind in ("raises", "dies", "hangs")],
)
def test_failures_too(kind: str, memory: bool) -> None:
    found: list[Any] = run(
        ranks(), test_failures.step, kind, 4.0, connect if memory else None, device="cuda", timeout=60, may_die=True,
        without=1 if kind == "hangs" else None,
    )  # fmt: skip
    heard = [pair for pair in found if pair is not None]
    assert heard
    other = ranks() - 1 if kind == "model" else 1
    for seconds, text in heard:
        assert f"rank {other}" in text or "OSError" in text, text
        assert seconds < 12, text
