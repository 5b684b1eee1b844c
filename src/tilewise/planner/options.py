"""What a user may ask of a plan: constraints it must keep and effort spent finding it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewise import solvers
from tilewise.plan import UNIT_FORGOTTEN, Config, Measurement, format_bytes, parse_bytes
from tilewise.problems.base import Problem
from tilewise.solvers import Solver, Split

__all__ = [
    "BATCH_SIZES",
    "EXCLUDED",
    "MEASURING",
    "RIGORS",
    "NoPlanError",
    "Options",
    "first_line",
    "names_to_measure",
    "no_plan_text",
]

RIGORS = ("estimate", "measure", "patient", "wisdom_only")
MEASURING = ("measure", "patient")
"""The rigors that measure candidates."""
BATCH_SIZES = ("undivided", "powers_of_two", "all")
MOST_DIGITS = 4
"""Most digits of a GPU's number."""
EXCLUDED = "left out by exclude"
"""The reason given for a candidate whose solver the options exclude."""


class NoPlanError(RuntimeError):
    """No solver keeps the constraints; the message lists every solver's reasons.

    >>> try:
    ...     tilewise.Planner().plan(tilewise.GemmProblem(7, 5, 3), tilewise.Options(rigor="wisdom_only"))
    ... except tilewise.NoPlanError as error:
    ...     print(str(error)[:13])
    no wisdom for
    """


@dataclass(frozen=True, slots=True)
class Options:
    """Constraints and effort of planning one problem.

    ``workspace`` is the limit per kernel in bytes beyond operands, result and declared constants; ``None`` is none.
    ``batch_sizes`` says which micro-batches are tried (mu-cuDNN III-D): ``undivided``, ``powers_of_two`` or ``all``.
    ``rigor`` is ``estimate`` (roofline only), ``measure``, ``patient`` (nothing pruned) or ``wisdom_only``.
    ``deterministic`` allows only bitwise repeatable configs. ``error_limit`` bounds the relative L2 error (``None``:
    1e-5 in fp32, twice torch's own otherwise); ``strict`` keeps that limit for results next to outliers, too.
    ``cuda_graphs``: the layers are replayed from CUDA graphs, so that launching them costs nothing. ``exclude`` names
    solvers and splits that no plan may use, neither whole nor as a part nor inside another solver; it is kept sorted.
    Torch's own choice, ``aten``, is still measured to compare with when it is left out. ``share_with`` names devices,
    such as ``cpu`` and ``cuda:1``, that may compute a share of a layer's batch beside the device of its tensors, at the
    same time. Whether this machine has them is looked at when something is planned.

    Raises ``ValueError`` naming the argument, the value and what would do.

    >>> options = tilewise.Options(workspace=64 * 2**20, rigor="estimate", exclude=("winograd",))
    >>> options.workspace, options.exclude
    (67108864, ('winograd',))
    """

    workspace: int | None = None
    batch_sizes: str = "powers_of_two"
    rigor: str = "measure"
    deterministic: bool = False
    error_limit: float | None = None
    strict: bool = False
    cuda_graphs: bool = False
    exclude: tuple[str, ...] = ()
    share_with: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.workspace is not None:
            object.__setattr__(self, "workspace", parse_bytes(self.workspace))
        for name, known in (("batch_sizes", BATCH_SIZES), ("rigor", RIGORS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: one of {', '.join(known)} would do")
        for name in ("deterministic", "strict", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: True or False would do")
        if self.error_limit is not None:
            object.__setattr__(self, "error_limit", _positive(self.error_limit))
        object.__setattr__(self, "exclude", _solver_names(self.exclude, "exclude"))
        object.__setattr__(self, "share_with", _device_names(self.share_with))

    def excludes(self, solver: Solver, config: Config | None = None) -> bool:
        """Whether no plan may use ``solver``, or ``config`` of it because it computes with an excluded one."""
        if not self.exclude:
            return False
        inner = "" if config is None else solver.computes_with(config)
        return solver.name in self.exclude or inner in self.exclude


def _positive(limit: object) -> float:
    """A finite number above zero, which a file can hold. Raises ``ValueError`` for anything else."""
    try:
        value = float(limit) if isinstance(limit, (int, float)) and not isinstance(limit, bool) else 0.0
    except OverflowError as error:
        raise ValueError("error_limit: it is larger than a float holds; a positive number would do") from error
    if not 0 < value < math.inf:
        raise ValueError(f"error_limit={limit!r}: a positive number would do, such as 1e-5")
    return value


def names_to_measure(given: object, options: Options, argument: str) -> tuple[str, ...]:
    """Names of solvers of which every config is to be measured under ``options``, each once and sorted.

    Raises ``ValueError`` naming ``argument`` for other names, for splits, and where nothing may be measured.
    """
    names = _solver_names(given, argument)
    for name in names:
        if isinstance(solvers.get(name), Split):
            text = "cuts problems into parts for other solvers and has no configs to measure"
            raise ValueError(f"{argument}: {name!r} {text}; a solver that computes would do, such as 'aten'")
    if names and options.rigor == "wisdom_only":
        raise ValueError(f"{argument}: {names[0]!r} cannot be measured, as rigor wisdom_only measures nothing; "
                         "rigor measure would do")  # fmt: skip
    return names


def _solver_names(given: object, argument: str) -> tuple[str, ...]:
    """Names of solvers, each once and sorted. Raises ``ValueError`` naming ``argument`` for anything else."""
    known = [solver.name for solver in solvers.all_solvers()]
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        would_do = f"({given!r},)" if given in known else "names of solvers such as ('aten',)"
        raise ValueError(f"{argument}={given!r}: {would_do} would do")
    names = list(given)
    if not names:
        return ()
    for name in names:
        if not isinstance(name, str) or name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            meant = f"{close[0]!r} would do; " if close else ""
            raise ValueError(f"{argument}: {name!r:.80} is no solver; {meant}there are {', '.join(known)}")
    return tuple(sorted(set(names)))


def _device_names(given: object) -> tuple[str, ...]:
    """Devices as torch names them, each once, in their order. Raises ``ValueError`` for anything else.

    ``cuda`` is ``cuda:0``.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise ValueError(f"share_with={given!r:.80}: devices such as ('cpu', 'cuda:1') would do")
    names = []
    for name in given:
        kind, separator, number = name.partition(":") if isinstance(name, str) else ("", "", "")
        counted = not separator or (number.isascii() and number.isdecimal() and len(number) <= MOST_DIGITS)
        if name != "cpu" and not (kind == "cuda" and counted):
            raise ValueError(f"share_with: {name!r:.80} is no device; cpu, cuda or cuda:N would do")
        names.append(name if kind == "cpu" else f"cuda:{int(number or 0)}")
    if len(set(names)) < len(names):
        raise ValueError(f"share_with={tuple(names)!r:.200}: names a device twice; each once would do")
    return tuple(names)


def no_plan_text(problem: Problem, options: Options, log: Sequence[Measurement]) -> str:
    """What a :class:`NoPlanError` says: the problem, the limit and why each candidate was lost.

    Those that only need more workspace come first, the least first: that would do.
    """
    limit = "no workspace limit" if options.workspace is None else f"{format_bytes(options.workspace)} of workspace"
    over = sorted((m for m in log if m.workspace and "the limit is" in m.reason), key=lambda m: m.workspace or 0)
    least = f"; undivided, the least that a solver needs is {format_bytes(over[0].workspace or 0)}" if over else ""
    lines = [f"no plan for {problem.key} under {limit}{least}:"]
    lines += dict.fromkeys(f"  {m.solver} {m.config}: {m.reason}" for m in (*over, *log) if m.reason)
    if options.workspace is not None and options.workspace < UNIT_FORGOTTEN:  # this line, the last, is read
        few = format_bytes(options.workspace)
        lines.append(f"workspace={options.workspace}: {few} is less than kernels need; text such as '64MiB' would do")
    return "\n".join(lines)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type where it has none."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
