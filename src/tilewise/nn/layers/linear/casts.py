"""Tensors as a linear layer's plan takes them: cast as autocast casts them, and contiguous.

Autocast keeps the casts of parameters until its block ends, so that each is cast once a step. Python has no function
that gives such a cast. But an operator that autocast casts for saves what it got for its backward: a product with a
matrix of no rows computes nothing, and has the cast in its node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.machine.recent import Recent

__all__ = ["FEW", "Change", "cast"]

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
MOST_EMPTY = 256
"""Matrices of no rows that are kept."""
FEW = 4096
"""On a CPU so many numbers are cast in less time than a kept cast is found in."""

_empty: Recent[tuple[int, torch.dtype, torch.device], torch.Tensor] = Recent(MOST_EMPTY)
_hooks: Callable[[bool], object] = torch._C._autograd._top_saved_tensors_default_hooks


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of a call's tensors: cast to ``dtype`` unless that is ``None``, and copied where not contiguous.

    A weight that is the transpose of a contiguous matrix stays as it lies.
    """

    dtype: torch.dtype | None
    copied: bool

    def __call__(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Tensors:
        """The tensors changed, with autograd."""
        if self.dtype is not None:
            x, w = x.to(self.dtype), cast(w, self.dtype)
            b = None if b is None else cast(b, self.dtype)
        if self.copied:
            x, b = x.contiguous(), None if b is None else b.contiguous()
        return x, w, b


def cast(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight or bias as autocast casts it: what autocast keeps of a parameter, where it keeps something."""
    if t.dtype is dtype:
        return t
    if t.device.type == "cpu" and t.numel() < FEW:
        return t.to(dtype)
    is_parameter = t.dtype is torch.float32 and t.requires_grad and t.is_leaf and not t._is_view()
    keeps = torch.is_autocast_cache_enabled() and dtype is torch.get_autocast_dtype(t.device.type)
    return _kept(t, dtype) if is_parameter and keeps else t.to(dtype)


def _kept(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The cast that autocast keeps of a parameter, which it makes where it has none."""
    key = t.shape[0], dtype, t.device
    rows = _empty.get(key)
    if rows is None:
        with torch.inference_mode(False):
            rows = torch.empty(0, t.shape[0], dtype=dtype, device=t.device, requires_grad=True)
        _empty[key] = rows
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and _hooks(True) is None:
        return _saved(rows, t)
    with torch.inference_mode(False), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
        return _saved(rows, t)


def _saved(rows: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The second factor of a product as its node of autograd has it."""
    node: Any = torch.matmul(rows, t).grad_fn
    cast: torch.Tensor = node._saved_mat2 if t.dim() == 2 else node._saved_vec
    return cast


def _same(t: torch.Tensor) -> torch.Tensor:
    """A hook that changes nothing: those of the program are not to see what is saved here."""
    return t
