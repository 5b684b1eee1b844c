"""Which mesh of GPUs, data by space, is the fastest for a network, an input size and a limit of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tilewise import solvers
from tilewise.device import conv_precision, device_name
from tilewise.distributed.mesh_cost import (
    Cluster,
    MeshShape,
    StepCost,
    Timed,
    impossible,
    meshes,
    step_cost,
)
from tilewise.distributed.step_trace import StepTrace, trace_step
from tilewise.nn.within import memory_bytes
from tilewise.plan import Config, Plan, format_bytes
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.planner.estimate import Profile, estimate_ms
from tilewise.planner.options import RIGORS
from tilewise.problem import ConvProblem

__all__ = ["MeshChoice", "MeshResult", "PlannerClock", "choose_mesh"]


@dataclass(frozen=True, slots=True)
class MeshResult:
    """One mesh: its cost, or the ``reason`` why it is out. Both where its step does not fit."""

    mesh: MeshShape
    cost: StepCost | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class MeshChoice:
    """All meshes of ``gpus``: those that can be used by time an image, then the others.

    ``single`` is the same step on one GPU, for comparison. ``memory_limit`` is in bytes, ``None`` for no limit.
    """

    results: tuple[MeshResult, ...]
    single: MeshResult
    gpus: int
    batch: int
    memory_limit: int | None
    cluster: Cluster

    @property
    def best(self) -> MeshResult | None:
        """The fastest mesh; ``None`` where none can be used."""
        first = self.results[0]
        return None if first.reason else first


class PlannerClock:
    """Times by a planner: what it remembers of a problem; else what it remembers of the whole layer, scaled by the
    roofline; else the roofline of the direct method, with no workspace.

    With ``measuring`` set it plans each problem anew where nothing is remembered, under its ``options``. Raises
    ``ValueError`` naming ``rates`` where it has neither ``rates`` nor a device to measure them on.
    """

    def __init__(self, planner: Planner, options: Options, rates: Profile) -> None:
        self._planner, self._options, self._rates = planner, options, rates
        self._known: dict[ConvProblem, Timed | None] = {}
        self.measuring = False

    @property
    def launch_ms(self) -> float:
        """To launch one kernel."""
        return self._rates["launch"]

    def problem(self, problem: ConvProblem, whole: ConvProblem) -> Timed:
        """A rank's part of ``whole``. Raises :class:`~tilewise.planner.NoPlanError` while measuring."""
        known = self._remembered(problem)
        if known is None and self.measuring:
            known = self._known[problem] = _timed(self._planner.plan(problem, self._options))
        if known is not None:
            return known
        roofline, of_whole = self._roofline(problem), self._remembered(whole)
        if of_whole is None:
            return Timed(roofline)
        return Timed(of_whole.ms * roofline / self._roofline(whole), of_whole.workspace, "scaled")

    def other_ms(self, nbytes: float, flops: float, dtype: str) -> float:
        """The longer of arithmetic and traffic, and a launch."""
        return max(nbytes / self._rates["copy"], flops / self._rates[dtype]) + self._rates["launch"]

    def _roofline(self, problem: ConvProblem) -> float:
        return estimate_ms(problem, solvers.baseline().cost(problem, Config()), self._rates)

    def _remembered(self, problem: ConvProblem) -> Timed | None:
        if problem not in self._known:
            self._known[problem] = _timed(self._planner.remembered(problem, self._options))
        return self._known[problem]


def _timed(plan: Plan | None) -> Timed | None:
    if plan is None or not math.isfinite(plan.time_ms):
        return None
    return Timed(plan.time_ms, plan.workspace, "measured")


def choose_mesh(
    model: nn.Module,
    example: Any,
    *,
    gpus: int,
    memory_limit: int | str | None = None,
    cluster: Cluster | None = None,
    device: torch.device | str | None = None,
    rigor: str = "estimate",
    workspace: int | None = None,
    exclude: Sequence[str] = (),
    precision: str | None = None,
    training: bool = True,
    planner: Planner | None = None,
    rates: Profile | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> MeshChoice:
    """The fastest mesh of ``gpus`` for a training step of ``model`` on inputs shaped as ``example``, all ranks' batch.

    ``memory_limit`` is of one GPU: bytes, ``"16GiB"`` or ``"80%"`` of ``device``; parameters, gradients, activations
    and workspaces count, an optimizer's state does not. ``cluster`` has the links, by default those of H200 nodes.
    Tensors of ``example`` may be on the meta device: neither they nor the model are computed with.

    ``rigor="estimate"`` measures nothing but the rates of ``device`` where wisdom does not have them; plans that wisdom
    has are used. ``"measure"`` and ``"patient"`` plan the local convolutions of the mesh that leads until one leads by
    measured times. ``workspace`` is the limit of each kernel in bytes, ``exclude`` names solvers
    that no plan may use. ``rates`` take the place of the device's.

    Raises ``ValueError`` naming the argument at fault, and what :func:`~tilewise.distributed.step_trace.trace_step`
    raises.
    """
    if type(gpus) is not int or gpus < 1:
        raise ValueError(f"gpus={gpus!r}: an integer of 1 or more would do")
    if rigor not in RIGORS or rigor == "wisdom_only":
        raise ValueError(f"rigor={rigor!r}: estimate, measure or patient would do")
    place = torch.device(device) if device is not None else _place(model)
    limit = None if memory_limit is None else memory_bytes(memory_limit, place, "memory_limit")
    name = device_name(place)
    planner = Planner() if planner is None else planner
    options = Options(workspace, rigor=rigor, exclude=tuple(exclude))
    clock = PlannerClock(planner, options, planner.profile(name) if rates is None else rates)
    if precision is None:
        precision = conv_precision() if place.type == "cuda" else "ieee"
    search = _Search(model, example, name, precision, training, limit, cluster or Cluster(), clock, progress)
    single = search.result(meshes(1, search.whole.space)[0])
    results = [search.result(mesh) for mesh in meshes(gpus, search.whole.space)]
    if rigor != "estimate":
        search.measure(results)
        single = search.result(single.mesh)
    results.sort(key=_rank)
    return MeshChoice(tuple(results), single, gpus, search.whole.batch, limit, search.cluster)


def _rank(result: MeshResult) -> tuple[bool, bool, float]:
    return bool(result.reason), result.cost is None, 0.0 if result.cost is None else result.cost.image_ms


def _place(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None or first.device.type == "meta" else first.device


@dataclass
class _Search:
    """Costs of one step on any mesh; the step is traced once for every share of the batch."""

    model: nn.Module
    example: Any
    device: str
    precision: str
    training: bool
    limit: int | None
    cluster: Cluster
    clock: PlannerClock
    progress: Callable[[str], None]
    traces: dict[int, StepTrace] = field(default_factory=dict)

    @property
    def whole(self) -> StepTrace:
        """The step with all images."""
        return self.trace(1)

    def trace(self, data: int) -> StepTrace:
        """The step with the images of one of ``data`` groups."""
        if data not in self.traces:
            self.progress(f"batch / {data}")
            example = self.example
            if data > 1:
                batch = self.whole.batch
                example = tree_map_only(
                    torch.Tensor,
                    lambda t: t[: batch // data] if t.dim() and t.shape[0] == batch else t,
                    example,
                )
            self.traces[data] = trace_step(
                self.model, example, device=self.device, precision=self.precision, training=self.training
            )
        return self.traces[data]

    def result(self, mesh: MeshShape) -> MeshResult:
        """What ``mesh`` costs by what is known."""
        batch = self.whole.batch
        if batch % mesh.data:
            return MeshResult(mesh, None, f"a batch of {batch} is not divisible by data={mesh.data}")
        trace = self.trace(mesh.data)
        reason = impossible(trace, mesh)
        if reason:
            return MeshResult(mesh, None, reason)
        self.progress(str(mesh))
        try:
            cost = step_cost(trace, mesh, self.cluster, self.clock, batch)
        except NoPlanError as error:
            return MeshResult(mesh, None, " ".join(str(error).split()))
        if self.limit is not None and cost.memory.total > self.limit:
            return MeshResult(
                mesh, cost, f"needs {format_bytes(cost.memory.total)}, the limit is {format_bytes(self.limit)}"
            )
        return MeshResult(mesh, cost)

    def measure(self, results: list[MeshResult]) -> None:
        """Measure the mesh that leads, again and again, until the one that leads has been."""
        measured: set[MeshShape] = set()
        while True:
            results.sort(key=_rank)
            leader = results[0]
            if leader.reason or leader.mesh in measured:
                return
            measured.add(leader.mesh)
            self.clock.measuring = True
            try:
                results[0] = self.result(leader.mesh)
            finally:
                self.clock.measuring = False
            results[1:] = [r if r.mesh in measured or r.reason else self.result(r.mesh) for r in results[1:]]
