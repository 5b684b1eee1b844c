"""Ranges for torch's profiler: which layer, pass and solver computes. Without a profiler a call pays one question.

A range is named ``tilewise: layer1.0.conv1 forward tiled_fft``: the module's name in the model, the pass, and the
solver of the plan that runs. Calls of functions have no module, and so no name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch._C import _autograd as autograd
from torch.autograd.profiler import record_function

__all__ = ["PREFIX", "both_ranges", "in_range", "range_name", "shown", "watched"]

PREFIX = "tilewise:"
"""How the names of all ranges begin."""

watched: Callable[[], bool] = autograd._profiler_enabled
"""Whether a profiler of torch runs on this thread."""


def range_name(layer: str, role: str, solver: str) -> str:
    """The name of the range of one pass of ``layer``, which may be empty, by a plan of ``solver``.

    >>> range_name("stem", "forward", "tiled_fft"), range_name("", "grad_input", "gemm_matmul")
    ('tilewise: stem forward tiled_fft', 'tilewise: grad_input gemm_matmul')
    """
    return " ".join(filter(None, (PREFIX, layer, str(role), solver)))


def both_ranges(layer: str, solver: str) -> tuple[str, str]:
    """The names of the ranges of a layer's forward and backward by one solver.

    >>> both_ranges("pool", "window_pooling")
    ('tilewise: pool forward window_pooling', 'tilewise: pool backward window_pooling')
    """
    return range_name(layer, "forward", solver), range_name(layer, "backward", solver)


def in_range(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, which shows as a range of this name while a profiler runs. It takes positional arguments alone."""
    if not name:
        return call

    def run(*tensors: Any) -> Any:
        """Call it, in the range where somebody looks."""
        if watched():
            with record_function(name):
                return call(*tensors)
        return call(*tensors)

    return run


def shown(name: str) -> AbstractContextManager[object]:
    """A context that shows as a range of this name while a profiler runs; for what is no single call."""
    return record_function(name) if name and watched() else NOTHING


NOTHING: AbstractContextManager[object] = nullcontext()
