"""Gradients of parts summed to those of the batch, and buffers of parts averaged."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.nn.shared.replica import Replica

__all__ = ["averaged_into", "summed"]

Gradients = list[torch.Tensor | None]


def summed(replicas: Sequence[Replica], there: Sequence[Gradients], home: torch.device, foreign: set[int]) -> Gradients:
    """The sum of each parameter's gradients, which are ``there`` on ``home``; ``None`` where all parts have none.

    The first part's are added to in place, unless their memory is also that of another gradient or of one of the
    tensors whose storages begin at ``foreign``.
    """
    # A part that computed at home goes first: its gradients need no copy before others are added.
    order = sorted(range(len(there)), key=lambda i: replicas[i].device != home)
    first = order[0]
    total = there[first]
    if replicas[first].device != home:
        total = [None if g is None else g.clone() for g in total]
    elif len(there) > 1:
        total = _own(total, foreign)
    with torch.no_grad():
        for index in order[1:]:
            both = [(a, b) for a, b in zip(total, there[index], strict=True) if a is not None and b is not None]
            if both:
                torch._foreach_add_([a for a, _ in both], [b for _, b in both])
            borrowed = replicas[index].device != home
            total = [
                (b.clone() if borrowed else b) if a is None and b is not None else a
                for a, b in zip(total, there[index], strict=True)
            ]
    return total


def _own(gradients: Gradients, foreign: set[int]) -> Gradients:
    """The gradients, with copies of those that cannot be written to."""
    seen, own = set(foreign), list[torch.Tensor | None]()
    for gradient in gradients:
        if gradient is not None:
            place = gradient.untyped_storage().data_ptr()
            if place in seen or torch._debug_has_internal_overlap(gradient) != 0:
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            seen.add(gradient.untyped_storage().data_ptr())
        own.append(gradient)
    return own


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
