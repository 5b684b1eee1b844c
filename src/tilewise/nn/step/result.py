"""What became of a model's whole step: its times by torch and by plans, and the passes that were taken back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

__all__ = ["StepReport"]


@dataclass(frozen=True)
class StepReport:
    """A step's times in milliseconds, medians of ``pairs`` runs of torch's step and the planned one in turns.

    ``speedup`` is torch's time over the planned one, with the ends of its 95 % interval ``least`` and ``most``. Where
    ``kept`` is false the planned step was not surely faster, and the model computes as torch does. On a GPU
    ``torch_host_ms`` and ``planned_host_ms`` are what the host needs to launch the step, ``torch_device_ms`` and
    ``planned_device_ms`` what the GPU takes with launches hidden. ``predicted_ms`` is the sum of what the passes that
    run by plan gain by their own measurements. ``modelled_torch_ms`` and ``modelled_planned_ms`` are what both steps
    should take by a model of host and device, ``None`` where there is none. ``taken_back`` is the number of problems
    that have a faster plan which the step does not gain from. ``reason`` says why nothing was compared; it is empty
    where the step was. While ``pending``, the comparison is still to come or under way, and ``reason`` says how far
    it is. ``way`` names the way in which the planned step ran: ``"eager"``, ``"compiled"`` by ``torch.compile``, or
    ``"graph"``, replayed from CUDA graphs; it is ``None`` where nothing was compared. Of several ``ranks`` the slowest
    counts in every time.

    >>> print(StepReport(reason="still to be compared: 12 of 20 pairs", pending=True))
    step: still to be compared: 12 of 20 pairs
    """

    torch_ms: float | None = None
    planned_ms: float | None = None
    speedup: float | None = None
    least: float | None = None
    most: float | None = None
    pairs: int = 0
    torch_host_ms: float | None = None
    planned_host_ms: float | None = None
    torch_device_ms: float | None = None
    planned_device_ms: float | None = None
    predicted_ms: float | None = None
    modelled_torch_ms: float | None = None
    modelled_planned_ms: float | None = None
    taken_back: int = 0
    kept: bool = True
    reason: str = ""
    pending: bool = False
    way: str | None = None
    ranks: int = 1

    def to_json(self) -> dict[str, Any]:
        """The fields by name: plain JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        if self.pending:
            return f"step: {self.reason}"
        if self.reason:
            return f"step: not compared, {self.reason}"
        assert self.torch_ms is not None
        assert self.planned_ms is not None
        ratio = f"{self.speedup:.2f}x, 95 % between {self.least:.2f} and {self.most:.2f}"
        name = "step" if self.way in (None, "eager") else f"step ({self.way})"
        name += f" of {self.ranks} ranks" if self.ranks > 1 else ""
        back = f"; {self.taken_back} taken back" if self.taken_back else ""
        model = ""
        if self.modelled_torch_ms is not None and self.modelled_planned_ms is not None:
            model = f"; modelled {self.modelled_torch_ms:.4g} -> {self.modelled_planned_ms:.4g} ms"
        if not self.kept:
            lost = f"plans are not surely faster ({ratio}{model}): torch's stays"
            return f"{name}: {self.torch_ms:.4g} ms by torch, {lost}"
        return f"{name}: {self.torch_ms:.4g} -> {self.planned_ms:.4g} ms ({ratio}{back}{model})"
