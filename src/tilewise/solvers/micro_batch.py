"""Micro-batches under a workspace limit (Oyama et al. 2018, mu-cuDNN, section III-B: WR)."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.plan import Config
from tilewise.problem import ConvProblem
from tilewise.solvers._batch import batch_part
from tilewise.solvers.base import Cost, Split


class MicroBatch(Split):
    """Cuts the mini-batch; WGRAD adds its micro-batches up in order, so the sum is the same every time."""

    name, version = "micro_batch", 1
    axis, level = "batch", 2

    def unsupported(self, p: ConvProblem) -> list[str]:
        """A batch of one has no parts."""
        return [] if p.batch > 1 else ["a batch of 1 cannot be divided"]

    def sizes(self, p: ConvProblem, policy: str) -> Sequence[int]:
        """Powers of two below the batch (Oyama et al. 2018, III-D), largest first."""
        if policy == "undivided":
            return ()
        return [2**n for n in range((p.batch - 1).bit_length() - 1, -1, -1)]

    def between(self, p: ConvProblem, policy: str) -> Sequence[int]:
        """Every other size, under the policy ``all``."""
        return [n for n in range(p.batch - 1, 0, -1) if n & (n - 1)] if policy == "all" else ()

    def child(self, p: ConvProblem, size: int) -> ConvProblem:
        """A micro-batch of ``size`` that starts at any multiple of the largest power of two in ``size``.

        The planner orders sizes so that all do.
        """
        return batch_part(p, size, size)

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Its children's; nothing of its own."""
        return Cost(0, 0, kernels=0)
