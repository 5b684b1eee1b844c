"""Products of copies that lie otherwise, or are larger: by torch's own choice, or by a config of another solver."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch

from tilewise import solvers
from tilewise.plan import Config
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.base import Cost, Run, Solver, SolverUnavailable, Split
from tilewise.solvers.common.buffers import ALIGNMENT, Slot
from tilewise.solvers.common.matmul import at_precision
from tilewise.solvers.common.tiles import config_reasons
from tilewise.solvers.gemm._product import ScratchSolver, multiplied, product_into

__all__ = ["Inner", "NestedSolver"]

VENDOR = "cublaslt_gemm"
"""The solver whose algorithms are tried on the product of the copies, where it can compute that."""
MOST_INNER = 2
"""The first of its algorithms that are tried for each form of the product."""

Slots = dict[str, Slot]
Inner = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], object]
"""``inner(a, b, out, workspace)`` computes the product of the copies, of tensors as these are stored."""


class NestedSolver(ScratchSolver):
    """Another product, :meth:`child`, computes this one between copies.

    A config names the form of the other product. ``solver`` names what computes it, whose own config is the rest; torch
    does where there is no ``solver``. The forms are :meth:`forms`; :meth:`place` says where copies lie.
    """

    names: ClassVar[tuple[str, ...]]
    """The parameters of a config that say which form it is."""

    @abc.abstractmethod
    def forms(self, p: GemmProblem) -> Iterable[Config]:
        """Configs without ``solver``, the most promising first."""

    @abc.abstractmethod
    def child(self, p: GemmProblem, c: Config) -> GemmProblem:
        """The other product. Raises ``KeyError`` or ``ValueError`` for what is no form of ``p``."""

    @abc.abstractmethod
    def place(self, p: GemmProblem, c: Config) -> tuple[Slots, int]:
        """The places of copies in the workspace by role of ``p``, and the bytes of all."""

    @abc.abstractmethod
    def form_cost(self, p: GemmProblem, c: Config) -> Cost:
        """The cost of a form by torch, copies included."""

    def configs(self, p: GemmProblem) -> Iterator[Config]:
        """Every form by torch's own choice, and by the first algorithms of the vendor's library where it is there."""
        vendor = solvers.get(VENDOR)
        for form in self.forms(p):
            yield form
            other = self.child(p, form)
            if p.device_type == "cuda" and not vendor.why_not(other):
                for _, inner in zip(range(MOST_INNER), vendor.configs(other), strict=False):
                    yield Config(**form, solver=vendor.name, **inner)

    def computed_instead(self, p: GemmProblem) -> Iterator[tuple[GemmProblem, Config]]:
        """The other product of every form."""
        yield from ((self.child(p, form), form) for form in self.forms(p))

    def computes_with(self, c: Config) -> str:
        """The name of the solver that its config names."""
        return str(c.get("solver", ""))

    def family(self, c: Config) -> str:
        """One for each solver that computes the other product."""
        return f"{self.name} {self.computes_with(c)}".strip()

    def workspace(self, p: GemmProblem, c: Config) -> int:
        """Bytes of the copies, and of the other solver's workspace."""
        size = self.place(p, c)[1]
        solver = self._solver(c)
        inner = 0 if solver is None else solver.workspace(self.child(p, c), self._rest(c))
        return _up(size) + inner if inner else size

    def hidden_workspace(self, p: GemmProblem, c: Config) -> int:
        """What the other solver, or torch's library, allocates by itself."""
        solver = self._solver(c)
        if solver is None:
            return super().hidden_workspace(p, c)
        return solver.hidden_workspace(self.child(p, c), self._rest(c))

    def cost(self, p: GemmProblem, c: Config) -> Cost:
        """The cost of its form, by the rate of the other solver where there is one."""
        by_torch, solver = self.form_cost(p, c), self._solver(c)
        if solver is None:
            return by_torch
        inner = solver.cost(self.child(p, c), self._rest(c))
        return Cost(
            max(p.flops, inner.flops), inner.bytes, inner.kernels + by_torch.kernels - 1, inner.efficiency,
            apart=by_torch.apart + inner.apart,
        )  # fmt: skip

    def bound_inner(self, p: GemmProblem, c: Config, *examples: torch.Tensor) -> Inner:
        """What computes the other product of tensors like these ``examples``.

        Raises ``SolverUnavailable`` with the other solver's reason.
        """
        other, solver = self.child(p, c), self._solver(c)
        if solver is None:
            views, product = multiplied(other), product_into(other)

            def by_torch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, _: torch.Tensor | None) -> None:
                product(*views(a, b), out)

            return by_torch
        if reasons := solver.why_not(other):
            raise SolverUnavailable(f"{solver.name}: {'; '.join(reasons)}")
        run, start = solver.bind_checked(other, self._rest(c), *examples), _up(self.place(p, c)[1])

        def by_solver(
            a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None
        ) -> torch.Tensor:
            return run(a, b, out, None if workspace is None else workspace[start:])

        return by_solver

    def bind(self, p: GemmProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """A run of copies and one product. Raises ``SolverUnavailable`` for a config of no such form."""
        assert out is not None
        with config_reasons(p, c):
            self.child(p, c), self.workspace(p, c)
        return at_precision(p, self.run_of(p, c, a, b, out))

    @abc.abstractmethod
    def run_of(self, p: GemmProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Run:
        """The run of a config that is one."""

    def form(self, c: Config) -> dict[str, Any]:
        """The form's parameters. Raises ``ValueError`` where one is missing, or one is there without a solver."""
        if not set(self.names) <= set(c) or ("solver" not in c and set(c) != set(self.names)):
            raise ValueError(f"{', '.join(self.names)}, or these, a solver and its config would do")
        return {name: c[name] for name in self.names}

    def _rest(self, c: Config) -> Config:
        """The other solver's config."""
        return Config(**{name: value for name, value in c.items() if name not in (*self.names, "solver")})

    def _solver(self, c: Config) -> Solver | None:
        """The other solver; ``None`` for torch's own choice. Raises ``KeyError`` or ``ValueError`` for none such."""
        if "solver" not in c:
            return None
        solver = solvers.get(str(c["solver"]))
        if solver.solves is not GemmProblem or isinstance(solver, Split | NestedSolver) or solver.own_output:
            raise ValueError(f"solver={solver.name!r}: one that writes products itself would do")
        return solver


def _up(size: int) -> int:
    """``size`` bytes up to a multiple at which another solver's workspace may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT
