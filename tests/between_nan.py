"""Tensors inside larger memory full of NaN, for tests of kernels that get addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Between"]

GAP = 64
"""Elements before and behind a tensor: a multiple of every alignment that kernels rely on."""


class Between:
    """Dense tensors between gaps. All their memory begins as NaN, or as 255 where it holds whole numbers."""

    def __init__(self, place: str) -> None:
        self.place = torch.device(place)
        self._made: list[tuple[Tensor, int]] = []

    def made(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape with dense strides."""
        count = 1
        for n in shape:
            count *= n
        value = float("nan") if dtype.is_floating_point else 255
        base = torch.full((count + 2 * GAP,), value, dtype=dtype, device=self.place)
        self._made.append((base, count))
        return base.as_strided(tuple(shape), tuple(strides), GAP)

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor that lies as ``tensor`` does, with its values."""
        return self.made(tensor.shape, tensor.stride(), tensor.dtype).copy_(tensor)

    def untouched(self) -> bool:
        """Whether nothing was written outside the tensors."""
        outside = [torch.cat([base[:GAP], base[GAP + count :]]) for base, count in self._made]
        return all(bool((t.isnan() if t.is_floating_point() else t == 255).all()) for t in outside)
