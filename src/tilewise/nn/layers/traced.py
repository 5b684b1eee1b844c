"""How ``torch.compile`` sees a planned layer: as one operator of :mod:`tilewise.nn.layers.compiled`.

Dynamo traces this in place of the layer's own call, with tensors that have no memory.
"""

from __future__ import annotations

import torch

from tilewise.nn.layers.frozen import is_kept, lead_training
from tilewise.nn.layers.layer import Layer
from tilewise.nn.layers.strides import backend_layout

__all__ = ["called_with", "is_bias", "trace"]


def trace(layer: Layer, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor | None:
    """The operator call that Dynamo traces for ``layer``; ``None`` where no plans are known for these tensors.

    Nothing is planned here. Where Inductor freezes the weights, what it computes faster by itself is left to it.
    """
    # An exported program runs without tilewise. (Dynamo of torch 2.11 takes is_exporting() itself to be always true.)
    if torch.compiler._is_exporting_flag or not layer.geometry.symmetric:
        return None
    x, w, b, needs = called_with(x, w, b)
    grad = torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    for known in layer.known:
        if (
            x.dim() == len(known.shape)
            and x.shape == known.shape
            and w.dim() == len(known.weight)
            and w.shape == known.weight
            and x.dtype == w.dtype == known.dtype
            and x.device.type == known.device_type
            and x.device == w.device
            and is_bias(b, known.bias, x)
            and needs == known.needs
            and deterministic == known.deterministic
            and known.layout == backend_layout(x.shape, x.stride(), w.shape, w.stride())
        ):
            if not grad and not is_kept(known.plans, known.table):
                return None
            if grad:
                lead_training()
            return torch.ops.tilewise.conv(x, w, b, known.plans)  # type: ignore[no-any-return]
    return None


def called_with(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, tuple[bool, bool, bool]]:
    """The tensors of a call as its operator takes them, cast where autocast does, and which of them need gradients."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w, b = x.to(dtype), w.to(dtype), None if b is None else b.to(dtype)
    grad = torch.is_grad_enabled()
    needs = (grad and x.requires_grad, grad and w.requires_grad, grad and b is not None and b.requires_grad)
    return x, w, b, needs


def is_bias(b: torch.Tensor | None, size: int | None, x: torch.Tensor) -> bool:
    """Whether ``b`` is a bias of ``size`` numbers beside ``x``; none has the size ``None``."""
    if b is None or size is None:
        return b is None and size is None
    return b.dim() == 1 and b.shape[0] == size and b.dtype == x.dtype and b.device == x.device
