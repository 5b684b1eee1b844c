"""Torch's own pooling: the baseline that every plan of one is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.plan import Config
from tilewise.problems.pooling.problem import PoolingProblem
from tilewise.solvers.pooling._pooling import Pooler, PoolingSolver

FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "max": tuple(getattr(torch._C._VariableFunctions, f"max_pool{n}d") for n in (1, 2, 3)),
    "avg": (torch._C._VariableFunctions.avg_pool1d, torch._C._nn.avg_pool2d, torch._C._nn.avg_pool3d),
}
"""torch's own functions by operation and number of axes, whatever stands in their places."""


class AtenPooling(PoolingSolver):
    """``aten::max_pool2d``, ``avg_pool2d`` and those for one and three axes, with autograd for training."""

    name, version = "aten_pooling", 1
    baseline = True
    kept_bytes = 8

    def unsupported(self, p: PoolingProblem) -> list[str]:
        """Reasons: averages over volumes in half precision on a CPU, which torch does not have."""
        lacks = p.op == "avg" and len(p.space) == 3 and p.device_type == "cpu" and p.dtype != "fp32"
        return [f"torch has no average over three axes in {p.dtype} on a CPU"] if lacks else []

    def is_deterministic(self, p: PoolingProblem, c: Config) -> bool:
        """Gradients on a GPU are added by atomics."""
        return p.device_type == "cpu" or p.task == "inference"

    def pooler(self, p: PoolingProblem, c: Config, device: torch.device) -> Pooler:
        """Torch's function."""
        return _TorchPooler(p)


@dataclass(frozen=True)
class _TorchPooler:
    """Torch's function and autograd's gradient of it."""

    p: PoolingProblem

    def forward(self, x: Tensor, *, keep: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As :meth:`Pooler.forward`. Saved are the input, and the result with its graph."""
        if not keep:
            return called(self.p, x), ()
        with torch.inference_mode(False), torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = called(self.p, leaf)
        return y.detach(), (leaf, y)

    def backward(self, saved: tuple[Tensor, ...], dy: Tensor) -> Tensor:
        """As :meth:`Pooler.backward`."""
        leaf, y = saved
        return torch.autograd.grad(y, leaf, dy)[0]


def called(p: PoolingProblem, x: Tensor) -> Tensor:
    """Torch's result for ``x``, with autograd, in the problem's layout."""
    dims = len(p.space)
    function, sizes = FUNCTIONS[p.op][dims - 1], (p.kernel, p.stride, p.padding)
    if p.op == "max":
        y = function(x, *sizes, p.dilation, p.ceil_mode)
    elif dims == 1:
        y = function(x, *sizes, p.ceil_mode, p.count_include_pad)
    else:
        y = function(x, *sizes, p.ceil_mode, p.count_include_pad, p.divisor or None)
    # Functions of one axis, and some of others, give results that lie otherwise than their input.
    return y.contiguous(memory_format=_format(p))


def _format(p: PoolingProblem) -> torch.memory_format:
    """The memory format of the problem's layout, as far as torch has it."""
    if p.layout_name == "contiguous" or len(p.space) == 1:
        return torch.contiguous_format
    return torch.channels_last if len(p.space) == 2 else torch.channels_last_3d
