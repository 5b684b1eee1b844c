"""Parts of the batch, one after the other: micro-batches (Oyama et al. 2018, mu-cuDNN, section III-B)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tilewise.plan import Config
from tilewise.problems.lrn.problem import LrnProblem
from tilewise.solvers.base import NOTHING_KEPT_OUT, Cost, Split
from tilewise.solvers.lrn._lrn import LrnSolver


class ImageBlocks(LrnSolver, Split):
    """Divides the images of a batch, which do not depend on each other.

    It keeps torch's function, which holds several tensors of the input's size, within a memory limit.
    """

    name, version = "image_blocks", 1
    axis, level = "batch", 2

    def unsupported(self, p: LrnProblem) -> list[str]:
        """A reason where the batch is 1."""
        return [] if p.batch > 1 else ["a batch of 1 cannot be divided"]

    def idle(self, p: LrnProblem) -> str:
        """A reason: without a limit parts gain nothing."""
        return NOTHING_KEPT_OUT

    def sizes(self, p: LrnProblem, policy: str) -> Sequence[int]:
        """Powers of two below the batch, largest first."""
        if policy == "undivided":
            return ()
        return [2**n for n in range((p.batch - 1).bit_length() - 1, -1, -1)]

    def child(self, p: LrnProblem, size: int) -> LrnProblem:
        """The normalization of ``size`` images."""
        return replace(p, batch=size)

    def configs(self, p: LrnProblem) -> Iterable[Config]:
        """None: the planner composes the sizes of the parts."""
        return ()

    def cost(self, p: LrnProblem, c: Config) -> Cost:
        """Nothing beside the cost of its parts."""
        return Cost(0, 0, kernels=0)
