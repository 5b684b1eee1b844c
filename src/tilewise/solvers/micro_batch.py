"""Micro-batches under a workspace limit (Oyama et al. 2018, mu-cuDNN, section III-B: WR)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tilewise.plan import Config
from tilewise.problem import ALIGNMENT, ROLES, ConvProblem, Pass, dense_strides
from tilewise.solvers.base import Cost, Split


class MicroBatch(Split):
    """Cuts the mini-batch; WGRAD adds its micro-batches up in order, so the sum is the same every time."""

    name, version = "micro_batch", 1
    axis, level = "batch", 2

    def unsupported(self, p: ConvProblem) -> list[str]:
        """A batch of one has no parts."""
        return [] if p.batch > 1 else ["a batch of 1 cannot be divided"]

    def sizes(self, p: ConvProblem, policy: str) -> Sequence[int]:
        """Micro-batch sizes of mu-cuDNN's policies (III-D), largest first, the whole batch left out."""
        if policy == "undivided":
            return ()
        if policy == "all":
            return range(p.batch - 1, 0, -1)
        return [2**n for n in range((p.batch - 1).bit_length() - 1, -1, -1)]

    def child(self, p: ConvProblem, size: int) -> ConvProblem:
        """A micro-batch of ``size`` at any multiple of ``size`` (largest parts come first)."""
        sums = p.pass_ is Pass.WGRAD
        alignment = []
        for role, layout, align in zip(ROLES, p.layouts, p.alignment, strict=True):
            if role != "w" and size < p.batch:
                image = dense_strides(p.shape(role), layout)[0] * p.torch_dtype(role).itemsize
                align = math.gcd(align, image * (size if size & (size - 1) == 0 else 1), ALIGNMENT)
            alignment.append(align)
        ax, aw, ay = alignment
        return replace(
            p,
            batch=size,
            bias=False,
            accumulate=p.accumulate or sums,
            out_dtype="fp32" if sums else p.out_dtype,
            alignment=(ax, aw, ay),
        )

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Its children's; nothing of its own."""
        return Cost(0, 0, kernels=0)
