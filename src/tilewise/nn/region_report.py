"""What became of the parts of a model that may run as regions: their times, their steps, or why there are none."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tilewise.nn.step.result import ratio_in_words

__all__ = ["RegionLine", "RegionReport"]


@dataclass(frozen=True)
class RegionLine:
    """A fused layer or an operator of a region: what runs it, the layout that it gives, and its milliseconds.

    >>> line = tilewise.nn.RegionLine("conv1", "winograd_last", "channels_last", 0.25)
    >>> f"{line.name} runs by {line.runs} in {line.ms} ms"
    'conv1 runs by winograd_last in 0.25 ms'
    """

    name: str
    runs: str
    layout: str
    ms: float


@dataclass(frozen=True)
class RegionReport:
    """A module that was planned as a region for inference, or the ``reason`` why it is not one.

    ``name`` is empty for the whole model. Where it was measured, for an ``input`` in words: ``torch_ms`` and
    ``planned_ms`` are medians in milliseconds of ``pairs`` forwards by torch and by plan in turns, ``speedup`` the
    median of the pairs' ratios with the ends ``least`` and ``most`` of its 95 % interval, ``error`` and ``torch_error``
    the relative L2 distances from float64. ``fused`` counts the operators that vanished into others, ``conversions``
    those between layouts, and ``bytes`` is what the region keeps: its constants, and memory for intermediate tensors.
    ``why_not_native`` says why its steps are called from Python, and is empty where they are not. ``lines`` has its
    parts in the order in which they run.

    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
    >>> model = tilewise.optimize(model, torch.randn(1, 3, 16, 16), training=False, rigor="estimate")
    >>> [type(region).__name__ for region in tilewise.nn.report(model).regions]
    ['RegionReport']
    """

    name: str
    kind: str
    kept: bool = False
    reason: str = ""
    input: str = ""
    torch_ms: float | None = None
    planned_ms: float | None = None
    speedup: float | None = None
    least: float | None = None
    most: float | None = None
    pairs: int = 0
    error: float | None = None
    torch_error: float | None = None
    fused: int = 0
    conversions: int = 0
    bytes: int = 0
    why_not_native: str = ""
    lines: tuple[RegionLine, ...] = ()

    def __str__(self) -> str:
        where = f"region {self.name}" if self.name else "region of the whole model"
        if self.speedup is None:
            return f"{where}: none, {self.reason}"
        ratio = ratio_in_words(self.speedup, self.least, self.most)
        times = f"{self.torch_ms:.4g} -> {self.planned_ms:.4g} ms ({ratio})"
        if not self.kept:
            return f"{where}, {self.input}: not kept, {self.reason}; {times}"
        layouts = Counter(line.layout for line in self.lines)
        told = ", ".join(f"{count} {layout}" for layout, count in sorted(layouts.items()))
        return (
            f"{where}, {self.input}: {times}, {_counted(len(self.lines), 'part')} ({told}), "
            f"{_counted(self.fused, 'operator')} fused into others, "
            f"{_counted(self.conversions, 'conversion')} between layouts"
        )


def _counted(count: int, what: str) -> str:
    """A count with its noun.

    >>> _counted(1, "part"), _counted(2, "part")
    ('1 part', '2 parts')
    """
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
