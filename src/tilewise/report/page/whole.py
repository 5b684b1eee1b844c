"""The step at one look: a bar of torch's and one of the planned one, and what of each are planned layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewise.report.page.contents import Report, Training
from tilewise.report.page.html import Child, Markup, render
from tilewise.report.page.svg import key, rect, svg
from tilewise.report.page.words import BUSY, count, format_ratio, milliseconds

__all__ = ["interval", "whole_step"]


@dataclass(frozen=True, slots=True)
class Bar:
    """One side of the picture: a whole ``step_ms``, ``planned_ms`` of it in layers that can be planned, both in ms.

    ``layers`` says what these are. ``step_ms`` is ``None`` where whole steps were not timed, ``host_ms`` where the
    host's time is not known.
    """

    name: str
    kind: str
    layers: str
    layers_ms: float | None
    step_ms: float | None
    host_ms: float | None

    @property
    def fits(self) -> bool:
        """Whether the layers take no longer than the step that they are part of."""
        return self.step_ms is None or self.layers_ms is None or self.layers_ms <= self.step_ms

    @property
    def longest(self) -> float:
        """The longest of its times."""
        own = self.layers_ms if self.step_ms is None else self.step_ms
        return max(own or 0.0, self.host_ms or 0.0)

    @property
    def text(self) -> str:
        """Its times in words, but for the whole."""
        words = []
        if self.step_ms is not None and self.layers_ms is not None:
            share = f" ({self.layers_ms / self.step_ms:.0%})" if self.step_ms else ""
            words.append(f"{self.layers} {milliseconds(self.layers_ms)}{share}")
            words.append(f"the rest {milliseconds(self.step_ms - self.layers_ms)}")
        if self.host_ms is not None:
            words.append(f"the host launches it in {milliseconds(self.host_ms)}")
        return ", ".join(words)

    def drawn(self, scale: float) -> Markup:
        """The bar, where ``scale`` ms are all of the width."""
        whole = self.layers_ms if self.step_ms is None else self.step_ms
        shapes: list[Child] = []
        if self.step_ms is not None:
            kind = "ot" if self.layers_ms is not None else self.kind
            shapes.append(rect(0, self.step_ms / scale, 1, 24, kind, f"step {milliseconds(self.step_ms)}"))
        if self.layers_ms is not None:
            title = f"{self.layers} {milliseconds(self.layers_ms)}"
            shapes.append(rect(0, self.layers_ms / scale, 1, 24, self.kind, title))
        if self.host_ms is not None:
            shapes.append(rect(0, self.host_ms / scale, 28, 5, "ho", f"host {milliseconds(self.host_ms)}"))
        words = f"{self.name}: {milliseconds(whole)}" + (f", {self.text}" if self.text else "")
        return svg(words, shapes, height=26 if self.host_ms is None else 34)


def whole_step(report: Report) -> Markup | None:
    """The bars of both sides on one scale; of a plan alone its own. ``None`` where there are no times."""
    bars = _bars(report)
    beyond = _notes(bars)
    if beyond:  # Then neither is divided: one that is and one that is not could not be compared.
        bars = [replace(bar, layers_ms=None) for bar in bars]
    scale = max((bar.longest for bar in bars), default=0.0)
    if not scale:
        return None
    training = report.training
    steps = any(bar.step_ms is not None for bar in bars)
    legend = [key(bar.kind, f"{bar.layers if bar.layers_ms is not None else 'step'}, {bar.name}") for bar in bars]
    legend += [key("ot", "the rest of the step")] if steps and not beyond else []
    legend += [key("ho", "launches by the host")] if any(bar.host_ms is not None for bar in bars) else []
    return render(
        "whole.html",
        title=_title(report, bars, steps),
        doubt=_doubt(report, steps),
        bars=[
            {
                "name": bar.name,
                "ms": milliseconds(bar.layers_ms if bar.step_ms is None else bar.step_ms),
                "drawing": bar.drawn(scale),
                "text": bar.text,
            }
            for bar in bars
        ],
        legend=legend,
        notes=[*_busy(report), *beyond, *(_compared_notes(training) if training is not None else [])],
    )


def _bars(report: Report) -> list[Bar]:
    """One bar for each side that has a time."""
    training, layers = report.training, report.convolutions
    if not report.compared and training is None:
        times = [part.all_ms for part in report.parts if part.time_ms is not None]
        return [Bar("plan", "pl", layers, sum(times), None, None)] if times else []
    counted = [part for part in report.parts if part.framework_ms is not None and part.ran_ms is not None]
    kept = training is None or training.compared is None or training.compared.kept
    by_torch = sum((part.framework_ms or 0.0) * len(part.names) for part in counted)
    planned = sum(
        ((part.ran_ms if kept and not part.taken_back else part.framework_ms) or 0.0) * len(part.names)
        for part in counted
    )
    steps: tuple[float | None, float | None] = (None, None)
    hosts: tuple[float | None, float | None] = (None, None)
    if training is not None:
        steps = (training.framework.step_ms, training.planned.step_ms)
    if report.on_gpu:
        totals = report.totals
        if training is not None and training.compared is not None:
            hosts = training.compared.host
        elif training is None and totals is not None:
            hosts = (totals.framework_host_ms, totals.planned_host_ms)
    sides = zip(("torch", "planned"), ("fw", "pl"), (by_torch, planned), steps, hosts, strict=True)
    return [
        Bar(name, kind, layers, layers_ms if counted else None, step_ms, host_ms)
        for name, kind, layers_ms, step_ms, host_ms in sides
        if counted or step_ms is not None
    ]


def _title(report: Report, bars: list[Bar], steps: bool) -> str:
    """What the bars say, in a sentence."""
    layers = report.convolutions
    if len(bars) < 2:
        how = "by estimate" if report.rigor == "estimate" else "as timed when planning"
        return f"All {layers}: {milliseconds(bars[0].layers_ms)}, {how}"
    first, second = ((bar.step_ms if steps else bar.layers_ms) for bar in bars)
    ratio = first / second if first is not None and second else None
    what = "A training step" if steps else f"All {layers}, each timed by itself"
    if report.busy and not report.doubtful and not steps:
        what += f" {BUSY}"
    if ratio is None:
        return f"{what}: {milliseconds(first)} by torch, {milliseconds(second)} as planned"
    times = f"{milliseconds(first)} by torch, {milliseconds(second)} as planned"
    if steps and _unsure(report.training):
        return f"{what}: {times}; no difference beyond noise"
    return f"{what}: {times}, {format_ratio(ratio)}"


def _unsure(training: Training | None) -> bool:
    """Whether the interval of the speed-up holds 1, so that neither side is surely faster."""
    compared = training.compared if training is not None else None
    if compared is None or compared.least is None or compared.most is None:
        return False
    return compared.least <= 1 <= compared.most


def interval(training: Training) -> str:
    """The speed-up of whole steps with its 95 % interval; empty where steps were not compared."""
    compared = training.compared
    if compared is None or compared.speedup is None:
        return ""
    ends = (
        f" (95 % between {compared.least:.2f} and {compared.most:.2f})"
        if compared.least is not None and compared.most is not None
        else ""
    )
    pairs = f" over {count(compared.pairs, 'pair')} of steps" if compared.pairs else ""
    return f"{format_ratio(compared.speedup)}{ends}{pairs}"


def _doubt(report: Report, steps: bool) -> str:
    """A word on the title where most times are doubtful; empty where they are not."""
    if not report.doubtful:
        return ""
    what = "its layers' times" if steps else "these times"
    return f"Doubtful: other processes kept the host busy while most of {what} were taken."


def _busy(report: Report) -> list[str]:
    """That times are doubtful, where other processes kept the host busy."""
    if not report.busy:
        return []
    passes = sum(len(part.names) for part in report.parts)
    words = f"{BUSY}: {report.busy} of {count(passes, 'layer-pass', 'layer-passes')} were timed while other processes "
    return [f"{words}kept the host busy. These times are doubtful, and so are their sums."]


def _notes(bars: list[Bar]) -> list[str]:
    """What must be said of times that do not add up."""
    beyond = [
        f"{bar.name} {milliseconds(bar.layers_ms)} of {milliseconds(bar.step_ms)}" for bar in bars if not bar.fits
    ]
    if not beyond:
        return []
    return [
        f"Timed by themselves, the {bars[0].layers} take longer than the whole step ({'; '.join(beyond)}). In a step "
        "they find other things in the caches. So the bars are not divided."
    ]


def _compared_notes(training: Training) -> list[str]:
    """What the comparison of whole steps says beside their times."""
    compared, notes = training.compared, []
    if compared is None:
        return []
    if compared.reason:
        return [f"Steps were not compared when passes were chosen: {compared.reason}."]
    if text := interval(training):
        notes.append(f"When passes were chosen, the step was {text}.")
    if not compared.kept:
        notes.append("That was not surely faster, so torch's own step stays.")
    ratio, ends = training.ratio, (compared.least, compared.most)
    if ratio is not None and ends[0] is not None and ends[1] is not None and not ends[0] <= ratio <= ends[1]:
        notes.append(
            f"Timed again, it is {format_ratio(ratio)}: outside of that interval, so steps vary more than it says."
        )
    return notes
