"""Statistics of norms over ranks, by kernels that need one launch between a part's sums and its elements."""

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
from tilewise.distributed.norms.parts import NormParts, Programs
from tilewise.kernels.building.ahead import side_by_side
from tilewise.problems.base import DTYPE_NAMES

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Program

__all__ = ["NormSums", "Tracking"]


@dataclass(frozen=True, slots=True)
class Tracking:
    """Running statistics of a norm, ``None`` where they are not tracked, which each step moves by ``momentum``."""

    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    momentum: float

    def __call__(self, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor | int) -> None:
        """Move the running statistics towards ``mean`` and ``var`` of ``count`` elements, unbiased as torch's are."""
        if self.running_mean is not None:
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        if self.running_var is not None:
            self.running_var.lerp_((var * (count / (count - 1))).to(self.running_var.dtype), self.momentum)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Both running statistics, where kernels can move them; an empty list otherwise."""
        tracked = [tensor for tensor in (self.running_mean, self.running_var) if tensor is not None]
        by_kernels = all(tensor.dtype is torch.float32 and tensor.stride() == (1,) for tensor in tracked)
        return tracked if len(tracked) == 2 and by_kernels else []


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes and numbers that a launch is made for.

    ``elements`` is the number of elements of a channel on this rank, and ``count`` that of all ranks, if known.
    """

    channels: int
    splits: int
    elements: int
    count: int | None
    eps: float = 0.0
    momentum: float = 0.0
    tracked: bool = False


@dataclass(frozen=True, slots=True)
class _Stage:
    """What a launch computes: ``first`` up to this rank's sums, ``last`` from the sums of all ranks on, or both."""

    first: bool
    last: bool


class NormSums:
    """Sums the statistics of norms by channel over the ranks of ``link``.

    Without ``peers`` NCCL sums between two kernels. With ``peers``, memory that the ranks share, one kernel each for
    forward and backward does all. Every rank of the link must have the same.
    """

    def __init__(self, link: Link, peers: PeerSums | None = None) -> None:
        self._link, self._peers, self.parts = link, peers, NormParts()
        self._programs = Programs()

    def takes(self, link: Link, x: torch.Tensor) -> bool:
        """Whether this computes norms of parts such as ``x`` with sums over ``link``; the same on all ranks."""
        return link is self._link and x.dtype in DTYPE_NAMES

    def forward(
        self, what: str, x: torch.Tensor, count: int | None, eps: float, tracking: Tracking | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the statistics of the whole image of which ``x`` is a part, and move the running statistics.

        Returns (3, channels) in float32: mean, variance, and the reciprocal of the square root of variance plus
        ``eps``; and the sums over the ranks in float64. ``count`` is the number of elements of a channel in the whole
        image, or ``None`` where it is summed as well; row 2 of the sums then has it. ``what`` names the sum in errors.
        """
        channels = x.shape[1]
        parts, splits = self.parts.statistics(x)
        sums = torch.empty((TERMS, channels), dtype=torch.float64, device=x.device)
        rows = torch.empty((3, channels), dtype=torch.float32, device=x.device)
        running = [] if tracking is None else tracking.tensors
        momentum = 0.0 if tracking is None else tracking.momentum
        elements = x.numel() // max(channels, 1)
        sizes = _Sizes(channels, splits, elements, count, float(eps), float(momentum), bool(running))
        tensors = [parts, sums, rows, *(running or (rows, rows))]
        self._run("forward", what, sizes, tensors, sums[: 2 if count is not None else 3])
        if tracking is not None and not running:
            tracking(rows[0].double(), rows[1].double(), sums[2] if count is None else count)
        return rows, sums

    def backward(
        self, what: str, x: torch.Tensor, dy: torch.Tensor, rows: torch.Tensor, totals: torch.Tensor,
        count: int | None, all_ranks: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """This part's shares of the gradients of bias and weight, (2, channels), and means over the whole image.

        The means (2, channels) are those of ``dy`` and of ``dy`` times the elements less their mean, which the
        gradients of elements need. They are computed only with ``all_ranks``. ``rows`` and ``totals`` are the results
        of :meth:`forward`.
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
        """Compile all kernels for the GPU ``device`` and for parts like ``parts``. Raises what Triton raises."""
        single = torch.empty(1, dtype=torch.float32, device=device)
        double = torch.empty(1, dtype=torch.float64, device=device)
        forward = [double, double, single, single, single]
        backward = [double, single, double, double, single, single]
        stages = [_Stage(True, False), _Stage(False, True)]
        if self._peers is not None:
            stages.append(_Stage(True, True))
        jobs = [job for part in parts for job in self.parts.jobs(part, device)]
        for stage, counted, tracked in itertools.product(stages, (False, True), (False, True)):
            sizes = _Sizes(1, 1, 1, None if counted else 2, tracked=tracked)
            jobs.append(functools.partial(self._program, "forward", sizes, stage, forward))
            if not tracked:
                jobs.append(functools.partial(self._program, "backward", sizes, stage, backward))
        if device.type == "cuda":
            side_by_side(jobs, device)
        for job in jobs:
            job()

    def _run(self, kernel: str, what: str, sizes: _Sizes, tensors: list[torch.Tensor], sums: torch.Tensor) -> None:
        """Launch a kernel, and sum ``sums`` over the ranks in the midst of its work."""
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
        """Launch one stage of a kernel."""
        program = self._programs.of((kernel, sizes, stage), lambda: self._program(kernel, sizes, stage, tensors))
        program(self._arguments(stage, tensors))

    def _arguments(self, stage: _Stage, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of a launch: ``tensors`` and those of ``peers``, or stand-ins where the stage reads none."""
        peers = self._peers
        if peers is None or not (stage.first and stage.last):
            return [*tensors, *(tensors[0],) * 3]
        return [*tensors, peers.table, peers.counts, peers.page]

    def _program(self, kernel: str, sizes: _Sizes, stage: _Stage, tensors: list[torch.Tensor]) -> Program:
        """The compiled launch of one stage of a kernel."""
        from tilewise.kernels.triton import norm_sums
        from tilewise.kernels.triton.launch import Launch, Pointer, Program

        types = [tensor.dtype for tensor in tensors] + [torch.int64, torch.int32, torch.int32]
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
