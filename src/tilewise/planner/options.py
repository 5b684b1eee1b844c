"""What a user may ask of a plan: constraints it must keep and effort spent finding it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewise import solvers
from tilewise.plan import Config, Measurement, format_bytes, parse_bytes
from tilewise.problem import ConvProblem
from tilewise.solvers import Solver

__all__ = ["BATCH_SIZES", "EXCLUDED", "RIGORS", "NoPlanError", "Options", "no_plan_text"]

RIGORS = ("estimate", "measure", "patient", "wisdom_only")
BATCH_SIZES = ("undivided", "powers_of_two", "all")
EXCLUDED = "left out by exclude"
"""The reason of a candidate whose solver was not to be used."""


class NoPlanError(RuntimeError):
    """No solver keeps the constraints; the message lists every solver's reasons."""


@dataclass(frozen=True, slots=True)
class Options:
    """Constraints and effort of planning one problem.

    ``workspace`` is the limit per kernel in bytes beyond operands, result and declared constants; ``None`` is none.
    ``batch_sizes`` says which micro-batches are tried (mu-cuDNN III-D): ``undivided``, ``powers_of_two`` or ``all``.
    ``rigor`` is ``estimate`` (roofline only), ``measure``, ``patient`` (nothing pruned) or ``wisdom_only``.
    ``deterministic`` allows only bitwise repeatable configs. ``error_limit`` bounds the relative L2 error (``None``:
    1e-5 in fp32, twice torch's own otherwise); ``strict`` bounds the spread of an outlier's error the same way.
    ``cuda_graphs``: the layers are replayed from CUDA graphs, so that launching them costs nothing. ``exclude`` names
    solvers and splits that no plan may use, neither whole nor as a part nor inside another solver; it is kept sorted.
    Torch's own choice, ``aten``, is still measured to compare with when it is left out.

    Raises ``ValueError`` naming the argument, the value and what would do.
    """

    workspace: int | None = None
    batch_sizes: str = "powers_of_two"
    rigor: str = "measure"
    deterministic: bool = False
    error_limit: float | None = None
    strict: bool = False
    cuda_graphs: bool = False
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.workspace is not None:
            object.__setattr__(self, "workspace", parse_bytes(self.workspace))
        for name, known in (("batch_sizes", BATCH_SIZES), ("rigor", RIGORS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: one of {', '.join(known)} would do")
        for name in ("deterministic", "strict", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: True or False would do")
        limit: object = self.error_limit
        is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        if limit is not None and not (is_number and limit > 0):  # type: ignore[operator]
            raise ValueError(f"error_limit={limit!r}: a positive number would do")
        object.__setattr__(self, "exclude", _solver_names(self.exclude))

    def excludes(self, solver: Solver, config: Config | None = None) -> bool:
        """Whether no plan may use ``solver``, or ``config`` of it because it computes with an excluded one."""
        if not self.exclude:
            return False
        inner = "" if config is None else solver.computes_with(config)
        return solver.name in self.exclude or inner in self.exclude


def _solver_names(given: object) -> tuple[str, ...]:
    """Names of solvers, each once and sorted. Raises ``ValueError`` for anything else."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(f"exclude={given!r}: names of solvers such as ('aten',) would do")
    names = list(given)
    if not names:
        return ()
    known = [solver.name for solver in solvers.all_solvers()]
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise ValueError(f"exclude: {name!r:.80} is no solver; there are {', '.join(known)}")
    return tuple(sorted(set(names)))


def no_plan_text(problem: ConvProblem, options: Options, log: Sequence[Measurement]) -> str:
    """What a :class:`NoPlanError` says: the problem, the limit and why each candidate was lost."""
    limit = "no workspace limit" if options.workspace is None else f"{format_bytes(options.workspace)} of workspace"
    lines = [f"no plan for {problem.key} under {limit}:"]
    lines += dict.fromkeys(f"  {m.solver} {m.config}: {m.reason}" for m in log if m.reason)
    return "\n".join(lines)
