"""Whether kernels compute the sums of norms: checked against torch's operators and timed against them, by all ranks."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewise.comm.link import Link, Noted
from tilewise.comm.peer_sums import BLOCK, PeerSums
from tilewise.distributed.norm_parts import LAST
from tilewise.distributed.norm_sums import NormSums, Tracking
from tilewise.distributed.normalization import Normalize, Over
from tilewise.distributed.trials import Call, everywhere, said, shared, timed, why_not_shared
from tilewise.problem import DTYPES

__all__ = ["NormChoice", "choose_norms"]

LIMITS = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
"""Relative L2 error against torch's operators: both compute in float32, and round elements to the parts' type."""
GAIN = 0.95
"""Part of torch's time below which kernels are taken."""
IN_A_ROW, ROUNDS = 4, 3
WHAT = "a trial of norms"
Norm = tuple[list[int], str, bool]
NAMES = ("torch", "kernels and NCCL", "kernels and memory")


@dataclass(frozen=True)
class NormChoice:
    """``chosen`` of ``NAMES`` computes norms over ranks, and why not others.

    ``times`` has (name, milliseconds) of all norms of a step, forward and backward, the slowest rank of the link.
    """

    chosen: str
    reasons: tuple[str, ...] = ()
    times: tuple[tuple[str, float], ...] = ()


def choose_norms(link: Link, noted: Noted, device: torch.device, *, graphs: bool) -> tuple[NormSums | None, NormChoice]:
    """What computes the norms ``noted``, where that is right and faster than torch's operators.

    Every rank of the link calls it. With ``graphs`` replays of CUDA graphs are timed, else calls. Memory that ranks
    shared before is given up.
    """
    link.peer_sums = None
    every = link.gather([norm for norm in noted.norms if norm[1] in DTYPES])
    kinds = Counter(json.dumps(ranks) for ranks in zip(*every, strict=True))
    channels = max((shape[1] for norms in every for shape, _, _ in norms), default=0)
    if not channels:
        return None, NormChoice(NAMES[0], ("no norm is over ranks",))
    if device.type != "cuda":
        return None, NormChoice(NAMES[0], (f"on {device.type}",))
    channels = -(-channels // BLOCK) * BLOCK
    offered = {NAMES[1]: NormSums(link)}
    if not (reason := why_not_shared(link, device)):
        link.peer_sums, reason = shared(
            link, device, PeerSums.nbytes(link.size, channels),
            lambda buffers, kept: PeerSums(buffers, link.index, channels, link.timeout, kept),
        )  # fmt: skip
    reasons = [f"{NAMES[2]}: {reason}"] if reason else []
    if link.peer_sums is not None:
        offered[NAMES[2]] = NormSums(link, link.peer_sums)
    right: dict[str, NormSums | None] = {NAMES[0]: None}
    types = sorted({dtype for norms in every for _, dtype, _ in norms})
    parts = [_part(json.loads(kind)[link.index], torch.device("meta")) for kind in kinds]
    for name, kernels in offered.items():
        _, failure = everywhere(link, functools.partial(kernels.compile, device, parts))
        if found := failure or said(link, faults(link, device, kernels, channels, types)):
            reasons.append(f"{name}: {found}")
        else:
            right[name] = kernels
    by_name = dict.fromkeys(right, 0.0)
    for kind, count in kinds.items():
        calls = [_call(link, device, json.loads(kind), one) for one in right.values()]
        for name, ms in zip(right, timed(link, device, calls, IN_A_ROW, graphs), strict=True):
            by_name[name] += count * ms
    best = min(by_name, key=lambda name: by_name[name] * (GAIN if name == NAMES[0] else 1.0))
    if best != NAMES[2]:
        link.peer_sums = None
    return right[best], NormChoice(best, tuple(reasons), tuple(by_name.items()))


def faults(link: Link, device: torch.device, kernels: NormSums, channels: int, types: Sequence[str]) -> str:
    """What is wrong with what ``kernels`` compute; empty for nothing. All ranks make the same calls, whatever comes."""
    generator = torch.Generator(device).manual_seed(link.index)
    found: list[str] = []
    for turn, dtype in itertools.product(range(ROUNDS), types):
        every = [2 + (index + turn) % 3 for index in range(link.size)]
        for width, last in ((channels, False), (channels, True), (1 + channels // 3, False)):
            shape = (2, width, every[link.index], 5)
            form = torch.channels_last if last else torch.contiguous_format
            x, dy = (
                torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
                .add(4 * n).to(DTYPES[dtype])                .contiguous(memory_format=form) for n in (1, 0)
            )  # fmt: skip
            # Counted or known, as SyncBatchNorm and BatchNorm have it.
            for count in (None, 10 * sum(every)):
                overs = (Over(link, WHAT, count, kernels=one) for one in (None, kernels))
                wanted, got = (_computed(over, x, dy) for over in overs)
                statistics = link.gather([float(t.double().sum()) for t in got[-2:]])
                if any(one != statistics[0] for one in statistics):
                    found.append("ranks have different statistics")
                errors = [float((a - b).double().norm() / b.double().norm()) for a, b in zip(got, wanted, strict=True)]
                most = LIMITS[dtype]
                found += [f"relative L2 error {e:.1e} above {most:.1e}" for e in errors if not e <= most]
    return found[0] if found else ""


def _computed(over: Over, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Elements, the gradients of elements, weight and bias, and running statistics."""
    w = torch.linspace(0.5, 1.5, x.shape[1], dtype=torch.float32, device=x.device).requires_grad_()
    b, x = w.detach().flip(0).requires_grad_(), x.detach().requires_grad_()
    running = [torch.zeros_like(b.detach()), torch.ones_like(b.detach())]
    y = Normalize.apply(over, 1e-5, Tracking(running[0], running[1], 0.3), x, w, b)  # type: ignore[no-untyped-call]
    return [y.detach(), *torch.autograd.grad(y, [x, w, b], dy), *running]


def _part(norm: Norm, device: torch.device) -> torch.Tensor:
    """A rank's part, of ones."""
    shape, dtype, last = norm
    form = LAST.get(len(shape), torch.contiguous_format) if last else torch.contiguous_format
    return torch.ones(shape, dtype=DTYPES[dtype], device=device).contiguous(memory_format=form)


def _call(link: Link, device: torch.device, kind: list[Norm], kernels: NormSums | None) -> Call:
    """A norm forward and backward, of parts as all ranks have them."""
    x, dy = (_part(kind[link.index], device) for _ in range(2))
    w, b = (torch.ones(x.shape[1], dtype=torch.float32, device=device).requires_grad_() for _ in range(2))
    tracking = Tracking(torch.zeros_like(b.detach()), torch.zeros_like(b.detach()), 0.1)
    count = sum(math.prod(of) // of[1] for of, _, _ in kind)
    over, x = Over(link, WHAT, count, kernels=kernels), x.requires_grad_()

    def several() -> None:
        for _ in range(IN_A_ROW):
            y = Normalize.apply(over, 1e-5, tracking, x, w, b)  # type: ignore[no-untyped-call]
            torch.autograd.grad(y, [x, w, b], dy)

    return several
