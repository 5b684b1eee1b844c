"""torchvision where its compiled operators cannot be loaded: the package index has them for CUDA alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

__all__ = ["declare_detection_operators"]

_declared = torch.library.Library("torchvision", "FRAGMENT")


def declare_detection_operators() -> None:
    """Let torchvision be imported, which other libraries do as well.

    torchvision registers what two of its operators return, which fails where they are not declared. Classifiers and
    tutorials call none of them.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        torch.ops.load_library(Path(found.origin).parent / "_C.so")
    except OSError:
        for name in ("nms", "qnms"):
            _declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
