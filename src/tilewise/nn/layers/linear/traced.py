"""How ``torch.compile`` sees a planned linear layer: as one operator of :mod:`tilewise.nn.layers.linear.compiled`.

Dynamo traces this in place of the layer's own call, with tensors that have no memory.
"""

from __future__ import annotations

import torch

from tilewise.nn.layers.frozen import is_frozen_by_inductor
from tilewise.nn.layers.linear.compiled import KnownLinear
from tilewise.nn.layers.linear.layer import LinearLayer
from tilewise.nn.layers.traced import called_with, is_bias

__all__ = ["trace"]


def trace(layer: LinearLayer, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor | None:
    """The operator call that Dynamo traces for ``layer``; ``None`` where no plans are known for these tensors.

    Nothing is planned here. Where torch's own products win there are no plans, and Inductor sees a plain linear layer,
    into which it may fuse what is around it.
    """
    # An exported program runs without tilewise. (Dynamo of torch 2.11 takes is_exporting() itself to be always true.)
    if torch.compiler._is_exporting_flag or not layer.known:
        return None
    x, w, b, needs = called_with(x, w, b)
    grad = torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    for known in layer.known:
        if (
            _is_of(known, x, w)
            and is_bias(b, known.weight[0] if known.bias else None, x)
            and needs == known.needs
            and deterministic == known.deterministic
            and x.is_contiguous()
            and (w.t().is_contiguous() if known.turned else w.is_contiguous())
        ):
            if not grad and x.device.type == "cpu" and is_frozen_by_inductor():
                return None  # it packs the weight once for oneDNN, and fuses what follows
            return torch.ops.tilewise.linear(x, w, b, known.plans)  # type: ignore[no-any-return]
    return None


def _is_of(known: KnownLinear, x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether tensors have the sizes, types and devices of the known call."""
    return (
        x.dim() == len(known.shape)
        and x.shape == known.shape
        and w.shape == known.weight
        and x.dtype == w.dtype == known.dtype
        and x.device.type == known.device_type
        and x.device == w.device
    )
