"""What halos add to a part of a convolution: fused kernels, by their blocks, against the small problems by torch.

A 3x3 convolution of (32, 64, H, H) on four ranks, of which this GPU computes what one in the middle gets from its two
neighbours: what their rows add to its results, the gradients that go home to them, and what they add to the filter's
gradient. Each row is one of the three; ours is the fastest blocks', the others are in ``details``. Values are the GPU's
time alone. Nothing travels.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from harness import queued
from harness.result import Result, Row, Side
from harness.settings import NothingToMeasure, Settings
from harness.sides import SEED, Call

from tilewise.distributed.parts.exchange import shape_of
from tilewise.distributed.parts.layout import Grid, Layout, even_cuts
from tilewise.distributed.passes.contracts import Terms
from tilewise.distributed.passes.halo_kernels import BLOCKS, Blocks, HaloTerms, Kernels, nearest
from tilewise.distributed.passes.share import Share, share_of
from tilewise.distributed.passes.terms import LoopedTerms
from tilewise.distributed.passes.torch_passes import TorchPasses
from tilewise.kernels.building.ahead import side_by_side
from tilewise.machine.torch_state import framework_flags
from tilewise.problems.conv.axis import Axis

DEFAULTS = {"sizes": "128,256,512", "precisions": "ieee,tf32", "batch": "32", "channels": "64", "budget_ms": "15"}
QUICK = {"sizes": "16", "batch": "1", "channels": "16", "budget_ms": "5"}
RANKS = 4
LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
STEPS = ("results", "the filter's gradient", "gradients home")
LIMITS = {"ieee": 5e-6, "tf32": 2e-3}
"""Relative L2 error beside torch's float64."""


class Halos:
    """Operands of a middle rank: results, their gradient, filter and the neighbours' rows."""

    def __init__(self, size: int, batch: int, channels: int, form: torch.memory_format, device: torch.device) -> None:
        axes = (Axis(size, 3, before=1, after=1),) * 2
        layout = Layout(Grid((-2,), (RANKS,), (1,)), (even_cuts(size, RANKS),))
        self.share: Share = share_of(layout, axes, False, "halos")
        generator = torch.Generator(device).manual_seed(SEED)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).contiguous(memory_format=form)

        self.y, self.dy = (drawn(batch, channels, *self.share.sizes) for _ in range(2))
        self.w = drawn(channels, channels, 3, 3)
        shapes = [shape_of(self.y, self.share.out.grid.dims, box) for _, box in self.share.transfer.receives]
        self.boxes = [nearest(drawn(*shape), 1) for shape in shapes]

    def steps(self, terms: Terms, into: torch.Tensor, dw: torch.Tensor) -> list[Call]:
        """The three passes, in the order of ``STEPS``; filters are packed within."""
        w, boxes = self.w, self.boxes
        return [
            lambda: terms.add(into, terms.results(boxes, w), terms.filters(w, back=False)),
            lambda: terms.add_sums(dw, terms.sums(boxes, w, self.dy)),
            lambda: terms.home(self.dy, terms.filters(w, back=True), boxes),
        ]

    def errors(self, several: Sequence[Terms]) -> list[list[float]]:
        """Of each the relative L2 errors of the three passes against torch in float64."""
        exact = self._computed(self.looped(), torch.float64)
        found = [self._computed(terms, torch.float32) for terms in several]
        return [[float((a.double() - b).norm() / b.norm()) for a, b in zip(f, exact, strict=True)] for f in found]

    def looped(self) -> LoopedTerms:
        """The small problems one by one, by torch."""
        return LoopedTerms(TorchPasses(), self.share, 1)

    def _computed(self, terms: Terms, dtype: torch.dtype) -> list[torch.Tensor]:
        dy, w, boxes = self.dy.to(dtype), self.w.to(dtype), [box.to(dtype) for box in self.boxes]
        y, dw = torch.zeros_like(dy), torch.zeros_like(w)
        terms.add(y, terms.results(boxes, w), terms.filters(w, back=False))
        terms.add_sums(dw, terms.sums(boxes, w, dy))
        return [y, dw, torch.cat([t.flatten() for t in terms.home(dy, terms.filters(w, back=True), boxes)])]


def run(settings: Settings) -> Result:
    """One row a size, layout, precision and pass."""
    if settings.device.type != "cuda":
        raise NothingToMeasure("halos' fused kernels run on a GPU only")
    rows: list[Row] = []
    for size in settings.integers("sizes"):
        for name, form in LAYOUTS.items():
            halos = Halos(size, settings.integer("batch"), settings.integer("channels"), form, settings.device)
            for precision in settings.chosen("precisions", {name: name for name in LIMITS}):
                rows += measured(f"{size} {name}", halos, precision, float(settings.integer("budget_ms")))
                settings.say("  " + ", ".join(f"{r.name} {r.group}: {r.ratio:.2f}x" for r in rows[-len(STEPS) :]))
                settings.keep(Result(rows))
    return Result(rows)


def measured(name: str, halos: Halos, precision: str, budget_ms: float) -> list[Row]:
    """Every block's three passes and torch's, in turns. Raises ``RuntimeError`` for results that are wrong."""
    device = halos.y.device
    fused = [HaloTerms(halos.share, precision, Kernels.alike(blocks)) for blocks in BLOCKS]
    into, dw = torch.zeros_like(halos.y), torch.zeros_like(halos.w)
    calls = [halos.steps(terms, into, dw) for terms in fused]
    if device.type == "cuda":
        side_by_side([call for steps in calls for call in steps], device)
        torch.cuda.synchronize(device)
    errors = halos.errors(fused)
    if (worst := max(max(each) for each in errors)) > LIMITS[precision]:
        raise RuntimeError(f"{name} {precision}: relative error {worst:.1e} above {LIMITS[precision]:.1e}")
    with framework_flags(device.type, precision, deterministic=False):
        times = _times([*calls, halos.steps(halos.looped(), into, dw)], device, budget_ms)
    *ours, by_torch = times
    return [
        _row(name, f"{precision} {step}", by_torch[n], [each[n] for each in ours], max(each[n] for each in errors))
        for n, step in enumerate(STEPS)
    ]


def _times(calls: Sequence[list[Call]], device: torch.device, budget_ms: float) -> list[list[float]]:
    """Median milliseconds of each pass."""
    flat = [call for steps in calls for call in steps]
    took = queued.rounds(flat, device, budget_ms=budget_ms, least=5, most=15)
    medians = [statistics.median(each.device_ms for each in times) for times in took]
    return [medians[n : n + len(STEPS)] for n in range(0, len(medians), len(STEPS))]


def _row(name: str, group: str, by_torch: float, ours: list[float], error: float) -> Row:
    best = min(range(len(ours)), key=ours.__getitem__)
    details: dict[str, Any] = {"blocks": {_text(blocks): ms for blocks, ms in zip(BLOCKS, ours, strict=True)}}
    return Row(
        name, group, Side("torch, one by one", by_torch), Side(_text(BLOCKS[best]), ours[best]),
        details={**details, "error": error},
    )  # fmt: skip


def _text(blocks: Blocks) -> str:
    return f"{blocks.rows}x{blocks.columns}x{blocks.depth}, {blocks.sum_rows} rows a sum, {blocks.warps} warps"
