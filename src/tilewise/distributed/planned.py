"""A rank's own convolutions by plans: found together by all ranks, for the problems that each meets in one step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tilewise.comm.agreement import gather
from tilewise.device import conv_precision, device_name
from tilewise.distributed.halo_choice import Call, Chosen, choose
from tilewise.distributed.norm_choice import NormChoice
from tilewise.distributed.passes import Axes, Settled, TorchPasses, settle
from tilewise.distributed.peer_choice import PeerChoice
from tilewise.distributed.share import Share
from tilewise.distributed.terms import Terms
from tilewise.nn.book import Book
from tilewise.nn.call import Operand
from tilewise.nn.progress import showing
from tilewise.nn.runner import BoundPass
from tilewise.nn.share import plan_together
from tilewise.nn.strides import suggested_layout
from tilewise.planner.planner import MEASURING
from tilewise.problem import DTYPE_NAMES, ConvProblem, Pass, layout_of

__all__ = ["PlannedPasses"]

Key = tuple[Any, ...]
MOST_KEPT = 4096
"""Kinds of calls that are looked up by their tensors; more, as where shapes change every step, are described anew."""


class PlannedPasses(TorchPasses):
    """Passes by the plans of ``book``; what it has no plan for, and what torch does best, is torch's.

    A problem is one rank's own: a rank at the image's border pads on one side, one inside it does not. What differs by
    side is padded first, as torch does it, and the problem is that of the padded image: torch's own choice is there to
    be measured against. Nothing is planned while a step runs, since other ranks would wait for it: :meth:`record` notes
    what a step asks for, and :meth:`plan` plans it.
    """

    def __init__(self, book: Book) -> None:
        self.book = book
        self._bound: dict[Key, BoundPass | None] = {}
        self._seen: dict[ConvProblem, torch.device] | None = None
        self._calls: dict[Key, Call] = {}
        self.halos: dict[Key, tuple[Call, Chosen]] = {}
        """What became of the terms of each layer's boxes."""
        self.exchanges: PeerChoice | None = None
        """How halos travel, once that was measured."""
        self.norms: NormChoice | None = None
        """What computes norms over ranks, once that was measured."""
        self._deterministic = False

    def record(self, step: Callable[[], object]) -> None:
        """Run ``step`` by torch and note its problems."""
        self._seen = {}
        try:
            step()
        except BaseException:
            self._seen = None
            raise

    def plan(self, deterministic: bool) -> None:
        """Plan what was recorded, each rank a share of all ranks' problems.

        Every rank calls it. Raises :class:`~tilewise.comm.agreement.RankMismatch` where ranks end with other plans, and
        as :meth:`~tilewise.nn.book.Book.plan`.
        """
        seen = {} if self._seen is None else self._seen
        self._seen = None

        def everyones() -> list[ConvProblem]:
            keys = [key for each in gather([p.key for p in seen]) for key in each]
            return [ConvProblem.from_key(key) for key in dict.fromkeys(keys)]

        plan_together(self.book, everyones, lambda problems: problems, deterministic)
        for problem, device in seen.items():
            self.book.ready([problem], deterministic, device)
        self._bound.clear()
        self._deterministic = deterministic
        if self.book.options.rigor in MEASURING:
            progress = self.book.planner.progress
            with showing(progress):
                for done, (key, call) in enumerate(self._calls.items()):
                    if progress is not None:
                        progress(done, len(self._calls), "halos")
                    self.halos[key] = call, choose(call, self, self.book.options)
        self._calls.clear()

    def terms(self, share: Share, groups: int, x: torch.Tensor, w: torch.Tensor) -> Terms:
        """By fused kernels where those were found to be right and faster, else each by these passes."""
        if not x.is_cuda or not any(share.boxes):
            return super().terms(share, groups, x, w)
        # A share is kept with what was chosen for it, so that no other has its address.
        own = x.shape[:2], x.is_contiguous(), w.shape, w.stride(), x.dtype, x.device
        key = (id(share), groups, *own, conv_precision())
        if self._seen is not None:
            self._calls.setdefault(key, Call.of(share, groups, x, w))
        found = self.halos.get(key)
        if found is None or found[1].terms is None:
            return super().terms(share, groups, x, w)
        return found[1].terms

    def fprop(
        self, x: torch.Tensor, w: torch.Tensor, axes: Axes, groups: int, b: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``y`` of ``x`` and ``w``, and ``b`` of the channels."""
        s = settle(axes)
        x = _padded(x, s)
        bound = self._found(Pass.FPROP, x, w, s.even, groups, b is not None)
        return super().fprop(x, w, s.even, groups, b) if bound is None else bound(x, w, b)

    def dgrad(self, y: torch.Tensor, w: torch.Tensor, axes: Axes, groups: int) -> torch.Tensor:
        """``x`` of ``y`` and ``w``."""
        s = settle(axes)
        bound = self._found(Pass.DGRAD, y, w, s.even, groups)
        dx = super().dgrad(y, w, s.even, groups) if bound is None else bound(y, w)
        return dx if s.pads is None else F.pad(dx, [-n for n in s.pads])

    def wgrad(self, x: torch.Tensor, y: torch.Tensor, axes: Axes, groups: int) -> torch.Tensor:
        """``w`` of ``x`` and ``y``."""
        s = settle(axes)
        x = _padded(x, s)
        bound = self._found(Pass.WGRAD, x, y, s.even, groups)
        return super().wgrad(x, y, s.even, groups) if bound is None else bound(x, y)

    def _found(
        self, pass_: Pass, a: torch.Tensor, b: torch.Tensor, axes: Axes, groups: int, bias: bool = False
    ) -> BoundPass | None:
        precision = conv_precision() if a.is_cuda and a.dtype is torch.float32 else "ieee"
        key = (pass_, a.shape, a.stride(), b.shape, b.stride(), a.dtype, a.device, axes, groups, precision, bias)
        if self._seen is None and key in self._bound:
            return self._bound[key]
        problem = _problem(pass_, a, b, axes, groups, precision, bias)
        if self._seen is not None:
            if problem is not None:
                self._seen[problem] = a.device
            return None
        found = None if problem is None else self.book.bound(problem, self._deterministic, a.device)
        if len(self._bound) < MOST_KEPT:
            self._bound[key] = found
        return found


def _padded(x: torch.Tensor, settled: Settled) -> torch.Tensor:
    """``x`` with what sides are padded by that the other is not, as torch does it: plans are measured against that."""
    return x if settled.pads is None else F.pad(x, settled.pads)


def _problem(
    pass_: Pass, a: torch.Tensor, b: torch.Tensor, axes: Axes, groups: int, precision: str, bias: bool
) -> ConvProblem | None:
    """What two operands ask for, in the layouts in which they come or would be copied to; ``None``: torch's affair.

    ``axes`` are padded by as much on both sides.
    """
    if a.dtype not in DTYPE_NAMES or a.dtype is not b.dtype or not a.numel() or not b.numel():
        return None
    channels_last = any(suggested_layout(t.shape, t.stride()) == "channels_last" for t in (a, b))
    layout = "channels_last" if channels_last else "contiguous"
    first, second = (Operand.of(t).settled(layout) for t in (a, b))
    if pass_ is Pass.FPROP:
        channels = b.shape[1] * groups, b.shape[0]
    elif pass_ is Pass.DGRAD:
        channels = b.shape[1] * groups, a.shape[1]
    else:
        channels = a.shape[1], b.shape[1]
    result = layout, 16
    own = [(layout_of(o.shape, o.strides), o.alignment) for o in (first, second)]
    places = {Pass.FPROP: (own[0], own[1], result), Pass.DGRAD: (result, own[1], own[0])}
    x, w, y = places.get(pass_, (own[0], result, own[1]))
    return ConvProblem(
        pass_,
        batch=a.shape[0],
        in_channels=channels[0],
        out_channels=channels[1],
        axes=axes,
        groups=groups,
        dtype=DTYPE_NAMES[a.dtype],
        precision=precision,
        bias=bias,
        layouts=(x[0], w[0], y[0]),
        alignment=tuple(math.gcd(one[1], 16) for one in (x, w, y)),  # type: ignore[arg-type]
        device=device_name(a.device),
    )
