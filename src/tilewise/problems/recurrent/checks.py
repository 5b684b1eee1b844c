"""The check of what computes a recurrent layer: all results against float64, on data that keep the recurrence stable.

Weights are drawn as torch initialises them, from (-1/sqrt(hidden), 1/sqrt(hidden)): so a rounding error in a state
shrinks from step to step, and errors say something about what computed them.

The gradient of a ReLU jumps where its argument changes sign. Among millions of arguments some are so close to 0 that
fp32 and float64 fall on different sides, whatever computes them. So gradients of ``rnn_relu`` have a set of data on
which all arguments are small whole numbers, and computed exactly; on other data as much error is excused as such jumps
make.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from tilewise.machine.device import torch_device
from tilewise.machine.turns import pause
from tilewise.problems.base import WHOLE, Compute, Seams, as_tuple
from tilewise.problems.checks import distance
from tilewise.problems.error import Error
from tilewise.problems.operands import make_results
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.problems.recurrent.tensors import GATES

__all__ = ["dense_operands", "errors_of", "whole_operands"]

OCTAVES = 3.0
"""Inputs of a wide range are 2^-3 to 2^3 times normal ones: some gates are saturated, and others are not."""
LONG = 2.0
"""What is added to the bias of gates that keep the state (f of an LSTM, z of a GRU): they keep nine tenths of it."""
JUMPS = {"fp32": 5e-3, "tf32": 0.1, "fp16": 0.1, "bf16": 0.4}
"""Relative L2 error that arguments of a ReLU make which fall on the other side of 0: in fp32 one in ten millions does,
in bf16 one in some hundred."""
CHAIN = 4
"""States that whole-number data lead through: each hidden unit reads its neighbour, and every fourth reads none."""

Tensors = tuple[torch.Tensor, ...]


def errors_of(problem: RecurrentProblem, compute: Compute, seams: Seams = WHOLE, own: Compute | None = None) -> Error:
    """The worst errors of ``compute`` over all results, on data of several kinds; infinite where it leaves NaN.

    The scale of an element, for ``spread``, is its magnitude and the root mean square of its tensor. ``seams`` and
    ``own`` change nothing: all is compared.
    """
    worst = Error(0.0, 0.0)
    for operands, excused in _data(problem):
        pause()
        error = _errors(problem, compute, operands, excused)
        worst = Error(max(worst.l2, error.l2), max(worst.spread, error.spread))
        if not math.isfinite(worst.l2):
            break
    return worst


def _data(problem: RecurrentProblem) -> Iterator[tuple[Tensors, float]]:
    """Operands, and how large an L2 error of their gradients counts as none."""
    jumps = problem.cell == "rnn_relu" and problem.task == "training"
    excused = JUMPS["tf32" if problem.precision == "tf32" else problem.dtype] if jumps else 0.0
    yield dense_operands(problem, 1), excused
    yield dense_operands(problem, 2, wide=True), excused
    if problem.cell == "rnn_relu":
        yield whole_operands(problem, 3), 0.0


def dense_operands(problem: RecurrentProblem, seed: int, *, wide: bool = False) -> Tensors:
    """Normal operands, and weights as torch initialises them; ``wide``: inputs of many octaves and long memories."""
    generator = torch.Generator(torch_device(problem.device)).manual_seed(seed)
    bound, made = problem.hidden**-0.5, []
    for role in problem.operands:
        pause()
        tensor = _empty(problem, role, generator)
        if role in problem.weights:
            tensor.uniform_(-bound, bound, generator=generator)
        else:
            tensor.normal_(generator=generator)
        if wide and role == "x":
            octaves = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
            tensor.mul_(octaves.uniform_(-OCTAVES, OCTAVES, generator=generator).exp2_().to(tensor.dtype))
        if wide and role.startswith("b_ih") and GATES[problem.cell] > 1:
            tensor[problem.hidden : 2 * problem.hidden] += LONG
        made.append(tensor)
    return problem.arranged(tuple(made))


def whole_operands(problem: RecurrentProblem, seed: int) -> Tensors:
    """Small whole numbers, and weights of so few numbers that sums stay small: fp32 computes them exactly."""
    generator = torch.Generator(torch_device(problem.device)).manual_seed(seed)
    made = []
    for role in problem.operands:
        pause()
        tensor = _empty(problem, role, generator)
        if role.startswith("w_"):
            sparse = _neighbours(tensor) if role.startswith("w_hh") else _few(tensor)
            signs = torch.randint(0, 2, tensor.shape, generator=generator, device=tensor.device, dtype=torch.int64)
            tensor.copy_(sparse * (2 * signs - 1))
        else:
            whole = torch.randint(-2, 3, tensor.shape, generator=generator, device=tensor.device, dtype=torch.int64)
            tensor.copy_(whole.abs() if role == "h0" else whole)
        made.append(tensor)
    return problem.arranged(tuple(made))


def _neighbours(u: torch.Tensor) -> torch.Tensor:
    """Ones where hidden unit j + 1 reads unit j, in chains of :data:`CHAIN` units."""
    rows = torch.arange(u.shape[0], dtype=torch.int64, device=u.device)[:, None]
    columns = torch.arange(u.shape[1], dtype=torch.int64, device=u.device)[None, :]
    return ((rows % u.shape[1] == columns + 1) & (rows % CHAIN != 0)).long()


def _few(w: torch.Tensor) -> torch.Tensor:
    """Ones in up to three columns of each row, of which the rows together read every column where they can."""
    rows = torch.arange(w.shape[0], dtype=torch.int64, device=w.device)[:, None]
    columns = torch.arange(w.shape[1], dtype=torch.int64, device=w.device)[None, :]
    return sum(((rows * 3 + k) % w.shape[1] == columns).long() for k in range(3)).clamp(max=1)  # type: ignore[union-attr]


def _empty(problem: RecurrentProblem, role: str, generator: torch.Generator) -> torch.Tensor:
    """A tensor of ``role`` on the generator's device."""
    return torch.empty(problem.shape(role), dtype=problem.torch_dtype(role), device=generator.device)


def _errors(problem: RecurrentProblem, compute: Compute, operands: Tensors, excused: float) -> Error:
    """The worst errors over all results for these operands."""
    computed = as_tuple(compute(*operands, None, *make_results(problem)))
    pause()
    wanted = problem.reference(*operands)
    worst = Error(0.0, 0.0)
    for role, got, want in zip(problem.results, computed, wanted, strict=True):
        pause()
        rms = want.square().mean().sqrt()
        error = distance(got, want, want.abs() + rms)
        if role.startswith("d") and error.l2 <= excused:
            error = Error(0.0, 0.0)
        worst = Error(max(worst.l2, error.l2), max(worst.spread, error.spread))
    return worst
