"""The arguments of one call: its tensors, and all else that decides whether a recording fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["CONSTANTS", "Inputs", "why_no_copy"]

CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format)
"""Types of arguments and results that are kept as they are."""

_TENSORS = (torch.Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of a call.

    ``shape`` is equal for calls with tensors of the same shapes, strides, dtypes and devices at the same places of
    the same structure, and with the same values elsewhere. ``needs`` says which tensors need a gradient. ``obstacle``
    says why no recording can take these arguments; it is empty where one can.
    """

    tensors: Sequence[torch.Tensor]
    shape: tuple[Any, ...]
    needs: tuple[bool, ...]
    obstacle: str = ""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
        """The arguments ``args`` and ``kwargs``."""
        if not kwargs and all(type(value) is torch.Tensor for value in args):
            return cls._read(args, (len(args), None))  # the usual call, read without torch's pytrees
        leaves, structure = tree_flatten((args, dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = [None if isinstance(leaf, torch.Tensor) else (type(leaf), leaf) for leaf in leaves]
        for leaf in leaves:
            if type(leaf) not in _TENSORS and not isinstance(leaf, CONSTANTS):
                return cls((), (), (), f"called with a {type(leaf).__name__}, which may change from call to call")
        return cls._read(tensors, (structure, tuple(others)))

    @classmethod
    def _read(cls, tensors: Sequence[torch.Tensor], structure: tuple[Any, Any]) -> Inputs:
        """The arguments with these tensors in ``structure``."""
        if any(t.layout is not torch.strided for t in tensors):
            return cls((), (), (), "called with a tensor that is not strided")
        shape = (*structure, *[(t.shape, t.stride(), t.dtype, t.device) for t in tensors])
        if torch.is_grad_enabled():
            needs = tuple([t.requires_grad for t in tensors])
            if any(t.is_inference() for t in tensors):
                return cls((), (), (), "called with a tensor made under torch.inference_mode, with autograd on")
        else:
            needs = (False,) * len(tensors)
        return cls(tensors, shape, needs)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of such a call, with ``tensors`` in place of its own."""
        structure, others = self.shape[:2]
        if others is None:
            return tuple(tensors), {}
        rest = iter(tensors)
        leaves = [next(rest) if other is None else other[1] for other in others]
        args, kwargs = tree_unflatten(leaves, structure)
        return args, kwargs

    def in_words(self) -> str:
        """The tensors' shapes and dtypes as text."""
        return ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in self.tensors) or "no tensor"


def why_no_copy(inputs: Inputs, device: torch.device) -> str:
    """Why a recording on ``device`` cannot keep copies of these arguments for itself; empty where it can."""
    if inputs.obstacle:
        return inputs.obstacle
    if not inputs.tensors:
        return "called without a tensor"
    for t in inputs.tensors:
        if t.device != device:
            return f"called with a tensor on {t.device}; all must be on {device}"
        if t.numel() and torch._debug_has_internal_overlap(t) != 0:
            return f"called with a tensor of strides {tuple(t.stride())}, whose elements overlap in memory"
    return ""
