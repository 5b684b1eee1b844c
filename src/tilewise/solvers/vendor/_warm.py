"""Torch's search in cuDNN on a few images: afterwards cuDNN has compiled and loaded kernels that it offers a problem.

cuDNN compiles some kernels as plans are built, for up to a second, once in a process. cuDNN's frontend for Python holds
Python's lock meanwhile. Torch's search builds the same plans without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tilewise.machine.torch_state import cache_kept, undisturbed
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands

__all__ = ["search_on_few"]

IMAGES = 4
"""So few images are computed quickly, and the plans for them are built from nearly the same kernels."""


def search_on_few(p: ConvProblem) -> Callable[[], object] | None:
    """A function that has torch search on a few images of ``p``; ``None`` where that takes flags of the process.

    What torch finds is of no consequence: it is kept by thread and batch.
    """
    if p.device_type != "cuda" or p.dims == 1 or p.pass_ is Pass.WGRAD:
        return None
    problem = replace(p, accumulate=False, bias=False, constant_weight=False, batch=min(p.batch, IMAGES))

    def search() -> None:
        """Let torch search, on whatever thread this is."""
        with undisturbed(), cache_kept():
            _search(problem)

    return search


def _search(p: ConvProblem) -> None:
    """Call cuDNN by torch's operators that take benchmark mode as an argument."""
    first, w = make_operands(p)
    padding, stride, dilation = ([getattr(x, name) for x in p.axes] for name in ("before", "stride", "dilation"))
    flags = p.groups, True, False, p.precision == "tf32"
    if p.pass_ is Pass.FPROP:
        torch.ops.aten.cudnn_convolution(first, w, padding, stride, dilation, *flags)
    else:
        extra = [x.size + x.before + x.after - (x.out - 1) * x.stride - x.reach for x in p.axes]
        torch.ops.aten.cudnn_convolution_transpose(first, w, padding, extra, stride, dilation, *flags)
