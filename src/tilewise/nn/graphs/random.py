"""Whether a model draws random numbers, and from where."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

__all__ = ["HostNumbers"]


class HostNumbers:
    """The generators that a replay cannot draw from, as they are now: Python's, NumPy's, and torch's on the host.

    ``device`` is the device's own generator, from which replays draw. Generators that are attributes of ``modules``
    count, too.
    """

    def __init__(self, modules: Iterable[nn.Module], device: torch.Generator) -> None:
        self._generators = {"torch's generator of the CPU": torch.default_generator}
        for module in modules:
            for name, value in vars(module).items():
                if isinstance(value, torch.Generator):
                    self._generators[f"the generator {name} of a {type(module).__name__}"] = value
        self._generators = {name: each for name, each in self._generators.items() if each is not device}
        self._before = self._states()

    def drawn(self) -> str:
        """From which of them numbers were drawn since, as text; empty where from none."""
        for (name, before), now in zip(self._before.items(), self._states().values(), strict=True):
            if before != now:
                return name
        return ""

    def _states(self) -> dict[str, object]:
        """Each generator's state, to be compared."""
        states: dict[str, object] = {
            "Python's random": random.getstate(),
            "NumPy's random": repr(np.random.get_state(legacy=False)),
        }
        return states | {name: each.get_state().numpy().tobytes() for name, each in self._generators.items()}
