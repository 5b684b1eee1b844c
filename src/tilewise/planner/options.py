"""What a user may ask of a plan: constraints it must keep and effort spent finding it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewise.plan import Measurement, format_bytes, parse_bytes
from tilewise.problem import ConvProblem

__all__ = ["BATCH_SIZES", "RIGORS", "NoPlanError", "Options", "no_plan_text"]

RIGORS = ("estimate", "measure", "patient", "wisdom_only")
BATCH_SIZES = ("undivided", "powers_of_two", "all")


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
    ``cuda_graphs``: the layers are replayed from CUDA graphs, so that launching them costs nothing.

    Raises ``ValueError`` naming the argument, the value and what would do.
    """

    workspace: int | None = None
    batch_sizes: str = "powers_of_two"
    rigor: str = "measure"
    deterministic: bool = False
    error_limit: float | None = None
    strict: bool = False
    cuda_graphs: bool = False

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


def no_plan_text(problem: ConvProblem, options: Options, log: Sequence[Measurement]) -> str:
    """What a :class:`NoPlanError` says: the problem, the limit and why each candidate was lost."""
    limit = "no workspace limit" if options.workspace is None else f"{format_bytes(options.workspace)} of workspace"
    lines = [f"no plan for {problem.key} under {limit}:"]
    lines += dict.fromkeys(f"  {m.solver} {m.config}: {m.reason}" for m in log if m.reason)
    return "\n".join(lines)
