"""Recurrent layers on a GPU in one launch a direction: the recurrent weights stay on the chip for all steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from tilewise.kernels.building.target import sought
from tilewise.plan import Config
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers.base import Cost
from tilewise.solvers.common.costs import efficiency
from tilewise.solvers.recurrent._folded import Folded, folded_bytes
from tilewise.solvers.recurrent._gpu import CYCLES_A_MICROSECOND, architecture, precise, processors, unavailable_by
from tilewise.solvers.recurrent._layers import Layer, StackedLayers
from tilewise.solvers.recurrent._recurrent import (
    RecurrentSolver,
    block_of,
    blocks_of,
    is_on_host,
    moved_bytes,
    rows_at_a_time,
    with_repeats,
)

if TYPE_CHECKING:
    from tilewise.solvers.recurrent._grid_recurrence import Shape
    from tilewise.solvers.recurrent._grid_shapes import Asked

MOST = 4
"""Shapes of a kernel that are offered for products by warps, and for those by warpgroups."""
PAIRED = 3
"""The same where each is tried with each of the other kernel, for training."""


class PersistentGrid(RecurrentSolver):
    """One launch for all steps of a layer's direction, its recurrent weights in registers and shared memory.

    Reading the weights anew in each step bounds what a step takes where the batch is small (Diamos et al. 2016,
    "Persistent RNNs"). Here they are read once. Multiprocessors pass the states through the second cache, and words
    that are not yet written are told by their bits. ``forward`` and ``backward`` hold the hidden units of a block,
    tiles of batch rows, blocks of a cluster, groups of a block's teams of warps with columns of their own, the rows of
    a tile, and the warps of a team. A projection of an LSTM is folded into its weights (:mod:`._folded`).

    All blocks of a launch run at a time. It waits until the device has room for them, as a cooperative launch does.
    """

    name, version = "persistent_grid", 3
    by_blocks = projects = moves_to_host = True
    devices = frozenset({"cuda"})
    compiles = True
    most_configs = most_compiled = PAIRED**2  # of few kernels: each direction has as many as PAIRED of a kind
    error_bound = {"ieee": 1e-5, "tf32": 5e-3}  # noqa: RUF012

    def unsupported(self, p: RecurrentProblem) -> list[str]:
        """Reasons: no compiler for CUDA, an old GPU, or weights that do not fit, with the bytes that are too many."""
        from tilewise.kernels.cuda.launch import unavailable

        reasons = [reason] if (reason := unavailable()) else []
        major, minor = architecture()
        if (major, minor) < (8, 0):
            reasons.append(f"needs compute capability 8.0 or later, not {major}.{minor}")
        for backward in (False, True) if p.task == "training" else (False,):
            if not self._shapes(p, backward):
                from tilewise.solvers.recurrent._grid_shapes import smallest_excess

                over = smallest_excess(_asked(p, backward))
                which = "backward" if backward else "forward"
                reasons.append(f"{which}: a multiprocessor's share of the weights is {over} bytes too large")
        return reasons

    def configs(self, p: RecurrentProblem) -> Iterable[Config]:
        """Shapes of both kernels, the fastest by a model of a step first."""
        if p.task == "inference":
            return [Config(forward=shape) for _, shape in self._best(p, False, MOST)]
        pairs = itertools.product(*(self._best(p, backward, PAIRED) for backward in (False, True)))
        ranked = sorted((a + b, f, g) for (a, f), (b, g) in pairs)
        return [Config(forward=f, backward=g) for _, f, g in ranked]

    def family(self, c: Config) -> str:
        """One for each way to multiply: their estimates are off by other factors."""
        teams = (str(_shape(c, name)[-1]) for name in ("forward", "backward") if name in c)
        return " ".join((self.name, *teams))

    def most(self, p: RecurrentProblem) -> int:
        """As many kernels of a direction, where there is one."""
        return MOST if p.task == "inference" else self.most_configs

    def hidden_workspace(self, p: RecurrentProblem, c: Config) -> int:
        """What all layers have, and what a projection takes beside."""
        return super().hidden_workspace(p, c) + folded_bytes(p, rows_at_a_time(p, c), kept=not block_of(c))

    def cost(self, p: RecurrentProblem, c: Config) -> Cost:
        """The products of all steps at once, and the cycles of each step."""
        each = 0.0
        for name, backward in (("forward", False), ("backward", True)):
            if name in c:  # the same shape takes another time in each direction
                cycles = {shape: count for count, shape in self._shapes(p, backward)}
                each += cycles.get(_shape(c, name), 0.0)
        runs = blocks_of(p, c) * p.layers * p.directions
        steps_us = p.time * p.layers * p.directions * each / CYCLES_A_MICROSECOND
        rows, gates = p.time * p.batch, p.gates * p.hidden
        of_states = 2 * rows * p.layers * p.directions * gates * p.hidden
        # A step's products are in its cycles. The weights' gradients have one product for all steps.
        flops = with_repeats(p, c) - of_states if p.task == "inference" else with_repeats(p, c) - 2 * of_states
        return Cost(
            flops, p.bytes + moved_bytes(p, c), 8 * runs, efficiency(p.device_type, rows, gates, p.inputs),
            serial_us=steps_us,
        )  # fmt: skip

    def layer(self, p: RecurrentProblem, c: Config) -> Layer:
        """Layers around the kernels. Raises ``SolverUnavailable`` with the compiler's reason."""
        from tilewise.kernels.cuda.launch import compile_cubin
        from tilewise.solvers.recurrent._grid_recurrence import GridRecurrence, program

        forward, elsewhere = _shape(c, "forward"), sought()
        shapes = (forward, _shape(c, "backward") if "backward" in c else forward)
        dtype, exact = p.torch_dtype("x"), precise(p)
        index = torch.cuda.current_device() if elsewhere is None else 0
        recurrence = GridRecurrence(p.cell, p.hidden, dtype, index, shapes, exact)
        try:
            for backward in (False, True) if p.task == "training" else (False,):
                made = program(p.cell, p.hidden, dtype, shapes[backward], exact, backward)
                if elsewhere is None:
                    recurrence.compile(made)
                else:  # for another machine's GPU
                    compile_cubin(made.source(), elsewhere.instructions)
        except Exception as error:  # NVRTC and the driver raise errors of their own
            raise unavailable_by(error) from error
        steps = Folded(recurrence) if p.projection else recurrence
        return StackedLayers(p, steps, block=block_of(c), on_host=is_on_host(c))

    def _best(self, p: RecurrentProblem, backward: bool, most: int) -> list[tuple[float, Shape]]:
        """The first shapes with their cycles, so many for each way to multiply."""
        from tilewise.solvers.recurrent._grid_shapes import WARPGROUP

        found = self._shapes(p, backward)
        of_each = ([one for one in found if one[1][-1] == team][:most] for team in (1, WARPGROUP))
        return sorted(itertools.chain(*of_each))

    def _shapes(self, p: RecurrentProblem, backward: bool) -> tuple[tuple[float, Shape], ...]:
        from tilewise.solvers.recurrent._grid_shapes import shapes

        return shapes(_asked(p, backward))


def _asked(p: RecurrentProblem, backward: bool) -> Asked:
    """What shapes are asked for."""
    from tilewise.solvers.recurrent._grid_shapes import Asked

    clusters = architecture() >= (9, 0)
    return Asked(p.cell, p.hidden, p.torch_dtype("x"), p.batch, precise(p), backward, processors(), clusters)


def _shape(c: Config, name: str) -> Shape:
    """A config's shape. Raises ``ValueError`` for what is none."""
    value = c[name]
    if not isinstance(value, tuple) or len(value) != 6 or not all(isinstance(each, int) for each in value):
        raise ValueError(f"{name}={value!r}: six whole numbers would do: units, tiles, cluster, columns, rows, team")
    units, tiles, cluster, columns, rows, team = map(int, value)
    return units, tiles, cluster, columns, rows, team
