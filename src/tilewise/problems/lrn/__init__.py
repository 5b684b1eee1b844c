"""Local response normalization: the problem, its notation, its value in float64."""

from tilewise.problems.kinds import Kind, register
from tilewise.problems.lrn.checks import errors_of
from tilewise.problems.lrn.key import TASKS
from tilewise.problems.lrn.notation import format_lrn
from tilewise.problems.lrn.problem import LrnProblem


def _small_example(device: str) -> LrnProblem:
    return LrnProblem(2, 4, (4, 4), 3, device=device)


register(
    Kind(
        LrnProblem,
        "local response normalizations",
        "aten_lrn",
        errors_of,
        tasks=TASKS,
        notation=format_lrn,
        small_example=_small_example,
    )
)
