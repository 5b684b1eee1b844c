"""Gradients that can be differentiated again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = ["partials"]


def partials(
    function: Callable[..., torch.Tensor],
    tensors: Sequence[torch.Tensor],
    wants: Sequence[bool],
    upstream: torch.Tensor,
) -> list[torch.Tensor | None]:
    """The gradients of ``function(*tensors)`` by those of ``tensors`` that are wanted, for ``upstream``.

    For a backward under ``create_graph=True``: they depend on ``tensors`` and ``upstream`` in a graph of their own.
    """
    # Views, as one tensor may have been computed from another, which is no matter of this function's.
    own = [tensor.view_as(tensor) for tensor in tensors]
    wanted = [tensor for tensor, want in zip(own, wants, strict=True) if want]
    found = iter(torch.autograd.grad(function(*own), wanted, upstream, create_graph=True) if wanted else ())
    return [next(found) if want else None for want in wants]
