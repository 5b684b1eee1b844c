"""Tensors that every rank holds whole, where they meet a rank's part of another: their gradients are sums over ranks.

A replicated tensor (a parameter, a pooled vector, the loss) is the same on every rank, and so is its gradient. Where it
meets a part, each rank finds its share of that gradient, and the shares are added up. Where it meets other replicated
tensors, as in a linear head behind ``gather``, each rank finds the whole gradient, and nothing is added. Which of the
two it is is a matter of the graph: the sum is a node on the way from a part to a replicated tensor.

Sums of parameters' gradients travel while the rest of backward runs: what a sum's node gives is not yet there, and is
waited for in one node that all parameters share and that autograd reaches last, since it was made first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tilewise.comm.link import Link

__all__ = ["Parameters", "sum_gradient"]

BUCKET = 1 << 20
"""Bytes of gradients that travel as one message: smaller ones wait for each other."""


class _SumNow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Link, what: str, tensor: torch.Tensor) -> torch.Tensor:
        ctx.link, ctx.what = link, what
        return tensor.view_as(tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        return None, None, ctx.link.sum(ctx.what, total)


class Bucket:
    """Gradients on their way: those that wait for company, and those that travel."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: list[torch.Tensor] = []
        self._bytes = 0
        self._travelling: list[tuple[dist.Work, torch.Tensor, list[torch.Tensor]]] = []

    def add(self, gradient: torch.Tensor) -> torch.Tensor:
        """A tensor that will hold the sum of ``gradient`` after :meth:`finish`."""
        total = gradient.clone(memory_format=torch.contiguous_format)
        if total.nbytes >= BUCKET:
            self._travelling.append((self._link.start_sum("the sum of gradients", total), total, []))
            return total
        if self._waiting and self._waiting[0].dtype != total.dtype:
            self.flush()
        self._waiting.append(total)
        self._bytes += total.nbytes
        if self._bytes >= BUCKET:
            self.flush()
        return total

    def flush(self) -> None:
        """Send off what waits."""
        if self._waiting:
            flat = torch.cat([tensor.view(-1) for tensor in self._waiting])
            self._travelling.append((self._link.start_sum("the sum of gradients", flat), flat, self._waiting))
        self._waiting, self._bytes = [], 0

    def finish(self) -> None:
        """Wait for all; on a GPU the current stream waits."""
        self.flush()
        travelling, self._travelling = self._travelling, []
        for work, flat, parts in travelling:
            self._link.finish_sum("the sum of gradients", work)
            start = 0
            for part in parts:
                part.copy_(flat[start : start + part.numel()].view_as(part))
                start += part.numel()


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bucket: Bucket, tensor: torch.Tensor) -> torch.Tensor:
        ctx.bucket = bucket
        return tensor.view_as(tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ctx.bucket.add(gradient)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bucket: Bucket, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
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

    def use(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """What stands for ``parameter`` beside a part; ``None`` where it is none of those this began with."""
        known = self._known.get(id(parameter))
        if known is None or known[0] is not parameter:
            return None
        used = self._used.get(id(parameter))
        if used is None:
            used = self._used[id(parameter)] = _Sum.apply(self._bucket, known[1])  # type: ignore[no-untyped-call]
        return used


def sum_gradient(link: Link, what: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, whose gradient will be the sum over the ranks, waited for on the spot."""
    summed: torch.Tensor = _SumNow.apply(link, f"the backward of {what}", tensor)  # type: ignore[no-untyped-call]
    return summed
