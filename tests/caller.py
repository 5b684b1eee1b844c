"""The defaults of a program that uses the library: a default type, and a device where tensors are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["DEFAULTS", "OTHER", "caller"]

Defaults = tuple[torch.dtype, str]
DEFAULTS: dict[str, Defaults] = {
    "float64": (torch.float64, "cpu"),
    "bfloat16": (torch.bfloat16, "cpu"),
    "float16": (torch.float16, "cpu"),
    "meta": (torch.float32, "meta"),
}
"""One thing that is not as usual, by its name."""
OTHER: Defaults = (torch.float64, "meta")
"""Nothing as usual. A tensor on ``meta`` has no memory: nothing can be computed with one by mistake."""


@contextmanager
def caller(defaults: Defaults) -> Iterator[None]:
    """Run with these defaults, and put torch's own back."""
    before = torch.get_default_dtype()
    dtype, device = defaults
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
