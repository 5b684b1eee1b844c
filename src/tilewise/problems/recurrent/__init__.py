"""Recurrent layers: the problem of a whole ``nn.RNN``, ``nn.GRU`` or ``nn.LSTM``, its notation, its value."""

from tilewise.problems.kinds import Kind, register
from tilewise.problems.recurrent.checks import errors_of
from tilewise.problems.recurrent.notation import format_recurrent
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.problems.recurrent.tensors import TASKS


def _small_example(device: str) -> RecurrentProblem:
    return RecurrentProblem("lstm", 2, 2, 4, 4, device=device)


register(
    Kind(
        RecurrentProblem,
        "recurrent layers",
        "aten_rnn",
        errors_of,
        tasks=TASKS,
        notation=format_recurrent,
        small_example=_small_example,
    )
)
