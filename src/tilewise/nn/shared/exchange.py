"""What replicas exchange before and after a linear layer whose outputs are divided among them.

Each device has some rows of the layer's weight. It computes their outputs for the whole batch: samples of all devices
are gathered before, and each device gets all outputs of its own samples after. In the backward the same happens with
gradients, and those of the layer's input are sums over devices (Hadjis et al. 2015, section 3.3, names this as model
parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.nn.shared.batch import joined
from tilewise.nn.shared.part import Part

__all__ = ["gather", "gather_gradients", "scatter", "scatter_gradients"]


def gather(parts: Sequence[Part], stage: int, *, gradients: bool) -> None:
    """Give every device with rows of the layer the samples of all."""
    own = [part for part in parts if part.size]
    values = [part.made[stage - 1][0].detach() for part in own]
    needs = gradients and any(part.made[stage - 1][0].requires_grad for part in own)
    there: dict[torch.device, torch.Tensor] = {}
    for part in parts:
        if part.has(stage):
            device = part.replica.device
            if device not in there:
                whole = joined(values, [each.size for each in own], device)
                assert whole is not None
                there[device] = whole
            part.given[stage] = [there[device].detach().requires_grad_(needs)]


def scatter(parts: Sequence[Part], stage: int, *, gradients: bool) -> None:
    """Give every device all outputs of its own samples."""
    own = [part for part in parts if part.has(stage)]
    needs = gradients and any(part.made[stage][0].requires_grad for part in own)
    for part in parts:
        if part.size:
            pieces = [
                each.made[stage][0].detach()[part.start : part.stop].to(part.replica.device, non_blocking=True)
                for each in own
            ]
            whole = torch.cat(pieces, -1) if len(pieces) > 1 else pieces[0].clone()
            part.given[stage + 1] = [whole.requires_grad_(needs)]


def gather_gradients(parts: Sequence[Part], stage: int) -> None:
    """Give every device with rows of the layer the gradients of their outputs for the whole batch."""
    own = [part for part in parts if part.size]
    there = [part.back[stage + 1] for part in own]
    first = next((each for each in there if each is not None), None)
    if first is None:
        return
    for part in parts:
        if part.has(stage) and part.made[stage][0].requires_grad:
            start, stop = part.replica.rows[part.stages[stage].layer]
            pieces = []
            for each, gradient in zip(own, there, strict=True):
                if gradient is None:
                    shape = (each.size, *first.shape[1:-1], stop - start)
                    pieces.append(torch.zeros(shape, dtype=first.dtype, device=part.replica.device))
                else:
                    pieces.append(gradient[..., start:stop].to(part.replica.device, non_blocking=True))
            part.heads[stage] = [(part.made[stage][0], torch.cat(pieces))]


def scatter_gradients(parts: Sequence[Part], stage: int) -> None:
    """Give every device the gradients of its samples: sums over the rows of all devices, in their order."""
    there = [gradient for part in parts if (gradient := part.back[stage]) is not None]
    for part in parts:
        if there and part.size and part.made[stage - 1][0].requires_grad:
            pieces = [each[part.start : part.stop].to(part.replica.device, non_blocking=True) for each in there]
            total = pieces[0]
            for number, piece in enumerate(pieces[1:]):
                total = total.add_(piece) if number else total + piece
            part.heads[stage - 1] = [(part.made[stage - 1][0], total)]
