"""How much of what is drawn or listed runs: a sample, or everything where ``TILEWISE_EVERY_TEST`` is set."""

from __future__ import annotations

import os

__all__ = ["EVERY", "some"]

EVERY = bool(os.environ.get("TILEWISE_EVERY_TEST"))


def some(count: int) -> int:
    """``count`` cases, or a third of them."""
    return count if EVERY else -(-count // 3)
