"""Whether a region is right and faster: its results beside float64, and its forward beside torch's, in turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tilewise.nn.regions.trace import Traced
from tilewise.nn.step.pairs import Pairs, Side, time_pairs

__all__ = ["ERROR_LIMIT", "TF32_LIMIT", "error_of", "in_float64", "timed"]

ERROR_LIMIT = 2e-5
"""The relative L2 error of a region in fp32, where nothing else is asked for."""
TF32_LIMIT = 1e-3
"""The same where torch may round operands to TF32, whose numbers are as much apart (2^-10)."""


def in_float64(traced: Traced, tensors: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """What a trace that is not rewritten gives, computed in float64; ``None`` where torch cannot compute it so."""
    doubled = [t.double() if t.is_floating_point() else t for t in tensors]
    try:
        with torch.no_grad():
            results: Any = _InFloat64(traced.module).run(*doubled)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    return tuple(results)


class _InFloat64(fx.Interpreter):
    """Runs a graph with every fraction in float64."""

    def fetch_attr(self, target: str) -> Any:
        """A parameter or buffer, in float64."""
        value = super().fetch_attr(target)
        return value.detach().double() if isinstance(value, Tensor) and value.is_floating_point() else value

    def run_node(self, n: fx.Node) -> Any:
        """The result of one node. Where it names a shorter dtype, it gets float64."""
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        dtype = kwargs.get("dtype")
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            kwargs = {**kwargs, "dtype": torch.float64}
        target = n.target
        assert callable(target)
        return target(*args, **kwargs)


def error_of(results: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest relative L2 distance of ``results`` from ``wanted``.

    Numbers that are not finite must be the same in both: the distance is infinite otherwise.
    """
    worst = 0.0
    for result, reference in zip(results, wanted, strict=True):
        if not reference.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(result, reference.to(result.dtype)) else math.inf)
            continue
        given, want = result.double(), reference.double()
        finite = want.isfinite()
        strange = ~(finite | (want.isnan() & given.isnan()) | (want == given))
        if strange.any() or not given[finite].isfinite().all():
            return math.inf
        norm = float(want[finite].norm())
        distance = float((given[finite] - want[finite]).norm())
        worst = max(worst, distance / norm if norm else (0.0 if not distance else math.inf))
    return worst


def timed(by_torch: Callable[[], object], planned: Callable[[], object], device: torch.device) -> Pairs:
    """The times of two forwards without autograd on a device, in turns."""
    with torch.no_grad():
        return time_pairs(Side(_nothing, by_torch), Side(_nothing, planned), device)


def _nothing() -> None:
    """Both ways are there at once: nothing is to be switched."""
