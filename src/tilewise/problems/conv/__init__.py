"""Convolutions: the problem, its notation, its value in float64."""

from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.checks import errors_of
from tilewise.problems.conv.notation import format_layer
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.kinds import Kind, register


def _notation(problem: ConvProblem) -> str | None:
    try:
        return format_layer(problem)
    except ValueError:
        return None


def _small_example(device: str) -> ConvProblem:
    return ConvProblem(Pass.FPROP, 2, 4, 4, (Axis(8, 3),) * 2, device=device)


def _fast_example(device: str) -> ConvProblem:
    """A fast problem: on some CPUs torch's own convolution is twice as fast as its matrix products."""
    return ConvProblem(Pass.FPROP, 8, 128, 128, (Axis(28, 3, before=1, after=1),) * 2, device=device)


register(
    Kind(
        ConvProblem,
        "convolutions",
        "aten",
        errors_of,
        tasks=tuple(pass_.value for pass_ in Pass),
        notation=_notation,
        small_example=_small_example,
        fast_example=_fast_example,
    )
)
