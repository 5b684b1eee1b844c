"""Let torchvision be imported where its compiled operators cannot be loaded.

PyPI has torchvision's operators for CUDA alone, so beside a CPU build of torch from elsewhere they do not load.
torchvision registers what two of them return as it is imported, which fails where they are not declared. timm, MONAI
and others import torchvision. Nothing that the tests and tools run calls these two, which suppress boxes.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_declared = torch.library.Library("torchvision", "FRAGMENT")
"""Declarations last as long as this object."""


def declare_where_missing() -> bool:
    """Declare the two operators where torchvision is installed and its own cannot be loaded; whether that was so."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return False
    try:
        torch.ops.load_library(Path(found.origin).parent / "_C.so")
    except OSError:
        for name in ("nms", "qnms"):
            _declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return True
    return False
