"""What became of a model's whole step: its times by torch and by plans, and the passes that were taken back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

__all__ = ["StepReport", "ratio_in_words"]


def ratio_in_words(speedup: float | None, least: float | None, most: float | None) -> str:
    """A speed-up with its 95 % interval, for a line that has the times of both sides as well.

    It is the median of the pairs' ratios. The times are medians of each side, so that their ratio may be another one.

    >>> ratio_in_words(1.25, 1.2, 1.3)
    '1.25x in the median pair, 95 % between 1.20 and 1.30'
    """
    return f"{speedup:.2f}x in the median pair, 95 % between {least:.2f} and {most:.2f}"


@dataclass(frozen=True)
class StepReport:
    """A step's times in milliseconds, medians of ``pairs`` runs of torch's step and the planned one in turns.

    ``speedup`` is the median of torch's time over the planned one, pair by pair, with the ends of its 95 % interval
    ``least`` and ``most``. Where ``kept`` is false the planned step was not surely faster, and the model computes as
    torch does. On a GPU
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

    def detail(self) -> str:
        """What a model of host and device expects of both steps, for a line below the times; empty without one.

        >>> StepReport(modelled_torch_ms=20.0, modelled_planned_ms=16.0).detail()
        'a model of host and device expects 20 -> 16 ms'
        """
        if self.modelled_torch_ms is None or self.modelled_planned_ms is None:
            return ""
        return f"a model of host and device expects {self.modelled_torch_ms:.4g} -> {self.modelled_planned_ms:.4g} ms"

    def __str__(self) -> str:
        if self.pending:
            return f"step: {self.reason}"
        if self.reason:
            return f"step: not compared, {self.reason}"
        assert self.torch_ms is not None
        assert self.planned_ms is not None
        ratio = ratio_in_words(self.speedup, self.least, self.most)
        name = "step" if self.way in (None, "eager") else f"step ({self.way})"
        name += f" of {self.ranks} ranks" if self.ranks > 1 else ""
        back = f"; {self.taken_back} taken back" if self.taken_back else ""
        if not self.kept:
            lost = f"plans are not surely faster ({ratio}): torch's stays"
            return f"{name}: {self.torch_ms:.4g} ms by torch, {lost}"
        return f"{name}: {self.torch_ms:.4g} -> {self.planned_ms:.4g} ms ({ratio}{back})"
