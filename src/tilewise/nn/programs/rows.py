"""Layer normalization on a GPU by a kernel of ours, as a step of a program."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.solvers.common.triton_run import has_triton, program
from tilewise.solvers.common.views import launch

__all__ = ["ALIGNMENT", "MOST_COLUMNS", "RowNorm", "can_run"]

ALIGNMENT = 16
"""Bytes at a multiple of which each of its tensors begins."""
MOST_COLUMNS = 8192
"""Columns of a row at the most: a program holds whole rows in its registers."""
NUMBERS, MOST_ROWS = 4096, 32
"""Numbers that a program has, roughly, and rows at the most."""


@dataclass(frozen=True)
class RowNorm:
    """``torch.nn.functional.layer_norm`` over the last dimension of contiguous tensors of ``shape``.

    ``weighted`` and ``biased`` say whether a weight and a bias follow the input among a call's tensors. The last of
    them is the result. Raises ``SolverUnavailable`` with Triton's reason at the first call.
    """

    shape: tuple[int, ...]
    eps: float
    weighted: bool
    biased: bool
    dtype: torch.dtype

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a call's tensors."""
        return (self.shape, *[self.shape[-1:]] * (self.weighted + self.biased), self.shape)

    def __call__(self, *tensors: Tensor) -> None:
        """Compute into the last of ``tensors``."""
        _program(self, tensors[0].device)(tensors)


def can_run(columns: int, device: torch.device) -> bool:
    """Whether there is a kernel for rows of so many numbers on such a device."""
    return device.type == "cuda" and has_triton() and 0 < columns <= MOST_COLUMNS


@functools.lru_cache(maxsize=256)
def _program(norm: RowNorm, device: torch.device) -> Any:
    """The compiled kernel."""
    from tilewise.kernels.triton.channels_last.row_norm import row_norm
    from tilewise.kernels.triton.launch import Pointer

    columns = norm.shape[-1]
    count, width = math.prod(norm.shape) // columns, 1 << (columns - 1).bit_length()
    rows = max(1, min(MOST_ROWS, NUMBERS // width))
    last = 1 + norm.weighted + norm.biased
    out = Pointer(last, 0, norm.dtype)
    weight = Pointer(1, 0, norm.dtype) if norm.weighted else out
    bias = Pointer(1 + norm.weighted, 0, norm.dtype) if norm.biased else out
    one = launch(
        row_norm, (-(-count // rows),), (Pointer(0, 0, norm.dtype), weight, bias, out), (count, columns),
        WEIGHT=norm.weighted, BIAS=norm.biased, EPS=norm.eps, ROWS=rows, COLUMNS=width,
    )  # fmt: skip
    return program([one], [ALIGNMENT] * (last + 1), device)
