"""Whether kernels compute the sums of norms: checked against torch's operators and timed against them, by all ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewise.comm.link import Link
from tilewise.comm.peer_sums import BLOCK, PeerSums
from tilewise.comm.symmetric import connected, machine, symmetric_buffer, why_not
from tilewise.distributed.norm_sums import NormSums, Tracking
from tilewise.distributed.normalization import Normalize, Over
from tilewise.distributed.trials import Call, everywhere, said, timed

__all__ = ["NormChoice", "choose_norms"]

LIMIT = 1e-5
"""Relative L2 error against torch's operators: both compute in float32."""
GAIN = 0.95
"""Part of torch's time below which kernels are taken."""
IN_A_ROW, ROUNDS = 4, 3
WHAT = "a trial of norms"
NAMES = ("torch", "kernels and NCCL", "kernels and memory")


@dataclass(frozen=True)
class NormChoice:
    """``chosen`` of ``NAMES`` computes norms over ranks, and why not others.

    ``times`` has (name, milliseconds) of a norm of few elements forward and backward, the slowest rank of the link.
    """

    chosen: str
    reasons: tuple[str, ...] = ()
    times: tuple[tuple[str, float], ...] = ()


def choose_norms(link: Link, device: torch.device, *, graphs: bool) -> tuple[NormSums | None, NormChoice]:
    """What computes norms of as many channels as ``link`` noted, where that is right and faster than torch's operators.

    Every rank of the link calls it. With ``graphs`` replays of CUDA graphs are timed, else calls. Memory that ranks
    shared before is given up.
    """
    link.peer_sums, channels = None, max(link.gather(link.norm_channels))
    if not channels:
        return None, NormChoice(NAMES[0], ("no norm is over ranks",))
    if device.type != "cuda":
        return None, NormChoice(NAMES[0], (f"on {device.type}",))
    channels = -(-channels // BLOCK) * BLOCK
    shared, reason = _shared(link, device, channels)
    offered = {NAMES[1]: NormSums(link)}
    reasons = [f"{NAMES[2]}: {reason}"] if reason else []
    if shared is not None:
        offered[NAMES[2]] = NormSums(link, shared)
        link.peer_sums = shared
    right: dict[str, NormSums | None] = {NAMES[0]: None}
    for name, kernels in offered.items():
        _, failure = everywhere(link, functools.partial(kernels.compile, device))
        if found := failure or said(link, faults(link, device, kernels, channels)):
            reasons.append(f"{name}: {found}")
        else:
            right[name] = kernels
    times = timed(link, device, [_call(link, device, channels, one) for one in right.values()], IN_A_ROW, graphs)
    by_name = dict(zip(right, times, strict=True))
    best = min(by_name, key=lambda name: by_name[name] * (GAIN if name == NAMES[0] else 1.0))
    if best != NAMES[2]:
        link.peer_sums = None
    return right[best], NormChoice(best, tuple(reasons), tuple(by_name.items()))


def _shared(link: Link, device: torch.device, channels: int) -> tuple[PeerSums | None, str]:
    """Memory for sums that all ranks see, or why there is none."""
    told = link.gather({"not": why_not(device), "machine": machine()})
    if reasons := [one["not"] for one in told if one["not"]]:
        return None, reasons[0]
    if len({one["machine"] for one in told}) > 1:
        return None, "ranks are on several machines"
    own, failure = everywhere(link, lambda: symmetric_buffer(PeerSums.nbytes(link.size, channels), device))
    if failure or own is None:
        return None, failure

    def connect() -> PeerSums:
        buffers, kept = connected(link, own)
        return PeerSums(buffers, link.index, channels, link.timeout, kept)

    return everywhere(link, connect)


def faults(link: Link, device: torch.device, kernels: NormSums, channels: int) -> str:
    """What is wrong with what ``kernels`` compute; empty for nothing. All ranks make the same calls, whatever comes."""
    generator = torch.Generator(device).manual_seed(link.index)
    found: list[str] = []
    for turn in range(ROUNDS):
        every = [2 + (index + turn) % 3 for index in range(link.size)]
        for width in (channels, 1 + channels // 3):
            shape = (2, width, every[link.index], 5)
            x, dy = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
            # Counted or known, as SyncBatchNorm and BatchNorm have it.
            for count in (None, 10 * sum(every)):
                overs = (Over(link, WHAT, count, kernels=one) for one in (None, kernels))
                wanted, got = (_computed(over, 3 * x + 40, dy) for over in overs)
                statistics = link.gather([float(t.double().sum()) for t in got[-2:]])
                if any(one != statistics[0] for one in statistics):
                    found.append("ranks have different statistics")
                errors = [float((a - b).double().norm() / b.double().norm()) for a, b in zip(got, wanted, strict=True)]
                found += [f"relative L2 error {e:.1e} above {LIMIT:.1e}" for e in errors if not e <= LIMIT]
    return found[0] if found else ""


def _computed(over: Over, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Elements, the gradients of elements, weight and bias, and running statistics."""
    w = torch.linspace(0.5, 1.5, x.shape[1], device=x.device).requires_grad_()
    b, x = w.detach().flip(0).requires_grad_(), x.detach().requires_grad_()
    running = [torch.zeros_like(b.detach()), torch.ones_like(b.detach())]
    y = Normalize.apply(over, 1e-5, Tracking(running[0], running[1], 0.3), x, w, b)  # type: ignore[no-untyped-call]
    return [y.detach(), *torch.autograd.grad(y, [x, w, b], dy), *running]


def _call(link: Link, device: torch.device, channels: int, kernels: NormSums | None) -> Call:
    x, dy = torch.ones(1, channels, 2, 4, device=device), torch.ones(1, channels, 2, 4, device=device)
    over = Over(link, WHAT, 8 * link.size, kernels=kernels)

    def several() -> Sequence[torch.Tensor]:
        found: Sequence[torch.Tensor] = ()
        for _ in range(IN_A_ROW):
            found = _computed(over, x, dy)
        return found

    return several
