"""Decides whether kernels compute the sums of norms.

All ranks together check the kernels against torch's operators, and time both.
"""

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
from tilewise.comm.trials import Call, everywhere, make_on_symmetric_buffers, said, timed, why_not_symmetric
from tilewise.distributed.norms.normalization import Normalize, Over
from tilewise.distributed.norms.parts import LAST
from tilewise.distributed.norms.sums import NormSums, Tracking
from tilewise.problems.base import DTYPES

__all__ = ["NormChoice", "choose_norms"]

LIMITS = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
"""The largest relative L2 error against torch's operators: both compute in float32 and round elements to this type."""
GAIN = 0.95
"""Kernels are used where they take less than this fraction of torch's time."""
IN_A_ROW, ROUNDS = 4, 3
"""Norms that are timed together, and rounds of checks."""
WHAT = "a trial of norms"
Norm = tuple[list[int], str, bool]
"""A norm of a step: the shape of a rank's part, its type, and whether channels are last in memory."""
NAMES = ("torch", "kernels and NCCL", "kernels and memory")
"""The ways to compute norms: by torch, and by kernels whose sums go through NCCL or through shared memory."""


@dataclass(frozen=True)
class NormChoice:
    """The way ``chosen`` among ``NAMES``, and the reasons against others.

    ``times`` has (name, milliseconds) for all norms of a step, forward and backward, on the slowest rank of the link.
    """

    chosen: str
    reasons: tuple[str, ...] = ()
    times: tuple[tuple[str, float], ...] = ()


def choose_norms(link: Link, noted: Noted, device: torch.device, *, graphs: bool) -> tuple[NormSums | None, NormChoice]:
    """Choose what computes the norms ``noted`` in a step; ``None`` stands for torch's operators.

    Kernels are chosen where they are accurate and faster. Every rank of the link calls this. With ``graphs`` replays of
    CUDA graphs are timed, otherwise calls. Memory for norms that the ranks shared before is freed.
    """
    link.peer_sums = None
    norms_by_rank = link.gather([norm for norm in noted.norms if norm[1] in DTYPES])
    kinds = Counter(json.dumps(ranks) for ranks in zip(*norms_by_rank, strict=True))
    channels = max((shape[1] for norms in norms_by_rank for shape, _, _ in norms), default=0)
    if not channels:
        return None, NormChoice(NAMES[0], ("no norm is over ranks",))
    if device.type != "cuda":
        return None, NormChoice(NAMES[0], (f"on {device.type}",))
    channels = -(-channels // BLOCK) * BLOCK
    offered = {NAMES[1]: NormSums(link)}
    if not (reason := why_not_symmetric(link, device)):
        link.peer_sums, reason = make_on_symmetric_buffers(
            link, device, PeerSums.nbytes(link.size, channels),
            lambda buffers, kept: PeerSums(buffers, link.index, channels, link.timeout, kept),
        )  # fmt: skip
    reasons = [f"{NAMES[2]}: {reason}"] if reason else []
    if link.peer_sums is not None:
        offered[NAMES[2]] = NormSums(link, link.peer_sums)
    accurate: dict[str, NormSums | None] = {NAMES[0]: None}
    types = sorted({dtype for norms in norms_by_rank for _, dtype, _ in norms})
    parts = [_part(json.loads(kind)[link.index], torch.device("meta")) for kind in kinds]
    for name, kernels in offered.items():
        _, failure = everywhere(link, functools.partial(kernels.compile, device, parts))
        if fault := failure or said(link, faults(link, device, kernels, channels, types)):
            reasons.append(f"{name}: {fault}")
        else:
            accurate[name] = kernels
    ms_by_name = dict.fromkeys(accurate, 0.0)
    for kind, count in kinds.items():
        calls = [_call(link, device, json.loads(kind), kernels) for kernels in accurate.values()]
        for name, ms in zip(accurate, timed(link, device, calls, IN_A_ROW, graphs), strict=True):
            ms_by_name[name] += count * ms
    best = min(ms_by_name, key=lambda name: ms_by_name[name] * (GAIN if name == NAMES[0] else 1.0))
    if best != NAMES[2]:
        link.peer_sums = None
    return accurate[best], NormChoice(best, tuple(reasons), tuple(ms_by_name.items()))


def faults(link: Link, device: torch.device, kernels: NormSums, channels: int, types: Sequence[str]) -> str:
    """The first fault in what ``kernels`` compute, in words; empty where there is none.

    ``channels`` is the largest number of channels to check, and ``types`` are the types. All ranks make the same calls,
    whatever faults they find.
    """
    generator = torch.Generator(device).manual_seed(link.index)
    all_faults: list[str] = []
    for turn, dtype in itertools.product(range(ROUNDS), types):
        rows_by_rank = [2 + (index + turn) % 3 for index in range(link.size)]
        for width, last in ((channels, False), (channels, True), (1 + channels // 3, False)):
            shape = (2, width, rows_by_rank[link.index], 5)
            form = torch.channels_last if last else torch.contiguous_format
            x, dy = (
                torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
                .add(4 * n).to(DTYPES[dtype])                .contiguous(memory_format=form) for n in (1, 0)
            )  # fmt: skip
            # SyncBatchNorm sums the count of elements over the ranks; BatchNorm knows it.
            for count in (None, 10 * sum(rows_by_rank)):
                overs = (Over(link, WHAT, count, kernels=tried) for tried in (None, kernels))
                wanted, got = (_computed(over, x, dy) for over in overs)
                statistics = link.gather([float(running.double().sum()) for running in got[-2:]])
                if any(of_rank != statistics[0] for of_rank in statistics):
                    all_faults.append("ranks have different statistics")
                errors = [float((a - b).double().norm() / b.double().norm()) for a, b in zip(got, wanted, strict=True)]
                most = LIMITS[dtype]
                all_faults += [f"relative L2 error {e:.1e} above {most:.1e}" for e in errors if not e <= most]
    return all_faults[0] if all_faults else ""


def _computed(over: Over, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """A norm's elements, the gradients of elements, weight and bias, and the running statistics."""
    w = torch.linspace(0.5, 1.5, x.shape[1], dtype=torch.float32, device=x.device).requires_grad_()
    b, x = w.detach().flip(0).requires_grad_(), x.detach().requires_grad_()
    running = [torch.zeros_like(b.detach()), torch.ones_like(b.detach())]
    y = Normalize.apply(over, 1e-5, Tracking(running[0], running[1], 0.3), x, w, b)  # type: ignore[no-untyped-call]
    return [y.detach(), *torch.autograd.grad(y, [x, w, b], dy), *running]


def _part(norm: Norm, device: torch.device) -> torch.Tensor:
    """A part of ones for ``norm``."""
    shape, dtype, last = norm
    form = LAST.get(len(shape), torch.contiguous_format) if last else torch.contiguous_format
    return torch.ones(shape, dtype=DTYPES[dtype], device=device).contiguous(memory_format=form)


def _call(link: Link, device: torch.device, kind: list[Norm], kernels: NormSums | None) -> Call:
    """A call that computes the norm ``kind``, which has every rank's part, forward and backward ``IN_A_ROW`` times."""
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
