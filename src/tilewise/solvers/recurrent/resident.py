"""Recurrent layers on a CPU whose recurrent weights stay in the caches from step to step."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from tilewise.kernels.cpu.recurrent.told import GATES
from tilewise.plan import Config
from tilewise.problems.recurrent.packing import Packing
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers.base import Cost
from tilewise.solvers.common.cpu_run import lanes_and_threads, numba_missing, vector_lanes, with_teams
from tilewise.solvers.common.tiles import config_reasons
from tilewise.solvers.recurrent._cpu_recurrence import CpuRecurrence, Shares
from tilewise.solvers.recurrent._direction import Linear
from tilewise.solvers.recurrent._folded import Folded, folded_bytes
from tilewise.solvers.recurrent._layers import Layer, StackedLayers
from tilewise.solvers.recurrent._recurrent import RecurrentSolver, block_of, recurrent_cost, rows_at_a_time

__all__ = ["ResidentRnn"]

ONE_THREAD = 1e5
"""Floating-point operations of a step below which threads wait for each other as long as they compute."""
SEVERAL_THREADS = 4e6
"""Operations of a step from which on one thread is not worth trying."""


class ResidentRnn(RecurrentSolver):
    """All steps in one native call, with the hidden units divided among threads.

    Each of ``threads`` threads packs the recurrent weights of its units once and reads the same ones at every step, so
    that they stay in its core's cache where they fit (Diamos et al. 2016, "Persistent RNNs: stashing recurrent weights
    on-chip"). Larger ones are read from the shared cache, in the order in which they lie. Gates are computed where the
    sums end. A projection of an LSTM is folded into its weights (:mod:`._folded`). ``team`` says whether threads are
    torch's, ``lanes`` how many units a vector has.
    """

    name, version = "resident_rnn", 2
    by_blocks = projects = True
    devices = frozenset({"cpu"})
    dtypes = frozenset({"fp32"})
    compiles = True

    def unsupported(self, p: RecurrentProblem) -> list[str]:
        """Reasons: no Numba, or a system where a thread cannot give its core to another."""
        reasons = numba_missing()
        if not hasattr(os, "sched_yield"):
            reasons.append("needs a system with sched_yield")
        return reasons

    def configs(self, p: RecurrentProblem) -> Iterable[Config]:
        """All threads, torch's and our own, and for small steps one."""
        lanes, threads = vector_lanes(), torch.get_num_threads()
        step = 2 * (p.rows // p.time) * p.gates * p.hidden**2
        if threads > 1 and step > ONE_THREAD:
            yield from with_teams(Config(lanes=lanes, threads=threads))
        if threads == 1 or step <= SEVERAL_THREADS:
            yield Config(lanes=lanes, threads=1)

    def hidden_workspace(self, p: RecurrentProblem, c: Config) -> int:
        """Beside what all layers have, packed weights, sums, and states of all steps that are kept."""
        _, to, back = _shares(p, c)
        states = rows_at_a_time(p, c) * p.hidden * 4
        size = super().hidden_workspace(p, c)
        size += folded_bytes(p, rows_at_a_time(p, c), kept=not block_of(c))
        if p.task == "inference":
            return size + to.scratch
        kept = states * (1 if block_of(c) else p.layers * p.directions) if p.gates > 1 else 0
        return size + kept + max(to.scratch, back.scratch) + (states if p.cell == "gru" else 0)

    def cost(self, p: RecurrentProblem, c: Config) -> Cost:
        """The products; a step's wait for all threads takes less time than an operator."""
        return recurrent_cost(p, c, 4 * p.layers * p.directions)

    def layer(self, p: RecurrentProblem, c: Config) -> Layer:
        """Layers around the kernel."""
        threads, to, _ = _shares(p, c)
        openmp = c.get("team") == "openmp"
        recurrence = CpuRecurrence(
            p.cell, p.batch, p.hidden, lanes=to.lanes, threads=threads, openmp=openmp, packed=p.packed > 0
        )
        if not p.projection:
            return StackedLayers(p, recurrence, _linear(), recurrence.of if p.packed else None, block_of(c))

        def packed(packing: Packing) -> Folded:
            return Folded(recurrence.of(packing), packing)

        return StackedLayers(p, Folded(recurrence), _linear(), packed if p.packed else None, block_of(c))


def _linear() -> Linear:
    """oneDNN's product where torch has it, which takes a tenth less time than that of torch's other library."""
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
    if operator is None:
        return torch._C._nn.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = operator.default(x, weight, bias, "none", [], "")
        return result

    return linear


def _shares(p: RecurrentProblem, c: Config) -> tuple[int, Shares, Shares]:
    """The threads of a config and the shares of both passes. Raises ``SolverUnavailable`` for what is no config."""
    with config_reasons(p, c):
        lanes, threads = lanes_and_threads(c)
        if c.get("team", "own") not in ("own", "openmp"):
            raise ValueError(f"team={c['team']!r}: own or openmp would do")
    to, back = (Shares(lanes, GATES[p.cell], p.batch, p.hidden, threads, back) for back in (False, True))
    return threads, to, back
