"""Tensors that every rank holds whole, where they meet a rank's part of another: their gradients are sums over ranks.

A replicated tensor (a parameter, a pooled vector, the loss) is the same on every rank, and so is its gradient. Where it
meets a part, each rank finds its share of that gradient, and the shares are added up. Where it meets other replicated
tensors, as in a linear head behind ``gather``, each rank finds the whole gradient, and nothing is added. Which of the
two it is is a matter of the graph: the sum is a node on the way from a part to a replicated tensor.

Sums of parameters' gradients travel while the rest of backward runs: what a sum's node gives is not yet there, and is
waited for in one node that all parameters share and that autograd reaches last, since it was made first.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tilewise.comm.link import Link
from tilewise.comm.streams import Branch

__all__ = ["Parameters", "Sums", "sum_gradient", "sum_over_ranks"]

BUCKET = 1 << 20
"""Bytes of gradients that travel as one message: smaller ones wait for each other."""


class Sums(Protocol):
    """Ranks that add up tensors, such as a :class:`Link`."""

    def telling(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Have others hear of an error that leaves the block."""
        ...

    def sum(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, summed over the ranks in place."""
        ...


class _SumNow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Sums, what: str, tensor: torch.Tensor) -> torch.Tensor:
        ctx.ranks, ctx.what = ranks, what
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, sum_over_ranks(ctx.ranks, ctx.what, gradient)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Sums, what: str, term: torch.Tensor) -> torch.Tensor:
        ctx.ranks, ctx.what = ranks, what
        with ranks.telling(what):
            return ranks.sum(what, term.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, sum_gradient(ctx.ranks, ctx.what, gradient) if torch.is_grad_enabled() else gradient


class Bucket:
    """Gradients on their way: those that wait for company, and those that travel.

    On a GPU a gradient that is known to be :meth:`complete` travels as soon as it is, whatever the stream that made it
    has been given since.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._complete: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Gradients, and what will hold their sums, which may be themselves."""
        self._moments: list[torch.cuda.Event | None] = []
        self._bytes = self._come = 0
        self._beside: Branch | None = None
        self._copied: list[torch.Tensor] = []
        """What was copied beside the current stream, which must not take its memory before :meth:`finish`."""
        self._travelling: list[tuple[dist.Work, torch.Tensor, list[torch.Tensor]]] = []
        self.expected = 0
        """How many gradients will come, if all do."""

    def complete(self, gradient: torch.Tensor) -> None:
        """The current stream adds nothing more to ``gradient``, nor does anybody else read it."""
        if gradient.is_cuda:
            event = torch.cuda.current_stream(gradient.device).record_event()
            self._complete[id(gradient)] = gradient, event

    def add(self, gradient: torch.Tensor) -> torch.Tensor:
        """A tensor that will hold the sum of ``gradient`` after :meth:`finish`."""
        total, moment = self._complete.pop(id(gradient), (None, None))
        if total is None:
            total = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        elif not total.is_contiguous():
            # In one order on all ranks, whatever the layouts that their plans gave it.
            with self._after([moment], total.device):
                total = total.clone(memory_format=torch.contiguous_format)
            self._copied.append(gradient)
            gradient = total
        if self._waiting and self._waiting[0][1].dtype != total.dtype:
            self.flush()
        self._come += 1
        self._waiting.append((gradient, total))
        self._moments.append(moment)
        self._bytes += total.nbytes
        if self._bytes >= BUCKET or self._come == self.expected:
            self.flush()
        return total

    def flush(self) -> None:
        """Send off what waits."""
        waiting, moments = self._waiting, self._moments
        self._waiting, self._moments, self._bytes = [], [], 0
        if not waiting:
            return
        with self._after(moments, waiting[0][1].device):
            if len(waiting) == 1:
                gradient, flat = waiting[0]
                if flat is not gradient:
                    flat.copy_(gradient)
            else:
                flat = torch.cat([gradient.reshape(-1) for gradient, _ in waiting])
            work = self.link.start_sum("the sum of gradients", flat)
        self._travelling.append((work, flat, [total for _, total in waiting]))

    def _after(
        self, moments: list[torch.cuda.Event | None], device: torch.device
    ) -> contextlib.AbstractContextManager[object]:
        known = [moment for moment in moments if moment is not None]
        if len(known) < len(moments):
            return contextlib.nullcontext()
        self._beside = Branch(device, "sums")
        for moment in known:
            context = self._beside.after(moment)
        return context

    def finish(self) -> None:
        """Wait for all; on a GPU the current stream waits."""
        self.flush()
        travelling, self._travelling = self._travelling, []
        self._come = 0
        self._complete.clear()
        for work, flat, parts in travelling:
            self.link.finish_sum("the sum of gradients", work)
            if len(parts) > 1:
                sums = torch.split(flat, [part.numel() for part in parts])
                torch._foreach_copy_(parts, [own.view_as(part) for own, part in zip(sums, parts, strict=True)])
        if self._beside is not None:
            self._beside.join()
        self._copied.clear()


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bucket: Bucket, tensor: torch.Tensor) -> torch.Tensor:
        ctx.bucket = bucket
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        if torch.is_grad_enabled():  # what is to be differentiated again cannot be waited for later
            return None, sum_over_ranks(ctx.bucket.link, "the sum of gradients", gradient)
        return None, ctx.bucket.add(gradient)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bucket: Bucket, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.bucket.finish()
        return None, *gradients


class Parameters:
    """The parameters of one forward, each with one sum of its gradient however often it is used."""

    def __init__(self, link: Link, parameters: list[torch.Tensor]) -> None:
        self._link, self._bucket = link, Bucket(link)
        self._used: dict[int, torch.Tensor] = {}
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if torch.is_grad_enabled():
            wanted = [p for p in parameters if p.requires_grad]
            waiting = _Wait.apply(self._bucket, *wanted) if wanted else ()  # type: ignore[no-untyped-call]
            for p, waited in zip(wanted, waiting, strict=True):
                self._known[id(p)] = (p, waited)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` is one of those this began with."""
        known = self._known.get(id(parameter))
        return known is not None and known[0] is parameter

    def complete(self, gradient: torch.Tensor) -> None:
        """See :meth:`Bucket.complete`; for the gradient of a parameter alone, which is held until its sum begins."""
        self._bucket.complete(gradient)

    def use(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """What stands for ``parameter`` beside a part; ``None`` where it is none of those this began with."""
        if not self.holds(parameter):
            return None
        used = self._used.get(id(parameter))
        if used is None:
            used = self._used[id(parameter)] = _Sum.apply(self._bucket, self._known[id(parameter)][1])  # type: ignore[no-untyped-call]
            self._bucket.expected = len(self._used)
        return used


def sum_gradient(ranks: Sums, what: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, whose gradient will be the sum over the ranks, waited for on the spot."""
    summed: torch.Tensor = _SumNow.apply(ranks, f"the backward of {what}", tensor)  # type: ignore[no-untyped-call]
    return summed


def sum_over_ranks(ranks: Sums, what: str, term: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' terms, a replicated tensor: its gradient is the same on all ranks, and each term's too."""
    total: torch.Tensor = _SumOverRanks.apply(ranks, what, term)  # type: ignore[no-untyped-call]
    return total
