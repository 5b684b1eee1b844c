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
    """The gradients of ``function(*tensors)`` with respect to ``tensors``, or ``None`` for those not in ``wants``.

    ``upstream`` is the gradient of the function's result. The gradients have a graph of their own that leads to
    ``tensors`` and ``upstream``, as a backward under ``create_graph=True`` needs.
    """
    # Views, because one of the tensors may have been computed from another, which these gradients must leave out.
    views = [tensor.view_as(tensor) for tensor in tensors]
    wanted = [tensor for tensor, want in zip(views, wants, strict=True) if want]
    gradients = iter(torch.autograd.grad(function(*views), wanted, upstream, create_graph=True) if wanted else ())
    return [next(gradients) if want else None for want in wants]
