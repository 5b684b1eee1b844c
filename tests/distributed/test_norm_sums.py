"""Sums of norms over ranks by kernels, in Triton's interpreter: between two kernels, and through shared memory."""

from __future__ import annotations

import pytest
import torch
from tests.distributed import norm_cases
from tests.distributed.norm_cases import WAYS
from tests.distributed.ranks import parallel, run
from tests.interpreter import interpreted
from torch import nn

from tilewise.comm.peer_sums import BLOCK, PeerSums
from tilewise.distributed.norm_choice import NormChoice, choose_norms
from tilewise.distributed.norm_sums import NormSums


@interpreted
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_norms_are_those_of_one_device(ranks: int, way: str) -> None:
    launches = set(run(ranks, norm_cases.many, way, timeout=200))
    assert len(launches) == 1
    # Eight norms in three steps each way: a launch, or two around a sum, as are those that memory has no room for.
    assert launches == {2 * 3 * (8 + 1 if way == "memory" else 16)}


@interpreted
def test_parts_of_half_precision() -> None:
    run(2, norm_cases.many, "memory", torch.float16, timeout=200)


@interpreted
@pytest.mark.parametrize("way", WAYS)
def test_a_trial_finds_what_is_wrong(way: str) -> None:
    for right, wrong, differing in run(2, norm_cases.tried, way, timeout=200):
        assert right == ""
        assert "relative L2 error" in wrong
        assert "ranks have different statistics" in differing


@interpreted
def test_a_silent_rank_is_named() -> None:
    text, _ = run(2, norm_cases.silent)
    assert "rank 1 ended or gave no answer" in text
    assert "the norm" in text


def untried() -> list[object]:
    link = parallel(nn.Identity(), (2,), ("h",)).space.link
    nothing = choose_norms(link, torch.device("cpu"), graphs=False)
    link.norms = [([1, 3, 4 + link.index, 4], "fp32", False)]
    return [*nothing, *choose_norms(link, torch.device("cpu"), graphs=False)]


def test_why_not_is_said() -> None:
    for found in run(2, untried):
        assert found == [
            None, NormChoice("torch", ("no norm is over ranks",)), None, NormChoice("torch", ("on cpu",)),
        ]  # fmt: skip


def noted() -> list[object]:
    """The norms that a step met, of those that kernels might compute."""
    x = parallel(nn.Identity(), (2,), ("h",)).scatter(torch.randn(2, 8, 5, 4))
    link = x.space.link
    link.norms, link.largest = [], {}
    last = x.like(x.local.contiguous(memory_format=torch.channels_last))
    for norm, image in ((nn.BatchNorm2d(8), x), (nn.GroupNorm(1, 8), x), (nn.SyncBatchNorm(8).double(), last)):
        image = image.like(image.local.to(next(norm.parameters()).dtype))
        parallel(norm, (2,), ("h",))(image)
    link.largest = None
    return link.norms


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
