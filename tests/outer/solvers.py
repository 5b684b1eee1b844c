"""Solvers of outer products, found in the package's folder of solvers: torch's way, one with scratch, and a split."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from tilewise.problems.outer import OuterProblem

from tilewise.plan import Config
from tilewise.problems.base import Problem
from tilewise.solvers.base import Cost, Run, Solver, Split


class OuterSolver(Solver):
    """What both have in common."""

    solves: ClassVar[type[Problem]] = OuterProblem
    exact_memory = True

    def unsupported(self, p: OuterProblem) -> list[str]:
        return []

    def configs(self, p: OuterProblem) -> Iterable[Config]:
        return (Config(),)

    def cost(self, p: OuterProblem, c: Config) -> Cost:
        return Cost(p.flops, p.bytes)


class OuterTorch(OuterSolver):
    """By torch's operators, which allocate their results."""

    name, version = "outer_torch", 1
    own_output = True
    baseline = True

    def bind(self, p: OuterProblem, c: Config, *tensors: Any, **nothing: Any) -> Run:
        def run(u: Any, v: Any, s: Any, z: Any, t: Any, workspace: Any) -> Any:
            scaled = s[:, None] * u
            return (scaled[:, :, None] * v[:, None, :]).clone(), scaled

        return run


class OuterScratch(OuterSolver):
    """By way of a copy of the whole in its workspace; rather fast, as its results are written in place."""

    name, version = "outer_scratch", 1
    accumulates = True

    def workspace(self, p: OuterProblem, c: Config) -> int:
        return 4 * p.batch * p.rows * p.columns

    def bind(self, p: OuterProblem, c: Config, *tensors: Any, **nothing: Any) -> Run:
        shape = p.shape("z")

        def run(u: Any, v: Any, s: Any, z: Any, t: Any, workspace: Any) -> Any:
            space = workspace[: self.workspace(p, c)].view(torch.float32).view(shape)
            scaled = s[:, None] * u
            torch.mul(scaled[:, :, None].float(), v[:, None, :].float(), out=space)
            if p.accumulate:
                return z.add_(space), t.add_(scaled)
            return z.copy_(space), t.copy_(scaled)

        return run


class OuterItems(Split):
    """Cuts the batch."""

    name, version = "outer_items", 1
    solves: ClassVar[type[Problem]] = OuterProblem
    axis = "batch"
    level = 2

    def unsupported(self, p: OuterProblem) -> list[str]:
        return [] if p.batch > 1 else ["has one item"]

    def cost(self, p: OuterProblem, c: Config) -> Cost:
        return Cost(p.flops, p.bytes)

    def sizes(self, p: OuterProblem, policy: str) -> Sequence[int]:
        return [] if policy == "undivided" else [size for size in (8, 4, 2, 1) if size < p.batch]

    def child(self, p: OuterProblem, size: int) -> OuterProblem:
        return p.split("batch", (size, p.batch - size))[0].problem
