"""Temporaries for results, carved from a workspace."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.machine.workspaces import GRAIN
from tilewise.problems.base import Problem, Tensors, dense_strides

__all__ = ["Place", "carved", "carved_places"]


class Place:
    """Shape, strides and type of one result in a temporary of its own, and its ``size`` in bytes."""

    __slots__ = ("dtype", "shape", "size", "strides")

    def __init__(self, problem: Problem, role: str, dtype: torch.dtype | None = None) -> None:
        layout = problem.layout(role)
        self.shape, self.dtype = problem.shape(role), dtype or problem.torch_dtype(role)
        self.strides = dense_strides(self.shape, "contiguous" if layout == "view" else layout)
        self.size = carved(math.prod(self.shape) * self.dtype.itemsize)

    def described(self) -> Tensor:
        """A meta tensor of this shape (it has no memory), to bind solvers to."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")

    def in_(self, workspace: Tensor | None) -> Tensor:
        """The tensor at the beginning of ``workspace``."""
        assert workspace is not None
        return _carve(workspace, self.size, self.shape, self.strides, self.dtype)


def carved_places(places: Sequence[Place], workspace: Tensor | None) -> tuple[Tensors, Tensor | None]:
    """Tensors for ``places``, one after the other from the start of ``workspace``, and what is left of it."""
    tensors = []
    for place in places:
        tensors.append(place.in_(workspace))
        assert workspace is not None
        workspace = workspace[place.size :]
    return tuple(tensors), workspace


def _carve(
    workspace: Tensor, size: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """A tensor in the first ``size`` bytes of ``workspace``."""
    return workspace[:size].view(dtype).as_strided(shape, strides)


def carved(size: int) -> int:
    """``size`` bytes rounded up to what a temporary takes of a workspace, whose pieces are aligned.

    >>> from tilewise.execute import carved
    >>> carved(1), carved(4096)
    (256, 4096)
    """
    return -(-size // GRAIN) * GRAIN
