"""Matrix products with long sums as a batch of products with short ones, which are added up afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tilewise.plan import Config
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.base import Cost, Run, SolverUnavailable
from tilewise.solvers.common.buffers import Arena, Slot
from tilewise.solvers.common.costs import efficiency
from tilewise.solvers.common.matmul import at_precision
from tilewise.solvers.common.tiles import integer
from tilewise.solvers.gemm._product import ScratchSolver, multiplied

SPLITS = (2, 4, 8, 16, 32)
LEAST = 128
"""The shortest slice of a sum."""


class SplitKGemm(ScratchSolver):
    """A batch of ``splits`` products over slices of the depth, and the sum over the batch, in fp32.

    A product of few rows and columns has too few tiles to keep a device busy unless its sums are divided (stream-K,
    Osama et al. 2023, section 2.3, calls it split-K). What is left of the depth is added to the first slice.
    """

    name, version = "split_k_gemm", 1
    most_configs = 3

    def unsupported(self, p: GemmProblem) -> list[str]:
        """Reasons: a batch, sums that are short, or on a CPU types other than fp32."""
        reasons = super().unsupported(p)
        if p.batch:
            reasons.append("divides one product, not a batch of them")
        if p.k < 2 * LEAST:
            reasons.append(f"divides sums of {2 * LEAST} terms or more, not of {p.k}")
        if p.device_type == "cpu" and p.dtype != "fp32":
            reasons.append(f"on a CPU takes fp32, not {p.dtype}: sums of parts are kept in fp32")
        return reasons

    def configs(self, p: GemmProblem) -> Iterable[Config]:
        """Powers of two, as far as slices are long and all partial sums take no more memory than the operands."""
        operands = sum(p.nbytes(role) for role in p.operands)
        for splits in SPLITS:
            if p.k >= splits * LEAST and (splits == SPLITS[0] or _slot(p, splits).bytes <= operands):
                yield Config(splits=splits)

    def workspace(self, p: GemmProblem, c: Config) -> int:
        """Bytes of the partial sums."""
        return _slot(p, integer(c, "splits")).bytes

    def cost(self, p: GemmProblem, c: Config) -> Cost:
        """The product at the rate of its slices, and partial sums written and read once."""
        splits = integer(c, "splits")
        rate = efficiency(p.device_type, p.m, p.n, p.k // splits, splits)
        return Cost(p.flops, p.bytes, 2 + (p.k % splits > 0), rate, apart=2 * self.workspace(p, c))

    def bind(self, p: GemmProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """A run of a batched product and a sum. Raises ``SolverUnavailable`` for a config of another number."""
        splits = c.get("splits")
        if set(c) != {"splits"} or type(splits) is not int or not 2 <= splits <= p.k:
            raise SolverUnavailable(f"{c} is no config of {p.key}: splits from 2 to the depth would do")
        slot, views, length = _slot(p, splits), multiplied(p), p.k // splits
        told: dict[str, Any] = {} if p.dtype == "fp32" else {"out_dtype": torch.float32}
        rest = p.k - splits * length

        def run(
            a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
        ) -> torch.Tensor:
            assert out is not None
            left, right = views(a, b)
            sums = slot.of(workspace)
            slices = left.narrow(1, 0, splits * length).unflatten(1, (splits, length)).movedim(1, 0)
            others = right.narrow(0, 0, splits * length).unflatten(0, (splits, length))
            torch.bmm(slices, others, **told, out=sums)
            if rest:
                ends = left.narrow(1, p.k - rest, rest), right.narrow(0, p.k - rest, rest)
                torch.addmm(sums[0], *ends, **told, out=sums[0])
            if out.dtype is sums.dtype:
                return torch.sum(sums, 0, out=out)
            return out.copy_(torch.sum(sums, 0, out=sums[0]))

        return at_precision(p, run)


def _slot(p: GemmProblem, splits: int) -> Slot:
    """The partial sums in the workspace."""
    return Arena().add((splits, p.m, p.n), torch.float32)
