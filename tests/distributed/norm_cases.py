"""Norms over ranks by kernels, beside one device in float64: what ranks of CPUs and of GPUs run."""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.memory import mapped
from tests.distributed.models import cuts_of
from tests.distributed.ranks import parallel
from tests.interpreter import interpreted
from torch import nn

from tilewise.comm.link import Link, PeerError
from tilewise.comm.peer_sums import BLOCK, PeerSums
from tilewise.comm.symmetric import connected, symmetric_buffer
from tilewise.comm.waiting import LOOK
from tilewise.distributed.norms.choice import faults
from tilewise.distributed.norms.normalization import Normalize, Over
from tilewise.distributed.norms.sums import NormSums

BOUND = 1e-5
CHANNELS = 2 * BLOCK
assert interpreted  # imported before what defines kernels
TYPES = {"cpu": ("fp32",), "cuda": ("fp32", "fp16", "bf16")}
"""The interpreter has no bfloat16, and is slow."""
WAYS = ("between two kernels", "memory")


def shared(link: Link, channels: int = CHANNELS) -> PeerSums:
    """Memory that all ranks see: of GPUs, or on CPUs of files that all map."""
    device = torch.get_default_device()
    size = PeerSums.nbytes(link.size, channels)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        buffers, kept = connected(link, symmetric_buffer(size, device))
        return PeerSums(buffers, link.index, channels, link.timeout, kept)
    return PeerSums(mapped(link, size), link.index, channels, link.timeout)


def kernels_of(link: Link, way: str, channels: int = CHANNELS) -> NormSums:
    """Kernels for norms over ``link``, by one of ``WAYS``."""
    link.peer_sums = shared(link, channels) if way == "memory" else None
    return NormSums(link, link.peer_sums)


def norms(draw: random.Random) -> list[nn.Module]:
    """Of few and of more channels than a block has, and than memory has room for."""
    found: list[nn.Module] = [
        nn.BatchNorm2d(1), nn.BatchNorm2d(3, momentum=None), nn.BatchNorm2d(BLOCK + 5, eps=0.1),
        nn.BatchNorm2d(2, affine=False), nn.BatchNorm2d(4, track_running_stats=False), nn.SyncBatchNorm(5),
        nn.SyncBatchNorm(CHANNELS), nn.BatchNorm2d(CHANNELS + 1),
    ]  # fmt: skip
    for model in found:
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    draw.shuffle(found)
    return found


def near(found: torch.Tensor | None, expected: torch.Tensor | None, what: str, bound: float = BOUND) -> None:
    assert found is not None, what
    assert expected is not None, what
    error = (found.double() - expected).norm() / expected.norm().clamp_min(1.0)  # sums may cancel
    assert error <= bound, f"{what}: {float(error):.1e}"


def many(way: str, dtype: torch.dtype = torch.float32) -> int:
    """Steps of norms whose images are cut in any way; how many sums went through kernels."""
    ranks = dist.get_world_size()
    draw = random.Random(way)
    space = parallel(nn.Identity(), (ranks,), ("h",)).space
    space.norms = kernels = kernels_of(space.link, way)
    launches = 0
    launch = NormSums._launch

    def counted(self: NormSums, *rest: object) -> None:
        nonlocal launches
        launches += 1
        launch(self, *rest)  # type: ignore[arg-type]

    NormSums._launch = counted  # type: ignore[assignment,method-assign]
    for number, layer in enumerate(norms(draw)):
        torch.manual_seed(number)
        plain: nn.Module = nn.BatchNorm2d(layer.num_features)  # type: ignore[arg-type]
        plain.__dict__ = copy.deepcopy(layer).double().__dict__
        p = parallel(layer, (ranks,), ("h",))
        assert p.space.norms is kernels
        form = draw.choice((torch.contiguous_format, torch.channels_last))
        for step in range(3):
            whole = torch.randn(2, layer.num_features, 7, 3).mul(2).add(30 * step).to(dtype)  # type: ignore[call-overload]
            full, own = whole.double().requires_grad_(), whole.contiguous(memory_format=form).requires_grad_()
            upstream = torch.randn_like(whole)
            plain.zero_grad()
            layer.zero_grad()
            expected = plain(full)
            expected.backward(upstream.double())
            found = p(p.scatter(own, {"h": cuts_of(draw, 7, ranks)})).gather()
            what = f"{way} {layer} step {step}"
            bound = BOUND if dtype is torch.float32 else 1e-2
            near(found, expected, what, bound)
            found.backward(upstream)
            near(own.grad, full.grad, f"dx of {what}", bound)
            for (name, a), (_, b) in zip(layer.named_parameters(), plain.named_parameters(), strict=True):
                near(a.grad, b.grad, f"d {name} of {what}", bound)
        for (name, a), (_, b) in zip(layer.named_buffers(), plain.named_buffers(), strict=True):
            near(a, b.double(), f"{name} of {layer}", bound)
    NormSums._launch = launch  # type: ignore[method-assign]
    space.norms = space.link.peer_sums = None
    return launches


def tried(way: str) -> list[str]:
    """What a trial finds: nothing, then numbers that are not right, then ranks whose numbers differ by little."""
    link = parallel(nn.Identity(), (dist.get_world_size(),), ("h",)).space.link
    device = torch.get_default_device()
    kernels = kernels_of(link, way, BLOCK)
    right = kernels.forward

    def damaged(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows, sums = right(*given)
        rows[2] *= 1.01
        return rows, sums

    def differing(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows, sums = right(*given)
        given[-1].running_mean[0] += 1e-4 * link.index
        return rows, sums

    found = []
    for kernels.forward in (right, damaged, differing):  # type: ignore[method-assign]
        found.append(faults(link, device, kernels, BLOCK, TYPES[device.type]))
    link.peer_sums = None
    return found


def silent() -> str:
    """Rank 1 takes no part; the others hear of it."""
    space = parallel(nn.Identity(), (dist.get_world_size(),), ("h",)).space
    link, kernels = space.link, kernels_of(space.link, "memory")
    assert link.peer_sums is not None
    x = torch.randn(1, 3, 4, 4)

    def step() -> None:
        Normalize.apply(Over(link, "the norm", 32, kernels=kernels), 1e-5, None, x, None, None)  # type: ignore[no-untyped-call]
        if x.is_cuda:
            torch.cuda.synchronize()
            link.heed("what follows the norm")

    step()
    kernels._programs._made.clear()
    link.peer_sums.rounds, link.peer_sums.look = (1000, LOOK) if x.is_cuda else (3, 256)  # the interpreter's are slow
    if link.index == 1:
        time.sleep(60)
        return ""
    with pytest.raises(PeerError) as caught:
        step()
    return str(caught.value)
