"""Gradients of replicated tensors, which every rank holds whole, are sums over the ranks where these compute by parts.

A replicated tensor (a parameter, a pooled vector, the loss) is the same on every rank, and so is its gradient. Where it
is combined with a part of another tensor, each rank computes its share of that gradient, and the shares are added up.
Where it is combined with other replicated tensors, as in a linear head after ``gather``, each rank computes the whole
gradient, and nothing is added. The graph tells the two cases apart: the sum is a node between the part and the
replicated tensor.

Gradients of parameters are summed while the rest of backward runs. The result of a sum's node is not complete at first.
One node that all parameters share waits for all sums. Autograd reaches it last, because it was made first.
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
    """The ranks that add up tensors, such as those of a :class:`Link`."""

    def telling(self, what: str) -> contextlib.AbstractContextManager[object]:
        """A context manager that tells the other ranks of an error raised in its block."""
        ...

    def sum(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` over the ranks in place, and return it."""
        ...


class _SumNow(torch.autograd.Function):
    """Returns its input; backward sums the gradient over the ranks at once."""

    @staticmethod
    def forward(ctx: Any, ranks: Sums, what: str, tensor: torch.Tensor) -> torch.Tensor:
        ctx.ranks, ctx.what = ranks, what
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, sum_over_ranks(ctx.ranks, ctx.what, gradient)


class _SumOverRanks(torch.autograd.Function):
    """Sums a tensor over the ranks; the gradient of each rank's term is that of the sum."""

    @staticmethod
    def forward(ctx: Any, ranks: Sums, what: str, term: torch.Tensor) -> torch.Tensor:
        ctx.ranks, ctx.what = ranks, what
        with ranks.telling(what):
            return ranks.sum(what, term.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, sum_gradient(ctx.ranks, ctx.what, gradient) if torch.is_grad_enabled() else gradient


class Bucket:
    """Gradients that are being summed over the ranks, several in one message.

    On a GPU the sum of a gradient that is known to be :meth:`complete` starts as soon as that gradient is computed,
    whatever work its stream has been given since.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._complete: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Gradients that wait for a message to fill, each with the tensor for its sum, which may be itself."""
        self._moments: list[torch.cuda.Event | None] = []
        """For each waiting gradient the event after which it is complete, where that is known."""
        self._bytes = self._added = 0
        self._side_stream: Branch | None = None
        self._copied: list[torch.Tensor] = []
        """Tensors that the side stream copies, whose memory must not be used again before :meth:`finish`."""
        self._travelling: list[tuple[dist.Work, torch.Tensor, list[torch.Tensor]]] = []
        """Started sums: the work, the message, and the tensors for the sums in it."""
        self.expected = 0
        """The number of gradients to come, if all do."""

    def complete(self, gradient: torch.Tensor) -> None:
        """Say that the current stream adds nothing more to ``gradient``, and that nothing but the sum reads it."""
        if gradient.is_cuda:
            event = torch.cuda.current_stream(gradient.device).record_event()
            self._complete[id(gradient)] = gradient, event

    def add(self, gradient: torch.Tensor) -> torch.Tensor:
        """Sum ``gradient`` over the ranks; returns a tensor that holds the sum after :meth:`finish`."""
        total, moment = self._complete.pop(id(gradient), (None, None))
        if total is None:
            total = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        elif not total.is_contiguous():
            # Elements must have the same order on all ranks, but the ranks' plans may have given it other layouts.
            with self._after([moment], total.device):
                total = total.clone(memory_format=torch.contiguous_format)
            self._copied.append(gradient)
            gradient = total
        if self._waiting and self._waiting[0][1].dtype != total.dtype:
            self.flush()
        self._added += 1
        self._waiting.append((gradient, total))
        self._moments.append(moment)
        self._bytes += total.nbytes
        if self._bytes >= BUCKET or self._added == self.expected:
            self.flush()
        return total

    def flush(self) -> None:
        """Start the sum of all gradients that wait."""
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
        """A context in which work runs on a side stream after all ``moments``, or as usual where one is unknown."""
        known = [moment for moment in moments if moment is not None]
        if len(known) < len(moments):
            return contextlib.nullcontext()
        self._side_stream = Branch(device, "sums")
        for moment in known:
            context = self._side_stream.after(moment)
        return context

    def finish(self) -> None:
        """Wait for all sums; on a GPU the current stream waits, not the host."""
        self.flush()
        travelling, self._travelling = self._travelling, []
        self._added = 0
        self._complete.clear()
        for work, flat, parts in travelling:
            self.link.finish_sum("the sum of gradients", work)
            if len(parts) > 1:
                sums = torch.split(flat, [part.numel() for part in parts])
                torch._foreach_copy_(parts, [total.view_as(part) for total, part in zip(sums, parts, strict=True)])
        if self._side_stream is not None:
            self._side_stream.join()
        self._copied.clear()


class _Sum(torch.autograd.Function):
    """Returns its input; backward adds the gradient to the bucket, whose sums are waited for later."""

    @staticmethod
    def forward(ctx: Any, bucket: Bucket, tensor: torch.Tensor) -> torch.Tensor:
        ctx.bucket = bucket
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        if torch.is_grad_enabled():  # a gradient that may be differentiated again must be complete
            return None, sum_over_ranks(ctx.bucket.link, "the sum of gradients", gradient)
        return None, ctx.bucket.add(gradient)


class _Wait(torch.autograd.Function):
    """Returns its inputs; backward waits for all sums of the bucket."""

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
    """The parameters of one forward. The gradient of each is summed over the ranks once, however often it is used."""

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
        """Whether ``parameter`` is one of those given at construction."""
        known = self._known.get(id(parameter))
        return known is not None and known[0] is parameter

    def complete(self, gradient: torch.Tensor) -> None:
        """See :meth:`Bucket.complete`. ``gradient`` must be that of a parameter; it is held until its sum begins."""
        self._bucket.complete(gradient)

    def use(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The tensor to compute with in place of ``parameter``, so that its gradient is summed over the ranks.

        ``None`` where ``parameter`` was not given at construction.
        """
        if not self.holds(parameter):
            return None
        used = self._used.get(id(parameter))
        if used is None:
            used = self._used[id(parameter)] = _Sum.apply(self._bucket, self._known[id(parameter)][1])  # type: ignore[no-untyped-call]
            self._bucket.expected = len(self._used)
        return used


def sum_gradient(ranks: Sums, what: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself, whose gradient becomes the sum over the ranks; backward waits for the sum at once."""
    summed: torch.Tensor = _SumNow.apply(ranks, f"the backward of {what}", tensor)  # type: ignore[no-untyped-call]
    return summed


def sum_over_ranks(ranks: Sums, what: str, term: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' terms, the same on every rank. The gradient of each term is that of the sum."""
    total: torch.Tensor = _SumOverRanks.apply(ranks, what, term)  # type: ignore[no-untyped-call]
    return total
