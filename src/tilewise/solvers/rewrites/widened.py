"""16-bit convolutions on a CPU by solvers that compute in fp32: operands are widened, the result is rounded once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

import torch

from tilewise import solvers
from tilewise.plan import Config
from tilewise.problems.activations import CONV_ACTIVATIONS
from tilewise.problems.base import ALIGNMENT, dense_strides
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.base import Cost, Prepare, Run, Solver
from tilewise.solvers.common.buffers import Arena, Slot
from tilewise.solvers.common.tiles import config_reasons
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.rewrites._inner import inner_config, named

__all__ = ["Widened"]


class Widened(ConvSolver):
    """Another solver's fp32 algorithm for bf16 and fp16 operands, between copies in the workspace.

    Most processors multiply 16-bit numbers no faster than 32-bit ones, and where they do, an algorithm with fewer
    multiplications may still be ahead. Sums are fp32, so the result is closer than that of 16-bit products summed in
    pieces. ``solver`` is the other solver's name, which takes fp32 alone; the rest of a config is its own. Filters that
    it keeps when they are constant are kept. Bias, residual and activation are its own too, on fp32 sums.
    """

    name, version = "widened", 2
    devices = frozenset({"cpu"})
    dtypes = frozenset({"bf16", "fp16"})
    adds_bias = True
    adds_residual = True
    activations = frozenset(CONV_ACTIVATIONS)
    exact_memory = True

    def unsupported(self, p: ConvProblem) -> list[str]:
        """A reason where no solver that takes only fp32 can compute ``p`` in fp32."""
        return [] if _able(p) else ["no solver that takes fp32 alone can compute it in fp32"]

    def computes_with(self, c: Config) -> str:
        """The name of the solver that its config names."""
        return str(c.get("solver", ""))

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """The configs of every solver that can compute ``p`` in fp32."""
        wide = widened(p)
        return (named(solver, c) for solver in _able(p) for c in solver.configs(wide))

    def offers(
        self, p: ConvProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterator[tuple[Config, int]]:
        """What the other solvers offer within the bytes of ``ceiling`` that the copies leave."""
        wide, copies = widened(p), _Buffers(p, 0).arena.size
        left = None if ceiling is None else max(0, ceiling - copies)
        for solver in _able(p):
            inner_only = None if only is None else [inner_config(c) for c in only if c["solver"] == solver.name]
            for c, _ in solver.offers(wide, left, inner_only):
                outer = named(solver, c)
                yield outer, self.workspace(p, outer)

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of the copies of operands and result, and of the other solver's workspace."""
        return _Buffers(p, _solver(c).workspace(widened(p), inner_config(c))).arena.size

    def hidden_workspace(self, p: ConvProblem, c: Config) -> int:
        """What the other solver is expected to allocate by itself, in bytes."""
        return _solver(c).hidden_workspace(widened(p), inner_config(c))

    def does_add_bias(self, p: ConvProblem, c: Config) -> bool:
        """Whether the other solver's config does."""
        return _does(p, c, lambda solver, wide, inner: solver.does_add_bias(wide, inner))

    def does_add_residual(self, p: ConvProblem, c: Config) -> bool:
        """Whether the other solver's config does."""
        return _does(p, c, lambda solver, wide, inner: solver.does_add_residual(wide, inner))

    def does_activate(self, p: ConvProblem, c: Config) -> bool:
        """Whether the other solver's config does."""
        return _does(p, c, lambda solver, wide, inner: solver.does_activate(wide, inner))

    def constant(self, p: ConvProblem, c: Config) -> int:
        """Bytes of a prepared filter that the other solver keeps."""
        return _solver(c).constant(widened(p), inner_config(c))

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """The other solver's preparation, applied to the widened filter."""
        solver, wide = _solver(c), widened(p)
        buffers = _Buffers(p, solver.workspace(wide, inner_config(c)))
        prepared = solver.prepare(wide, inner_config(c), buffers.example("w"))

        def prepare(weight: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
            prepared(buffers.filled("w", weight, workspace), kept, buffers.rest(workspace))

        return prepare

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """The other solver's cost, and that of the copies before and after it."""
        inner_cost = _solver(c).cost(widened(p), inner_config(c))
        roles = [role for role in (*p.operands, p.result) if not (role == "w" and self.constant(p, c))]
        copies = sum(3 * p.nbytes(role) for role in (*roles, *["y"] * p.residual))
        return replace(inner_cost, kernels=inner_cost.kernels + len(roles), apart=inner_cost.apart + copies)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """The other solver's run between copies. Raises ``SolverUnavailable`` with its reason."""
        assert out is not None
        with config_reasons(p, c):
            solver, inner_c, wide = _solver(c), inner_config(c), widened(p)
            buffers, kept = _Buffers(p, solver.workspace(wide, inner_c)), bool(solver.constant(wide, inner_c))
        first, second = p.operands
        inner = solver.bind_checked(
            wide, inner_c, buffers.example(first), buffers.example(second), buffers.example(p.result)
        )

        names = [name for name in ("bias", "residual") if getattr(p, name)]

        def run(
            a: torch.Tensor,
            b: torch.Tensor,
            out: torch.Tensor | None,
            workspace: torch.Tensor | None,
            *added: torch.Tensor,
        ) -> torch.Tensor:
            assert out is not None
            left = buffers.filled(first, a, workspace)
            right = b if kept else buffers.filled(second, b, workspace)
            more = [buffers.filled(name, tensor, workspace) for name, tensor in zip(names, added, strict=True)]
            result = inner(left, right, buffers.of(p.result, workspace), buffers.rest(workspace), *more)
            return out.copy_(result)

        return run


class _Buffers:
    """Fp32 copies in the workspace, of operands, result and what is added, then the other solver's own workspace."""

    def __init__(self, p: ConvProblem, inner_bytes: int) -> None:
        self.arena, self.inner_bytes, wide = Arena(), inner_bytes, widened(p)
        self.shapes = {
            role: (p.shape(role), dense_strides(p.shape(role), wide.layout(role))) for role in (*p.operands, p.result)
        }
        if p.bias:
            self.shapes["bias"] = (p.shape(p.result)[1:2], (1,))
        if p.residual:
            self.shapes["residual"] = self.shapes[p.result]
        self.slots = {
            role: self.arena.add((math.prod(shape),), torch.float32) for role, (shape, _) in self.shapes.items()
        }
        self.last: Slot = self.arena.add((inner_bytes,), torch.uint8)

    def example(self, role: str) -> torch.Tensor:
        """A tensor with the shape and strides of the copy of ``role``."""
        shape, strides = self.shapes[role]
        return torch.empty_strided(shape, strides, dtype=torch.float32, device="cpu")

    def of(self, role: str, workspace: torch.Tensor | None) -> torch.Tensor:
        """The copy of ``role`` in the workspace, not yet filled."""
        return self.slots[role].of(workspace).as_strided(*self.shapes[role])

    def filled(self, role: str, tensor: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        """The copy of ``role`` in the workspace, filled from ``tensor``."""
        return self.of(role, workspace).copy_(tensor)

    def rest(self, workspace: torch.Tensor | None) -> torch.Tensor | None:
        """The other solver's workspace, or ``None`` where it needs none."""
        return self.last.of(workspace) if self.inner_bytes else None


@functools.lru_cache(maxsize=1024)
def widened(p: ConvProblem) -> ConvProblem:
    """The same convolution on contiguous fp32 copies."""
    layouts = tuple("contiguous" if layout == "view" else layout for layout in p.layouts)
    return replace(p, dtype="fp32", out_dtype="fp32", layouts=layouts, alignment=(ALIGNMENT,) * 3)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _able(p: ConvProblem) -> tuple[Solver, ...]:
    """Solvers that take only fp32 and can compute ``p`` in fp32."""
    wide = widened(p)
    narrow = (s for s in solvers.all_solvers() if s.dtypes == {"fp32"} and "cpu" in s.devices)
    return tuple(s for s in narrow if not s.why_not(wide))


def _does(p: ConvProblem, c: Config, does: Callable[[Solver, ConvProblem, Config], bool]) -> bool:
    """Whether the other solver ``does`` something; ``False`` for no config of this solver."""
    try:
        return does(_solver(c), widened(p), inner_config(c))
    except (KeyError, ValueError):
        return False  # which is said where it is bound


def _solver(c: Config) -> Solver:
    """The other solver of a config. Raises ``KeyError`` or ``ValueError`` where there is none such."""
    solver = solvers.get(str(c["solver"]))
    if solver.dtypes != {"fp32"}:
        raise ValueError(f"solver={solver.name!r}: one that takes fp32 alone would do")
    return solver
