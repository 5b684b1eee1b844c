"""Depthwise convolutions with the pointwise ones around them: the problem, its text, its value in float64."""

from tilewise.problems.conv.axis import Axis
from tilewise.problems.kinds import Kind, register
from tilewise.problems.separable.checks import errors_of
from tilewise.problems.separable.problem import SeparableProblem


def _small_example(device: str) -> SeparableProblem:
    axis = Axis(4, 3, before=1, after=1)
    return SeparableProblem(1, 4, 8, 4, (axis, axis), inner=("relu", "relu"), device=device)


register(
    Kind(
        SeparableProblem,
        "separable convolutions",
        "aten_separable",
        errors_of,
        tasks=("inference",),
        small_example=_small_example,
    )
)
