"""Whole networks on a CPU beside ONNX Runtime, OpenVINO and torch.compile, all with frozen weights and in fp32.

Every side computes the same network on the same input, with as many threads as torch has: torch eager in both layouts,
``torch.compile`` with freezing (by default and with max-autotune), ONNX Runtime with all of its graph rewrites,
OpenVINO set to latency and to fp32, the network planned with ``training=False``, and the planned network compiled.
Each network has a process of its own, in which the sides take turns. Outputs are compared with float64's. ``cases``
are ``network@batch@mode@dtype``; with the mode ``train`` a case is a whole training step, compiled on both sides. What
an earlier run left in the result's file is kept, with the commit that it was measured at.

The peers are an extra: ``pip install '.[cpu,peers]'`` in the clone. One that is missing is said, and the others are
measured.
"""

from __future__ import annotations

from harness.peer_table import cases_of, measured
from harness.result import Result
from harness.settings import NothingToMeasure, Settings

DEFAULTS = {
    "cases": "",
    "sides": "",
    "layout": "contiguous",
    "rigor": "measure",
    "rounds": "15",
    "round_ms": "150",
    "network_s": "1800",
    "seconds": "0",
}
QUICK = {
    "cases": "photonet@1@infer@fp32",
    "sides": "torch,torch channels_last,planned",
    "rigor": "estimate",
    "rounds": "1",
    "round_ms": "1",
}
WITH_BARS: dict[str, float | None] = {
    "torchvision:resnet18@1@infer@fp32": 1.15,
    "torchvision:resnet18@16@infer@fp32": 1.4,
    "torchvision:resnet50@1@infer@fp32": 1.1,
    "torchvision:resnet50@8@infer@fp32": 1.2,
    "torchvision:mobilenet_v3_large@1@infer@fp32": 1.0,
    "torchvision:mobilenet_v3_large@16@infer@fp32": 1.05,
    "torchvision:vgg16@1@infer@fp32": 1.5,
    "torchvision:convnext_tiny@1@infer@fp32": 1.1,
    "torchvision:efficientnet_b0@1@infer@fp32": 1.0,
}
TIMM = (
    "timm:mobilenetv2_100",
    "timm:regnety_016",
    "timm:densenet121",
    "timm:resnext50_32x4d",
    "timm:cspdarknet53",
    "timm:mobilenetv4_conv_small",
)
"""Named before any of them was measured: inverted residuals, grouped layers with squeeze-and-excite, concatenation,
cardinality, leaky activations, and a network made for phones."""
TRAINING: dict[str, float | None] = {
    "torchvision:resnet18@8@train@fp32": 1.4,
    "torchvision:resnet50@8@train@fp32": 1.12,
    "torchvision:mobilenet_v3_large@8@train@fp32": 1.57,
}
"""Least ratios that were measured before, which must not fall."""
CASES = WITH_BARS | {f"{name}@1@infer@fp32": None for name in TIMM} | TRAINING
SIDES = {
    "infer": ("torch", "torch channels_last", "compile", "compile max-autotune", "onnxruntime", "openvino",
              "planned", "planned compiled"),
    "train": ("torch", "compile", "planned", "planned compiled"),
}  # fmt: skip


def run(settings: Settings) -> Result:
    """Rows of each network. Raises :class:`NothingToMeasure` for a GPU."""
    if settings.device.type != "cpu":
        raise NothingToMeasure(f"device={settings.device}: these peers run on a CPU; peers_gpu has those of a GPU")
    return measured(settings, cases_of(settings, CASES), SIDES)
