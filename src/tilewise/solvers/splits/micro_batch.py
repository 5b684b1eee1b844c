"""Micro-batches under a workspace limit (Oyama et al. 2018, mu-cuDNN, section III-B: WR)."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.base import NOTHING_KEPT_OUT, Cost
from tilewise.solvers.common.costs import cache_bytes
from tilewise.solvers.conv import ConvSplit
from tilewise.solvers.splits._batch import batch_part


class MicroBatch(ConvSplit):
    """Divides the mini-batch into micro-batches.

    WGRAD adds its micro-batches in order, so that the sum has the same bits every time.
    """

    name, version = "micro_batch", 1
    axis, level = "batch", 2

    def unsupported(self, p: ConvProblem) -> list[str]:
        """A reason where the batch is 1."""
        return [] if p.batch > 1 else ["a batch of 1 cannot be divided"]

    def idle(self, p: ConvProblem) -> str:
        """A reason on a GPU whose cache holds all that the whole batch touches: parts can then gain nothing from it."""
        if p.device_type != "cuda" or p.bytes > cache_bytes("cuda"):
            return ""
        return f"{NOTHING_KEPT_OUT}, and the whole batch fits in the GPU's cache"

    def sizes(self, p: ConvProblem, policy: str) -> Sequence[int]:
        """Powers of two below the batch (Oyama et al. 2018, III-D), largest first."""
        if policy == "undivided":
            return ()
        return [2**n for n in range((p.batch - 1).bit_length() - 1, -1, -1)]

    def between(self, p: ConvProblem, policy: str) -> Sequence[int]:
        """Every other size, under the policy ``all``."""
        return [n for n in range(p.batch - 1, 0, -1) if n & (n - 1)] if policy == "all" else ()

    def child(self, p: ConvProblem, size: int) -> ConvProblem:
        """The problem of ``size`` images that start at any multiple of the largest power of two in ``size``.

        The planner orders the sizes of a division so that all parts start so.
        """
        return batch_part(p, size, size)

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Nothing beside the cost of its parts."""
        return Cost(0, 0, kernels=0)
