"""Recurrent layers on a GPU whose directions and slices of the batch run at a time, each in a cluster of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from tilewise.kernels.building.target import sought
from tilewise.plan import Config
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers.base import Cost, SolverUnavailable
from tilewise.solvers.common.costs import efficiency
from tilewise.solvers.recurrent._gpu import CYCLES_A_MICROSECOND, architecture, precise, processors, unavailable_by
from tilewise.solvers.recurrent._layers import Layer
from tilewise.solvers.recurrent._recurrent import RecurrentSolver

if TYPE_CHECKING:
    from tilewise.solvers.recurrent._cluster_shapes import Wanted

MOST = 6
"""Configs of a forward alone that are offered."""
PAIRED = 3
"""Shapes of each kernel that are tried with each of the other for training."""
WAVES = 2
"""Shapes of each kernel with which all layers run at a time; then they are tried one after another."""
AROUND = {False: 4, True: 8}
"""Launches around the steps of a direction, and for training those of its backward too."""


class PersistentCluster(RecurrentSolver):
    """One launch for all steps of a layer in both directions, its recurrent weights on the chip.

    As in :class:`PersistentGrid` recurrent weights are read once (Diamos et al. 2016, "Persistent RNNs", section 3).
    Each direction, and each slice of the batch, is in a cluster of up to 16 multiprocessors, whose blocks exchange
    states through their shared memory. That takes about half the time of an exchange through the second cache. In
    return the weights must fit into one cluster. ``forward`` and ``backward`` hold the blocks of a cluster, its batch
    rows, and groups of a block's warps with sums of their own.

    Clusters of directions and slices do not wait for each other. Those that find no room on the device follow the first
    ones.

    A ``wave`` runs all layers of one direction at a time, as Appleyard, Kocisky and Blunsom (2016, "Optimizing
    performance of recurrent neural networks on GPUs", section 3) run theirs on streams. A layer's steps follow those
    of the layer below, and other clusters between them multiply what they pass on; backward the other way round. All
    these clusters have to fit on the device at a time.
    """

    name, version = "persistent_cluster", 1
    devices = frozenset({"cuda"})
    compiles = True
    most_configs = most_compiled = PAIRED**2
    error_bound = {"ieee": 1e-5, "tf32": 5e-3}  # noqa: RUF012

    def unsupported(self, p: RecurrentProblem) -> list[str]:
        """Reasons: no compiler for CUDA, a GPU without clusters, a packed batch, or weights that do not fit."""
        from tilewise.kernels.cuda.launch import unavailable

        reasons = [reason] if (reason := unavailable()) else []
        major, minor = architecture()
        if (major, minor) < (9, 0):
            reasons.append(f"needs compute capability 9.0 or later, not {major}.{minor}")
        if p.packed:
            reasons.append("packed batches, whose sequences end at different steps, are not supported")
        for backward in (False, True) if p.task == "training" else (False,):
            if not _shapes(p, backward):
                from tilewise.solvers.recurrent._cluster_shapes import cluster_excess

                which, over = "backward" if backward else "forward", cluster_excess(_wanted(p, backward))
                reasons.append(
                    f"{which}: a block's share of the weights is {over} bytes too large for a cluster"
                    if over
                    else f"{which}: {p.hidden} hidden units are too few for the blocks of a cluster"
                )
        return reasons

    def configs(self, p: RecurrentProblem) -> Iterable[Config]:
        """Shapes of both kernels, the fastest by a model of a step first."""
        found = []
        for wave in (True, False):
            forward, backward = (
                [shape for _, shape in _shapes(p, back) if not wave or _is_wave(p, shape)] for back in (False, True)
            )
            more = {"wave": 1} if wave else {}
            if p.task == "inference":
                found += [Config(forward=shape, **more) for shape in forward[: WAVES if wave else MOST]]
                continue
            count = WAVES if wave else PAIRED
            pairs = itertools.product(enumerate(forward[:count]), enumerate(backward[:count]))
            ranked = sorted((i + j, f, g) for (i, f), (j, g) in pairs)
            found += [Config(forward=f, backward=g, **more) for _, f, g in ranked]
        return found

    def most(self, p: RecurrentProblem) -> int:
        """As many kernels of a direction, where there is one."""
        return WAVES + PAIRED if p.task == "inference" else self.most_configs

    def cost(self, p: RecurrentProblem, c: Config) -> Cost:
        """The products of all steps at once, and the cycles of each step."""
        cycles = 0.0
        for name, backward in (("forward", False), ("backward", True)):
            if name in c:
                each = {shape: count for count, shape in _shapes(p, backward)}.get(_shape(c, name), 0.0)
                cycles += each * (1 if "wave" in c else p.layers)
        training = p.task == "training"
        launches = AROUND[training] * p.layers * p.directions
        rows, gates = p.time * p.batch, p.gates * p.hidden
        of_states = 2 * rows * p.layers * p.directions * gates * p.hidden
        # A step's products are in its cycles. The weights' gradients have one product for all steps.
        flops = p.flops - of_states * (2 if training else 1)
        rate = efficiency(p.device_type, rows, gates, p.inputs)
        return Cost(flops, p.bytes, launches, rate, serial_us=p.time * cycles / CYCLES_A_MICROSECOND)

    def layer(self, p: RecurrentProblem, c: Config) -> Layer:
        """Layers around the kernels. Raises ``SolverUnavailable`` with the compiler's or the driver's reason."""
        from tilewise.kernels.cuda.launch import compile_cubin
        from tilewise.solvers.recurrent._cluster_layers import ClusterLayers
        from tilewise.solvers.recurrent._cluster_recurrence import ClusterRecurrence, cluster_program, wave_clusters

        forward, elsewhere = _shape(c, "forward"), sought()
        shapes = (forward, _shape(c, "backward") if "backward" in c else forward)
        dtype, exact = p.torch_dtype("x"), precise(p)
        index = torch.cuda.current_device() if elsewhere is None else 0
        recurrence = ClusterRecurrence(p.cell, p.hidden, dtype, index, shapes, exact)
        wave, training = "wave" in c, p.task == "training"
        kinds = [(False, True), (True, True)][: 1 + training] if wave else []  # backward, wave
        # Layers with dropout between them, of which a problem says nothing, follow each other.
        kinds += [(False, False), (True, False)][: 1 + training] if training or not wave else []
        try:
            for backward, all_layers in kinds:
                made = cluster_program(p.cell, p.hidden, dtype, shapes[backward], exact, backward, all_layers)
                if elsewhere is None:
                    count = recurrence.compile(made).clusters(made.cluster, made.threads, made.shared)
                    needed = wave_clusters(p.layers, p.batch, made.rows)
                    if all_layers and count < needed:
                        raise SolverUnavailable(f"needs {needed} clusters of {made.cluster} blocks, not {count}")
                else:  # for another machine's GPU
                    compile_cubin(made.source(), elsewhere.instructions)
        except SolverUnavailable:
            raise
        except Exception as error:  # NVRTC and the driver raise errors of their own
            raise unavailable_by(error) from error
        return ClusterLayers(p, recurrence, wave)

    def hidden_workspace(self, p: RecurrentProblem, c: Config) -> int:
        """Bytes of what steps give the gates, of outputs between layers, and for training of all that is kept."""
        from tilewise.solvers.recurrent._grid_recurrence import padded

        size, every, wave = p.torch_dtype("x").itemsize, p.layers * p.directions, "wave" in c
        wide = padded(p.hidden, p.torch_dtype("x"))
        units, at_once = p.rows * wide, p.layers if wave else p.directions
        gates, outputs = units * p.gates * size, units * p.directions * size
        copies = 0  # where units are padded: of the gates, the states and the weights
        if wide != p.hidden:
            copies = (gates + p.gates * wide**2 * size) * p.directions + 2 * outputs
        if p.task == "inference":
            return gates * at_once + outputs * (p.layers - 1 if wave else min(2, p.layers - 1)) + copies
        kept = units * {"lstm": 4, "gru": size}.get(p.cell, 0)
        changes = (gates + (units * size if p.cell == "gru" else 0)) * at_once
        # Outputs of all layers, their gradients, and in a wave those between layers.
        return (gates + kept) * every + changes + outputs * (2 * p.layers + 1) + copies


def _wanted(p: RecurrentProblem, backward: bool) -> Wanted:
    """What shapes are asked for."""
    from tilewise.solvers.recurrent._cluster_shapes import Wanted

    return Wanted(
        p.cell, p.hidden, p.torch_dtype("x"), p.batch, p.directions, precise(p), backward, processors()
    )  # fmt: skip


def _is_wave(p: RecurrentProblem, shape: tuple[int, int, int]) -> bool:
    """Whether all layers can run at a time, and all their clusters fit."""
    from tilewise.solvers.recurrent._cluster_recurrence import MOST_LAYERS, wave_clusters
    from tilewise.solvers.recurrent._cluster_shapes import at_a_time
    from tilewise.solvers.recurrent._grid_recurrence import padded

    cluster, rows, _ = shape
    one = p.directions == 1 and 1 < p.layers <= MOST_LAYERS and padded(p.hidden, p.torch_dtype("x")) == p.hidden
    return one and wave_clusters(p.layers, p.batch, rows) <= at_a_time(cluster, processors())


def _shapes(p: RecurrentProblem, backward: bool) -> tuple[tuple[float, tuple[int, int, int]], ...]:
    """Shapes that fit, with the cycles of a step, the fastest first."""
    from tilewise.solvers.recurrent._cluster_shapes import cluster_shapes

    return cluster_shapes(_wanted(p, backward))


def _shape(c: Config, name: str) -> tuple[int, int, int]:
    """A config's shape. Raises ``ValueError`` for what is none."""
    value = c[name]
    if not isinstance(value, tuple) or len(value) != 3 or not all(isinstance(each, int) for each in value):
        raise ValueError(f"{name}={value!r}: three whole numbers would do: cluster, rows, columns")
    cluster, rows, columns = value
    return int(cluster), int(rows), int(columns)
