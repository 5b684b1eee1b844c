"""Which calls of a replica are captured in CUDA graphs: kinds of calls that come again, and not without bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tilewise.nn.graphs.inputs import Inputs
from tilewise.nn.graphs.model import ModelGraphs
from tilewise.nn.graphs.modes import watched
from tilewise.nn.graphs.recorder import CannotCapture, Recorder

__all__ = ["MOST_CAPTURED", "Captures", "NewRecorder"]

MOST_CAPTURED = 24
"""Kinds of calls that are captured at most."""
MOST_KNOWN = 64
"""Kinds of calls that are remembered."""

NewRecorder = Callable[[torch.device], Recorder]


class Captures:
    """The captures of ``module`` on ``device``. A kind of call is captured when it comes for the second time.

    A kind is the shapes, the modes and whether there are gradients. So the last batch of an epoch, which has another
    size, is captured only if it comes again.
    """

    def __init__(self, module: nn.Module, device: torch.device, recorder: NewRecorder) -> None:
        self._module = module
        self._device, self._recorder = device, recorder
        self._graphs: ModelGraphs | None = None
        self._seen: dict[tuple[Any, ...], bool] = {}
        self._captured = 0
        self.reasons: dict[str, int] = {}
        """Why calls were not captured, and how many kinds."""

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Capture such a call where it is time to; say whether it will be replayed."""
        inputs = Inputs.of(args, kwargs)
        modes = tuple(part.training for part in self._module.modules())
        key = (inputs.shape, inputs.needs, torch.is_grad_enabled(), modes, torch.is_autocast_enabled(self._device.type))
        if key in self._seen:
            known = self._seen[key]
            if known or self._captured >= MOST_CAPTURED:
                return known
            if not watched():
                self._captured += 1
                self._seen[key] = self._try(args, kwargs)
                return self._seen[key]
            return False
        if len(self._seen) >= MOST_KNOWN:
            del self._seen[next(iter(self._seen))]
        self._seen[key] = False
        return False

    def _try(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Capture such a call; ``False`` where that cannot be done."""
        try:
            if self._graphs is None:
                self._graphs = ModelGraphs(self._module, lambda: self._recorder(self._device))
            self._graphs.expect(args, kwargs)
        except CannotCapture as error:
            self.reasons[str(error)] = self.reasons.get(str(error), 0) + 1
            self._captured = MOST_CAPTURED  # what stands in the way of one kind stands in that of all
            return False
        return True

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the module returns."""
        return self._module(*args, **kwargs)

    def summary(self) -> str:
        """How many calls were replayed, and why others were not, as text."""
        told = [f"not captured: {reason}" for reason in self.reasons]
        if self._graphs is not None:
            report = self._graphs.report()
            told.append(f"{report.replayed} calls replayed from {len(report.captures)} CUDA graphs")
            told += [f"{count} calls without a graph: {why}" for why, count in report.without.items()]
        return "; ".join(told) or "no call has come twice yet"
