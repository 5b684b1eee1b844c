"""Pictures of advice. matplotlib comes with the extra ``report`` and is loaded when something is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.advice import Advice, Point
from tilewise.machine.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_advice"]


def draw_advice(advice: Advice, head: dict[str, Any], path: str) -> None:
    """Draw TFLOP/s against the mini-batch into the file ``path``, whose ending says of what kind it is.

    A curve for each operation (the pass of a layer, or how a product's operands are stored), a panel for each layer
    that was measured with several mini-batches: the asked one, the best and the fastest. Dashed is torch's own choice.
    The figure is that of Elsen, "Optimizing RNN performance", section 6. Raises ``OSError`` where it cannot be written.
    """
    from matplotlib.figure import Figure

    curves = [curve for curve in advice.curves() if curve]
    figure = Figure(figsize=(6 * max(1, len(curves)), 4.4), layout="constrained")
    panels = figure.subplots(1, max(1, len(curves)), squeeze=False, sharey=True)[0]
    for panel, curve in zip(panels, curves, strict=False):
        _draw(panel, advice, curve)
    figure.suptitle(f"{head['target']}\n{head['device']}, {head['options']['dtype']}", fontsize="medium")
    with replacing(path, ending=Path(path).suffix) as partial:
        figure.savefig(partial, dpi=120, metadata={"Date": None} if path.endswith(".svg") else None)


def _draw(panel: Axes, advice: Advice, curve: list[Point]) -> None:
    """Draw the points of one layer."""
    place = advice.sweep.batch_place
    for index, part in enumerate(curve[0].parts):
        colour, name = f"C{index}", part.problem.task
        times = [(point.samples, point.parts[index]) for point in curve]
        planned = [(samples, part.rate) for samples, part in times if part.rate is not None]
        panel.plot(*zip(*planned, strict=True), marker="o", color=colour, label=name)
        by_torch = [(samples, part.torch_rate) for samples, part in times if part.torch_rate is not None]
        if by_torch:
            panel.plot(*zip(*by_torch, strict=True), linestyle="--", color=colour, label=f"{name}, torch's own")
    if advice.asked.sizes in (point.sizes for point in curve):
        panel.axvline(advice.asked.samples, color="grey", linewidth=0.8, label="asked")
    rest = {name: size for name, size in advice.sweep.named(curve[0].sizes).items() if name != advice.sweep.batch}
    panel.set(title=", ".join(f"{name} {size}" for name, size in rest.items()))
    panel.set(xlabel=advice.sweep.axes[place].name, ylabel="TFLOP/s")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize="small")
