"""Gradients of parts summed to those of the batch, and buffers of parts averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch

from tilewise.nn.shared.mirror import Mirror
from tilewise.nn.shared.replica import Replica

__all__ = ["Sums", "averaged_into", "in_order"]

Gradients = list[torch.Tensor | None]


class Sums:
    """The sum of each parameter's gradients on ``home``, where ``weights`` are the parameters that need one.

    Parts on the home device come first, then those on GPUs, then those on CPUs, each in the order of their numbers:
    the gradients of a parameter are added in this order, whenever that happens. What divided layers have is put
    together, not added.

    With ``side``, streams by GPU, gradients travel and are added there as soon as a stage of the backward has them, and
    the backward goes on meanwhile. The first part's gradients are added to in place, unless their memory is also that
    of another gradient or of one of the tensors whose storages begin at ``foreign``.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        home: torch.device,
        foreign: set[int],
        side: Mapping[torch.device, torch.cuda.Stream] | None,
    ) -> None:
        self._weights, self._home, self._side = weights, home, side or {}
        self._seen = set(foreign)
        self._early = home.type == "cuda" and home in self._side
        self._totals: Gradients = [None] * len(weights)
        self._waiting: list[tuple[Replica, Sequence[int], Gradients, Mirror | None]] = []

    def ready(self, replica: Replica, leaves: Sequence[int], gradients: Gradients) -> None:
        """Take the gradients of a replica's ``leaves``, all work for which is queued in the current stream."""
        own = [(leaf, g) for leaf, g in zip(leaves, gradients, strict=True) if g is not None]
        if not own:
            return
        leaves, found = [leaf for leaf, _ in own], [g for _, g in own]
        mirror: Mirror | None = None
        with ExitStack() as stack:
            for device in {replica.device, self._home} if replica.device in self._side else ():
                if device in self._side:
                    self._side[device].wait_stream(torch.cuda.current_stream(device))
                    stack.enter_context(torch.cuda.stream(self._side[device]))
            if replica.device != self._home and (replica.device in self._side or replica.device.type == "cpu"):
                mirror = replica.send_gradients(leaves, found)
        if replica.device.type == "cuda" and self._early:
            self._add(replica, leaves, found, mirror)
        else:
            self._waiting.append((replica, leaves, [*found], mirror))

    def finish(self) -> Gradients:
        """The sums, in the current stream of ``home``; ``None`` where no part has a gradient."""
        for device, stream in self._side.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        self._early = False
        for replica, leaves, found, mirror in sorted(self._waiting, key=lambda each: in_order(each[0], self._home)):
            if mirror is None and replica.device != self._home:
                mirror = replica.send_gradients(leaves, found)
            self._add(replica, leaves, found, mirror)
        self._waiting = []
        return self._totals

    def _add(
        self, replica: Replica, leaves: Sequence[int], found: Sequence[torch.Tensor | None], mirror: Mirror | None
    ) -> None:
        """Add gradients to the sums: on the side stream where that is early."""
        if mirror is not None:
            mirror.wait()
        there = found if mirror is None else mirror.copies
        into, added = list[torch.Tensor](), list[torch.Tensor]()
        written, copied = list[torch.Tensor](), list[torch.Tensor]()
        for leaf, gradient in zip(leaves, there, strict=True):
            assert gradient is not None
            total, weight = self._totals[leaf], self._weights[leaf]
            rows = replica.ranges.get(id(weight))
            if rows is not None:
                if total is None:
                    total = self._totals[leaf] = torch.empty_like(weight.detach(), dtype=gradient.dtype)
                written.append(total[rows[0] : rows[1]])
                copied.append(gradient)
            elif total is not None:
                into.append(total)
                added.append(gradient)
            elif mirror is not None:
                total = self._totals[leaf] = torch.empty_like(gradient)
                written.append(total)
                copied.append(gradient)
            else:
                self._totals[leaf] = self._own(gradient)
        with ExitStack() as stack:
            if self._early:
                # Memory that was allocated above is the current stream's, which may still use it for something else.
                self._side[self._home].wait_stream(torch.cuda.current_stream(self._home))
                stack.enter_context(torch.cuda.stream(self._side[self._home]))
            stack.enter_context(torch.no_grad())
            if written:
                torch._foreach_copy_(written, copied)
            if into:
                torch._foreach_add_(into, added)

    def _own(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient, or a copy of one that cannot be written to."""
        place = gradient.untyped_storage().data_ptr()
        if place in self._seen or torch._debug_has_internal_overlap(gradient) != 0:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        self._seen.add(gradient.untyped_storage().data_ptr())
        return gradient


def in_order(replica: Replica, home: torch.device) -> tuple[bool, bool, int]:
    """A key that sorts replicas as their gradients are added."""
    return replica.device != home, replica.device.type == "cpu", replica.number


def averaged_into(buffers: Sequence[torch.Tensor], replicas: Sequence[Replica], sizes: Sequence[int]) -> None:
    """Set ``buffers`` to the mean of those of the replicas, weighted by ``sizes``; whole numbers are the first one's.

    That does not count as a change of the buffers, as that of a batch norm in its forward does not.
    """
    found = [_buffers_at_home(replica) for replica in replicas]
    with torch.no_grad():
        real = [i for i, b in enumerate(buffers) if b.is_floating_point() or b.is_complex()]
        whole = sorted({*range(len(buffers))} - {*real})
        if whole:
            torch._foreach_copy_([buffers[i].data for i in whole], [found[0][i] for i in whole])
        if not real:
            return
        if len(found) == 1:
            mean = [found[0][i] for i in real]
        else:
            batch = sum(sizes)
            mean = list(torch._foreach_mul([found[0][i] for i in real], sizes[0] / batch))
            for each, size in zip(found[1:], sizes[1:], strict=True):
                torch._foreach_add_(mean, [each[i] for i in real], alpha=size / batch)
        torch._foreach_copy_([buffers[i].data for i in real], mean)


def _buffers_at_home(replica: Replica) -> list[torch.Tensor]:
    """The replica's buffers on the model's device."""
    own = [b.data for b in replica.kept_buffers()]
    if replica.buffers_home is None:
        return own
    replica.buffers_home.copy(own)
    replica.buffers_home.wait()
    return replica.buffers_home.copies
