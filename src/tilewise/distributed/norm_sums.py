"""Norms with statistics over ranks by kernels that do all between a part's sums and the elements in one launch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tilewise.comm.link import Link
from tilewise.comm.peer_sums import BLOCK, TERMS, PeerSums
from tilewise.comm.waiting import LOOK
from tilewise.distributed.norm_parts import NormParts, Programs
from tilewise.kernels.triton.ahead import side_by_side
from tilewise.problem import DTYPE_NAMES

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Program

__all__ = ["NormSums", "Tracking"]


@dataclass(frozen=True, slots=True)
class Tracking:
    """Running statistics, where they are tracked, that move towards those seen, variances as estimated from them."""

    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    momentum: float

    def __call__(self, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor | int) -> None:
        """Move them."""
        if self.running_mean is not None:
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        if self.running_var is not None:
            self.running_var.lerp_((var * (count / (count - 1))).to(self.running_var.dtype), self.momentum)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Both, where kernels can move them; none otherwise."""
        both = [t for t in (self.running_mean, self.running_var) if t is not None]
        return both if len(both) == 2 and all(t.dtype is torch.float32 and t.stride() == (1,) for t in both) else []


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What a launch is made for."""

    channels: int
    splits: int
    elements: int
    count: int | None
    eps: float = 0.0
    momentum: float = 0.0
    tracked: bool = False


@dataclass(frozen=True, slots=True)
class _Stage:
    """Up to this part's sums, from those of all on, or both."""

    first: bool
    last: bool


class NormSums:
    """Sums of norms by channel over the ranks of ``link``: by NCCL between two kernels, or by ``peers``.

    With ``peers`` there is one kernel each way, forward and backward. Every rank of the link has the same.
    """

    def __init__(self, link: Link, peers: PeerSums | None = None) -> None:
        self._link, self._peers, self.parts = link, peers, NormParts()
        self._programs = Programs()

    def takes(self, link: Link, x: torch.Tensor) -> bool:
        """Whether parts such as ``x`` are computed so, with sums over ``link``; the same on all ranks."""
        return link is self._link and x.dtype in DTYPE_NAMES

    def forward(
        self, what: str, x: torch.Tensor, count: int | None, eps: float, tracking: Tracking | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the whole image of which ``x`` is a part: (3, channels) mean, variance, one over its root with ``eps``.

        ``count`` is how many elements a channel has, ``None`` where that is summed up as well; then it is in row 2 of
        the second tensor. Running statistics are moved.
        """
        channels = x.shape[1]
        parts, splits = self.parts.statistics(x)
        sums = torch.empty((TERMS, channels), dtype=torch.float64, device=x.device)
        rows = torch.empty((3, channels), dtype=torch.float32, device=x.device)
        running = [] if tracking is None else tracking.tensors
        momentum = 0.0 if tracking is None else tracking.momentum
        of = x.numel() // max(channels, 1)
        sizes = _Sizes(channels, splits, of, count, float(eps), float(momentum), bool(running))
        tensors = [parts, sums, rows, *(running or (rows, rows))]
        self._run("forward", what, sizes, tensors, sums[: 2 if count is not None else 3])
        if tracking is not None and not running:
            tracking(rows[0].double(), rows[1].double(), sums[2] if count is None else count)
        return rows, sums

    def backward(
        self, what: str, x: torch.Tensor, dy: torch.Tensor, rows: torch.Tensor, totals: torch.Tensor,
        count: int | None, all_ranks: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(2, channels) this part's shares of the gradients of bias and weight, and what elements' gradients need.

        That is the means over the whole image of ``dy``, and of ``dy`` times the centred elements; only with
        ``all_ranks``.
        """
        channels = x.shape[1]
        parts, splits = self.parts.gradient_sums(dy, x, rows)
        shares, means = (torch.empty((2, channels), dtype=torch.float32, device=x.device) for _ in range(2))
        sums = torch.empty((2, channels), dtype=torch.float64, device=x.device)
        sizes = _Sizes(channels, splits, 0, count)
        tensors = [parts, rows, sums, totals, shares, means]
        if all_ranks:
            self._run("backward", what, sizes, tensors, sums)
        else:
            self._launch("backward", sizes, _Stage(True, False), tensors)
        return shares, means

    def compile(self, device: torch.device, parts: Sequence[torch.Tensor]) -> None:
        """Compile all kernels for the GPU ``device`` and ``parts`` like these. Raises what Triton raises."""
        one = torch.empty(1, dtype=torch.float32, device=device)
        wide = torch.empty(1, dtype=torch.float64, device=device)
        forward, backward = [wide, wide, one, one, one], [wide, one, wide, wide, one, one]
        stages = [_Stage(True, False), _Stage(False, True)]
        if self._peers is not None:
            stages.append(_Stage(True, True))
        jobs = [job for part in parts for job in self.parts.jobs(part, device)]
        for stage, counted, tracked in itertools.product(stages, (False, True), (False, True)):
            sizes = _Sizes(1, 1, 1, None if counted else 2, tracked=tracked)
            jobs.append(functools.partial(self._made, "forward", sizes, stage, forward))
            if not tracked:
                jobs.append(functools.partial(self._made, "backward", sizes, stage, backward))
        if device.type == "cuda":
            side_by_side(jobs, device)
        for job in jobs:
            job()

    def _run(self, kernel: str, what: str, sizes: _Sizes, tensors: list[torch.Tensor], sums: torch.Tensor) -> None:
        peers, link = self._peers, self._link
        if peers is not None and sizes.channels <= peers.channels:
            link.begin(what)
            peers.in_order()
            self._launch(kernel, sizes, _Stage(True, True), tensors)
            link.heed(what)
            return
        self._launch(kernel, sizes, _Stage(True, False), tensors)
        link.sum(what, sums)
        self._launch(kernel, sizes, _Stage(False, True), tensors)

    def _launch(self, kernel: str, sizes: _Sizes, stage: _Stage, tensors: list[torch.Tensor]) -> None:
        made = self._programs.of((kernel, sizes, stage), lambda: self._made(kernel, sizes, stage, tensors))
        made(self._all(stage, tensors))

    def _all(self, stage: _Stage, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        peers = self._peers
        if peers is None or not (stage.first and stage.last):
            return [*tensors, *(tensors[0],) * 3]
        return [*tensors, peers.table, peers.counts, peers.page]

    def _made(self, kernel: str, sizes: _Sizes, stage: _Stage, tensors: list[torch.Tensor]) -> Program:
        from tilewise.kernels.triton import norm_sums
        from tilewise.kernels.triton.launch import Launch, Pointer, Program

        types = [t.dtype for t in tensors] + [torch.int64, torch.int32, torch.int32]
        pointers = tuple(Pointer(n, 0, dtype) for n, dtype in enumerate(types))
        peers = self._peers if stage.first and stage.last else None
        channels = BLOCK if peers is None else peers.channels
        look, *ranks = (LOOK, 1, 0, 0) if peers is None else (peers.look, peers.rounds, peers.index, peers.ranks)
        scalars: tuple[int | float, ...] = (sizes.count or 0, sizes.channels, *ranks)
        counted = sizes.count is None and (stage.last or kernel == "forward")
        constants = {
            "FIRST": stage.first, "LAST": stage.last, "COUNTED": counted, "CHANNELS": channels,
            "BLOCKS": channels // BLOCK, "BLOCK": BLOCK, "LOOK": look,
        }  # fmt: skip
        if kernel == "forward":
            constants["TRACKED"] = sizes.tracked and stage.last
            scalars = (sizes.elements, *scalars, sizes.eps, sizes.momentum)
        grid = (-(-sizes.channels // BLOCK), 1, 1)
        launch = Launch(getattr(norm_sums, kernel), grid, pointers, (sizes.splits, *scalars), constants)
        return Program([launch], [1] * len(types), tensors[0].device)
