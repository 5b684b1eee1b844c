"""16-bit convolutions on a CPU by solvers that compute in fp32: operands are widened, the result is rounded once."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import torch

from tilewise import solvers
from tilewise.plan import Config
from tilewise.problem import ALIGNMENT, ConvProblem, dense_strides
from tilewise.solvers._buffers import Arena, Slot
from tilewise.solvers._inner import named, own
from tilewise.solvers.base import Cost, Prepare, Run, Solver, SolverUnavailable

__all__ = ["Widened"]


class Widened(Solver):
    """Another solver's fp32 algorithm for bf16 and fp16 operands, between copies in the workspace.

    Most processors multiply 16-bit numbers no faster than 32-bit ones, and where they do, an algorithm with fewer
    multiplications may still be ahead. Sums are fp32, so the result is closer than that of 16-bit products summed in
    pieces. ``solver`` is the other solver's name, which takes fp32 alone; the rest of a config is its own. Filters that
    it keeps when they are constant are kept.
    """

    name, version = "widened", 1
    devices = frozenset({"cpu"})
    dtypes = frozenset({"bf16", "fp16"})

    def unsupported(self, p: ConvProblem) -> list[str]:
        """What no solver that takes fp32 alone can do."""
        return [] if _able(p) else ["no solver that takes fp32 alone can compute it in fp32"]

    def computes_with(self, c: Config) -> str:
        """The solver that its config names."""
        return str(c.get("solver", ""))

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        wide = widened(p)
        return (named(solver, c) for solver in _able(p) for c in solver.configs(wide))

    def offers(
        self, p: ConvProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterator[tuple[Config, int]]:
        """As the other solvers offer them, within what copies leave of ``ceiling``."""
        wide, copies = widened(p), _Buffers(p, 0).arena.size
        left = None if ceiling is None else max(0, ceiling - copies)
        for solver in _able(p):
            theirs = None if only is None else [own(c) for c in only if c["solver"] == solver.name]
            for c, _ in solver.offers(wide, left, theirs):
                found = named(solver, c)
                yield found, self.workspace(p, found)

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Copies of operands and result, and what the other solver needs."""
        return _Buffers(p, _solver(c).workspace(widened(p), own(c))).arena.size

    def constant(self, p: ConvProblem, c: Config) -> int:
        """What the other solver keeps."""
        return _solver(c).constant(widened(p), own(c))

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """The other solver's preparation of the widened filter."""
        solver, wide = _solver(c), widened(p)
        buffers = _Buffers(p, solver.workspace(wide, own(c)))
        prepared = solver.prepare(wide, own(c), buffers.example("w"))

        def prepare(weight: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
            prepared(buffers.filled("w", weight, workspace), kept, buffers.rest(workspace))

        return prepare

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """The other solver's, and copies before and after it."""
        found = _solver(c).cost(widened(p), own(c))
        roles = [role for role in (*p.operands, p.result) if not (role == "w" and self.constant(p, c))]
        copies = sum(3 * p.nbytes(role) for role in roles)
        return replace(found, kernels=found.kernels + len(roles), apart=found.apart + copies)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """The other solver's run between copies. Raises ``SolverUnavailable`` with its reason."""
        assert out is not None
        try:
            solver, theirs, wide = _solver(c), own(c), widened(p)
            buffers, kept = _Buffers(p, solver.workspace(wide, theirs)), bool(solver.constant(wide, theirs))
        except (KeyError, ValueError) as error:
            raise SolverUnavailable(f"{c} is no config of {p.key}: {error}") from error
        first, second = p.operands
        inner = solver.bind_checked(
            wide, theirs, buffers.example(first), buffers.example(second), buffers.example(p.result)
        )

        def run(
            a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
        ) -> torch.Tensor:
            assert out is not None
            left = buffers.filled(first, a, workspace)
            right = b if kept else buffers.filled(second, b, workspace)
            result = inner(left, right, buffers.of(p.result, workspace), buffers.rest(workspace))
            return out.copy_(result)

        return run


class _Buffers:
    """Dense fp32 tensors for operands and result in the workspace, and behind them the other solver's own."""

    def __init__(self, p: ConvProblem, own: int) -> None:
        self.arena, self.own, wide = Arena(), own, widened(p)
        self.slots = {
            role: self.arena.add((math.prod(p.shape(role)),), torch.float32) for role in (*p.operands, p.result)
        }
        self.shapes = {role: (p.shape(role), dense_strides(p.shape(role), wide.layout(role))) for role in self.slots}
        self.last: Slot = self.arena.add((own,), torch.uint8)

    def example(self, role: str) -> torch.Tensor:
        """A tensor with the shape and strides of the copy."""
        shape, strides = self.shapes[role]
        return torch.empty_strided(shape, strides, dtype=torch.float32, device="cpu")

    def of(self, role: str, workspace: torch.Tensor | None) -> torch.Tensor:
        """The copy's place."""
        return self.slots[role].of(workspace).as_strided(*self.shapes[role])

    def filled(self, role: str, tensor: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        """The copy."""
        return self.of(role, workspace).copy_(tensor)

    def rest(self, workspace: torch.Tensor | None) -> torch.Tensor | None:
        """The other solver's workspace."""
        return self.last.of(workspace) if self.own else None


@functools.lru_cache(maxsize=1024)
def widened(p: ConvProblem) -> ConvProblem:
    """The same convolution of dense fp32 copies."""
    layouts = tuple("contiguous" if layout == "view" else layout for layout in p.layouts)
    return replace(p, dtype="fp32", out_dtype="fp32", layouts=layouts, alignment=(ALIGNMENT,) * 3)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _able(p: ConvProblem) -> tuple[Solver, ...]:
    """Solvers that can compute it in fp32, and take nothing else."""
    wide = widened(p)
    narrow = (s for s in solvers.all_solvers() if s.dtypes == {"fp32"} and "cpu" in s.devices)
    return tuple(s for s in narrow if not s.why_not(wide))


def _solver(c: Config) -> Solver:
    found = solvers.get(str(c["solver"]))
    if found.dtypes != {"fp32"}:
        raise ValueError(f"solver={found.name!r}: one that takes fp32 alone would do")
    return found
