"""Pooling: the problem of a whole ``nn.MaxPool`` or ``nn.AvgPool``, its notation, its value."""

from tilewise.problems.kinds import Kind, register
from tilewise.problems.pooling.checks import errors_of
from tilewise.problems.pooling.key import TASKS
from tilewise.problems.pooling.notation import format_pooling
from tilewise.problems.pooling.problem import PoolingProblem


def _small_example(device: str) -> PoolingProblem:
    return PoolingProblem("max", 1, 1, (4, 4), (2, 2), (2, 2), device=device)


register(
    Kind(
        PoolingProblem,
        "poolings",
        "aten_pooling",
        errors_of,
        tasks=TASKS,
        notation=format_pooling,
        small_example=_small_example,
    )
)
