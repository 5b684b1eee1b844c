"""Whole networks on a GPU beside torch.compile in each of its modes: inference, and training steps.

The sides of a case: torch eager in both layouts, ``torch.compile`` by default, with ``reduce-overhead`` and with
``max-autotune`` (both with CUDA graphs, in inference also with weights frozen), the planned network eager and from
CUDA graphs, and the planned network compiled in the same modes. ``bf16`` is the type of the weights in inference and
autocast in training steps. Several runs are queued before each look at the clock, so that the host's time counts only
where the device waits for it.
``cases``, processes, turns and errors are those of ``peers_cpu``.
"""

from __future__ import annotations

from harness.peer_table import cases_of, measured
from harness.result import Result
from harness.settings import NothingToMeasure, Settings

DEFAULTS = {
    "cases": "",
    "sides": "",
    "layout": "channels_last",
    "rigor": "measure",
    "rounds": "15",
    "round_ms": "200",
    "network_s": "1800",
    "seconds": "0",
}
QUICK = {
    "cases": "photonet@2@infer@fp32",
    "sides": "torch,planned",
    "rigor": "estimate",
    "rounds": "1",
    "round_ms": "1",
}
CASES: dict[str, float | None] = {
    f"torchvision:{network}@{batch}@{mode}@bf16": least
    for network in ("resnet50", "convnext_tiny")
    for batch, mode, least in ((32, "infer", 1.0), (1, "infer", 1.0), (128, "train", 1.05))
}
TRAINED = (
    "torch", "torch channels_last", "compile", "compile reduce-overhead", "compile max-autotune", "planned",
    "planned graphs", "planned compiled", "planned compiled reduce-overhead", "planned compiled max-autotune",
)  # fmt: skip
SIDES = {
    "infer": (*TRAINED, "compile reduce-overhead frozen", "compile max-autotune frozen"),
    "train": TRAINED,
}


def run(settings: Settings) -> Result:
    """Rows of each network. Raises :class:`NothingToMeasure` on a CPU."""
    if settings.device.type != "cuda":
        raise NothingToMeasure(f"device={settings.device}: CUDA graphs are a GPU's; peers_cpu has the peers of a CPU")
    return measured(settings, cases_of(settings, CASES), SIDES)
