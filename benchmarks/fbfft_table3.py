"""fbfft Table 3: all convolutions of AlexNet and of OverFeat fast, batch 128: fprop, bprop, accGrad.

Vasilache et al. 2014, Table 3. Sums over a network's convolutions, each timed by itself: torch in the better of its
two layouts, against the plan for contiguous tensors; a pass that is left to torch counts as torch's time on both sides.
As in the paper the first layer's input gradient is counted too, which training does not need. Each pass has its own
row, and each network their total.
"""

from __future__ import annotations

from typing import Any

from harness.layer_pass import LayerPass, timed, total
from harness.layers import ALEXNET, OVERFEAT_FAST, PASSES, Layer, by_name
from harness.picture import Figure, paired_bars
from harness.result import Result, Row
from harness.settings import Settings

DEFAULTS = {"networks": "", "layers": "", "batch": "128", "precision": "ieee", "rigor": "measure"}
QUICK = {"networks": "AlexNet", "layers": "conv3,conv5", "batch": "1", "rigor": "estimate"}
NETWORKS = {"AlexNet": ALEXNET, "OverFeat fast": OVERFEAT_FAST}


def run(settings: Settings) -> Result:
    """Four rows a network."""
    rows: list[Row] = []
    for network in settings.chosen("networks", {name: name for name in NETWORKS}):
        layers = settings.chosen("layers", by_name(NETWORKS[network]))
        passes = _passes(settings, network, layers)
        every: list[LayerPass] = []
        for name, found in passes.items():
            every += found
            rows.append(total(name, network, found, {}))
            settings.say(f"  {network} {name}: {rows[-1].ratio:.2f}x")
        rows.append(total("total", network, every, {}))
        settings.say(f"  {network} total: {rows[-1].ratio:.2f}x")
    return Result(rows)


def _passes(settings: Settings, network: str, layers: list[Layer]) -> dict[str, list[LayerPass]]:
    """Every layer's time, by pass."""
    problems = {
        (layer.name, name): layer.problem(
            pass_, settings.device, batch=settings.integer("batch"), precision=settings.text("precision")
        )
        for name, pass_ in PASSES.items()
        for layer in layers
    }
    settings.say(f"planning {network}: {len(problems)} layer-passes")
    plans = settings.planner().plan_many(list(problems.values()), settings.planning())
    found: dict[str, list[LayerPass]] = {name: [] for name in PASSES}
    for (layer_name, name), problem in problems.items():
        found[name].append(timed(f"{layer_name} {name}", problem, plans[problem]))
    return found


def draw(document: dict[str, Any]) -> Figure:
    """Torch and tilewise beside each other."""
    return paired_bars(document)
