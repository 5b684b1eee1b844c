"""Sums of norms over ranks by kernels, in Triton's interpreter: between two kernels, and through shared memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed import norm_cases
from tests.distributed.norm_cases import WAYS
from tests.distributed.ranks import parallel, run
from tests.interpreter import interpreted
from torch import nn

from tilewise.comm.link import Noted
from tilewise.comm.peer_sums import BLOCK, PeerSums
from tilewise.distributed.norms.choice import NormChoice, choose_norms
from tilewise.distributed.norms.sums import NormSums, Tracking


@interpreted
@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_norms_are_those_of_one_device(ranks: int, way: str) -> None:
    launches = set(run(ranks, norm_cases.many, way, timeout=200))
    assert len(launches) == 1
    # Eight norms in three steps each way: a launch, or two around a sum, as are those that memory has no room for.
    assert launches == {2 * 3 * (8 + 1 if way == "memory" else 16)}


@pytest.mark.slow
@interpreted
def test_parts_of_half_precision() -> None:
    run(2, norm_cases.many, "memory", torch.float16, timeout=200)


@pytest.mark.slow
@interpreted
@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS[::-1])
def test_a_trial_finds_what_is_wrong(way: str) -> None:
    for right, wrong, differing in run(2, norm_cases.tried, way, timeout=200):
        assert right == ""
        assert "relative L2 error" in wrong
        assert "ranks have different statistics" in differing


@interpreted
def test_a_silent_rank_is_named() -> None:
    text, _ = run(2, norm_cases.silent, without=1)
    assert "rank 1 gave no answer" in text
    assert "the norm" in text


def untried() -> list[object]:
    link = parallel(nn.Identity(), (2,), ("h",)).space.link
    some = Noted(norms=[([1, 3, 4 + link.index, 4], "fp32", False)])
    found = [choose_norms(link, noted, torch.device("cpu"), graphs=False) for noted in (Noted(), some)]
    return [*found[0], *found[1]]


def test_why_not_is_said() -> None:
    for found in run(2, untried):
        assert found == [
            None, NormChoice("torch", ("no norm is over ranks",)), None, NormChoice("torch", ("on cpu",)),
        ]  # fmt: skip


def noted() -> list[object]:
    """The norms that a step met, of those that kernels might compute."""
    x = parallel(nn.Identity(), (2,), ("h",)).scatter(torch.randn(2, 8, 5, 4))
    link = x.space.link
    link.noted = noted = Noted()
    last = x.like(x.local.contiguous(memory_format=torch.channels_last))
    for norm, image in ((nn.BatchNorm2d(8), x), (nn.GroupNorm(1, 8), x), (nn.SyncBatchNorm(8).double(), last)):
        image = image.like(image.local.to(next(norm.parameters()).dtype))
        parallel(norm, (2,), ("h",))(image)
    link.noted = None
    return list(noted.norms)


def test_norms_are_noted() -> None:
    for rank, found in enumerate(run(2, noted)):
        assert found == [([2, 8, 2 + rank, 4], "fp32", False), ([2, 8, 2 + rank, 4], "fp64", True)]


def test_what_kernels_take() -> None:
    link: object = object()
    kernels = NormSums(link)  # type: ignore[arg-type]
    x = torch.ones(1, 2, 3, 4)
    assert kernels.takes(link, x)  # type: ignore[arg-type]
    assert kernels.takes(link, x.bfloat16())  # type: ignore[arg-type]
    assert not kernels.takes(link, x.double())  # type: ignore[arg-type]
    assert not kernels.takes(object(), x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"channels={BLOCK + 1}: a multiple of {BLOCK}"):
        PeerSums([torch.zeros(1)], 0, BLOCK + 1, 1.0)


def twice() -> None:
    """Gradients of gradients, whose sums are torch's."""
    for layer in (nn.BatchNorm2d(3), nn.SyncBatchNorm(3)):
        torch.manual_seed(0)
        p = parallel(layer, (2,), ("h",))
        p.space.norms = norm_cases.kernels_of(p.space.link, "memory")
        x, upstream = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4)
        full, own = x.double().requires_grad_(), x.clone().requires_grad_()
        plain = nn.BatchNorm2d(3).double()
        for model, leaf in ((plain, full), (None, own)):
            y = p(p.scatter(own)).gather() if model is None else model(leaf)
            (dx,) = torch.autograd.grad((y.pow(3) * upstream).sum(), leaf, create_graph=True)
            dx.square().sum().backward()
        norm_cases.near(own.grad, full.grad, f"{layer}", 1e-4)
        p.space.norms = p.space.link.peer_sums = None


@interpreted
def test_gradients_of_gradients() -> None:
    run(2, twice, timeout=120)


class Alone:
    """In place of a link: ranks of one process, whose sums go through memory alone."""

    def begin(self, what: str) -> None:
        pass

    def heed(self, what: str) -> None:
        pass


@pytest.mark.gpu
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_of_one_gpu(ranks: int, counted: bool) -> None:
    """Each on a stream of its own, late by turns, for more sums than there are places."""
    device = torch.device("cuda", torch.cuda.current_device())
    channels = 3 * BLOCK + 5
    room = 4 * BLOCK
    buffers = [torch.zeros(PeerSums.nbytes(ranks, room), dtype=torch.uint8, device=device) for _ in range(ranks)]
    memory = [PeerSums(buffers, rank, room, 5.0) for rank in range(ranks)]
    links: list[Any] = [Alone() for _ in range(ranks)]
    kernels = [NormSums(link, one) for link, one in zip(links, memory, strict=True)]
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    torch.manual_seed(0)
    shapes = [(2, channels, 3 + rank, 8) for rank in range(ranks)]
    for one, shape in zip(kernels, shapes, strict=True):
        one.compile(device, [torch.empty(shape, device="meta")])  # what is loaded while others wait may wait for them
    for stream in streams:  # so does what is allocated
        with torch.cuda.stream(stream):
            for size in (1 << 10, 1 << 26):
                torch.empty(size, dtype=torch.uint8, device=device)
    count = sum(2 * shape[2] * 8 for shape in shapes)
    work = torch.randn(1024, 1024, device=device)
    for turn in range(7):
        x = [torch.randn(shape, device=device) + turn for shape in shapes]
        dy = [torch.randn(shape, device=device) for shape in shapes]
        running = [[torch.zeros(channels, device=device), torch.ones(channels, device=device)] for _ in shapes]
        whole, upstream = (torch.cat(parts, 2).double() for parts in (x, dy))
        found: list[Any] = [None] * ranks
        torch.cuda.synchronize()
        for rank in range(ranks):
            with torch.cuda.stream(streams[rank]):
                for _ in range(10 * (rank == turn % ranks)):
                    work @ work
                tracking = Tracking(running[rank][0], running[rank][1], 0.1)
                of = None if counted else count
                rows, totals = kernels[rank].forward("forward", x[rank], of, 1e-5, tracking)
                shares, means = kernels[rank].backward("backward", x[rank], dy[rank], rows, totals, of, all_ranks=True)
                found[rank] = rows, shares, means, totals
        torch.cuda.synchronize()
        assert [one.late() for one in memory] == [None] * ranks
        var, mean = torch.var_mean(whole, [0, 2, 3], correction=0)
        centred = upstream * (whole - mean.view(1, -1, 1, 1))
        for rank, (rows, shares, means, totals) in enumerate(found):
            norm_cases.near(rows, torch.stack([mean, var, (var + 1e-5).rsqrt()]), "statistics")
            wanted = torch.stack([upstream.mean([0, 2, 3]), centred.mean([0, 2, 3])])
            norm_cases.near(means, wanted, "means")
            own = dy[rank].double()
            own_centred = own * (x[rank].double() - mean.view(1, -1, 1, 1)) * (var + 1e-5).rsqrt().view(1, -1, 1, 1)
            norm_cases.near(shares, torch.stack([own.sum([0, 2, 3]), own_centred.sum([0, 2, 3])]), "shares")
            norm_cases.near(running[rank][1], 0.9 + 0.1 * var * count / (count - 1), "running variance")
            assert not counted or torch.equal(totals[2], torch.full_like(totals[2], count))
            assert torch.equal(rows, found[0][0])
            assert torch.equal(means, found[0][2])
