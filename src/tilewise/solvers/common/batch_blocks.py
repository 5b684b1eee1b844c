"""Parts of the batch, one after the other: micro-batches (Oyama et al. 2018, mu-cuDNN, section III-B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tilewise.solvers.base import NOTHING_KEPT_OUT, Cost, Split

__all__ = ["BatchBlocks"]


class BatchBlocks(Split):
    """Divides the images of a batch, which do not depend on each other, so that a solver keeps a memory limit.

    It is for kinds of problems whose field ``batch`` is their axis ``batch``, and that share nothing among images.
    """

    axis, level = "batch", 2

    def unsupported(self, p: Any) -> list[str]:
        """A reason where the batch is 1."""
        return [] if p.batch > 1 else ["a batch of 1 cannot be divided"]

    def idle(self, p: Any) -> str:
        """A reason: without a limit parts gain nothing."""
        return NOTHING_KEPT_OUT

    def sizes(self, p: Any, policy: str) -> Sequence[int]:
        """Powers of two below the batch, largest first."""
        if policy == "undivided":
            return ()
        return [2**n for n in range((p.batch - 1).bit_length() - 1, -1, -1)]

    def child(self, p: Any, size: int) -> Any:
        """The problem of ``size`` images."""
        return replace(p, batch=size)

    def cost(self, p: Any, c: Any) -> Cost:
        """Nothing beside the cost of its parts."""
        return Cost(0, 0, kernels=0)
