"""Finds the fastest mesh of GPUs, data groups by spatial parts, for a network, an input size and a memory limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tilewise import solvers
from tilewise.distributed.mesh.cost import (
    Cluster,
    MeshShape,
    StepCost,
    Timed,
    impossible,
    meshes,
    step_cost,
)
from tilewise.distributed.mesh.events import StepTrace
from tilewise.distributed.mesh.trace import trace_step
from tilewise.machine.device import conv_precision, device_name
from tilewise.nn.memory.step_planner import memory_bytes
from tilewise.plan import Config, Plan, format_bytes
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.planner.options import RIGORS
from tilewise.planner.search.estimate import Profile, estimate_ms
from tilewise.problems.conv.problem import ConvProblem

__all__ = ["MeshChoice", "MeshResult", "PlannerClock", "choose_mesh"]


@dataclass(frozen=True, slots=True)
class MeshResult:
    """A mesh with its cost, or the ``reason`` why it cannot be used; with both where the step needs too much memory.

    >>> from tilewise.distributed.mesh import MeshResult, MeshShape
    >>> MeshResult(MeshShape(8, ()), None, "8 groups need 8 images").reason
    '8 groups need 8 images'
    """

    mesh: MeshShape
    cost: StepCost | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class MeshChoice:
    """All meshes of ``gpus`` GPUs: first those that can be used, sorted by time for each image, then the others.

    ``single`` is the same step on one GPU, for comparison. ``batch`` is the number of images of all ranks.
    ``memory_limit`` is in bytes, ``None`` for no limit.

    >>> image = torch.empty(1, 3, 64, 64, device="meta")
    >>> choice = choose_mesh(torch.nn.Conv2d(3, 8, 3), image, gpus=2)
    >>> choice.gpus, choice.best.mesh.gpus
    (2, 2)
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
    """The times of kernels, from a planner's wisdom and from the device's ``rates``.

    A problem's time is that of its remembered plan. Without one it is that of the whole layer's plan, scaled by the
    ratio of their roofline estimates. Without either it is the roofline estimate of the direct method, which needs no
    workspace. With ``measuring`` set, problems without a remembered plan are planned under ``options``.
    """

    def __init__(self, planner: Planner, options: Options, rates: Profile) -> None:
        self._planner, self._options, self._rates = planner, options, rates
        self._known: dict[ConvProblem, Timed | None] = {}
        self.measuring = False

    @property
    def launch_ms(self) -> float:
        """Milliseconds to launch one kernel."""
        return self._rates["launch"]

    def problem(self, problem: ConvProblem, whole: ConvProblem) -> Timed:
        """The time of ``problem``, a rank's part of ``whole``.

        Raises :class:`~tilewise.planner.NoPlanError` where ``measuring`` is set and no plan is found.
        """
        timed = self._remembered(problem)
        if timed is None and self.measuring:
            timed = self._known[problem] = _timed(self._planner.plan(problem, self._options))
        if timed is not None:
            return timed
        roofline, timed_whole = self._roofline(problem), self._remembered(whole)
        if timed_whole is None:
            return Timed(roofline)
        return Timed(timed_whole.ms * roofline / self._roofline(whole), timed_whole.workspace, "scaled")

    def other_ms(self, nbytes: float, flops: float, dtype: str) -> float:
        """Milliseconds of any other kernel: the longer of its arithmetic and its memory traffic, and a launch."""
        return max(nbytes / self._rates["copy"], flops / self._rates[dtype]) + self._rates["launch"]

    def _roofline(self, problem: ConvProblem) -> float:
        """Milliseconds of the framework's own solver as its flops and bytes allow."""
        return estimate_ms(problem, solvers.baseline(problem).cost(problem, Config()), self._rates)

    def _remembered(self, problem: ConvProblem) -> Timed | None:
        """The time of the plan that wisdom has for ``problem``, if any."""
        if problem not in self._known:
            self._known[problem] = _timed(self._planner.remembered(problem, self._options))
        return self._known[problem]


def _timed(plan: Plan | None) -> Timed | None:
    """The measured time of a plan; ``None`` where it has none."""
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
    """All meshes of ``gpus`` GPUs for a training step of ``model``, the fastest that can be used first.

    ``example`` has inputs with the batch of all ranks. Its tensors may be on the meta device, as nothing is computed
    with them or the model. ``memory_limit`` is that of one GPU: bytes, ``"16GiB"`` or ``"80%"`` of ``device``. It
    counts parameters, gradients, activations and workspaces, but not an optimizer's state. ``cluster`` has the links,
    by default those of H200 nodes.

    ``rigor="estimate"`` uses plans that wisdom has, and measures nothing but the rates of ``device``, where wisdom does
    not have them. ``"measure"`` and ``"patient"`` plan the local convolutions of the mesh that leads until one leads by
    measured times. ``workspace`` is the limit of each kernel in bytes, ``exclude`` names solvers that no plan may use,
    and ``rates`` replace those of the device. ``progress`` is called with a line of text before each piece of work.

    Raises ``ValueError`` naming the argument at fault, and what :func:`~tilewise.distributed.mesh.trace.trace_step`
    raises.

    >>> image = torch.empty(1, 3, 64, 64, device="meta")
    >>> choose_mesh(torch.nn.Conv2d(3, 8, 3), image, gpus=2).best.mesh.gpus
    2
    """
    if type(gpus) is not int or gpus < 1:
        raise ValueError(f"gpus={gpus!r}: an integer of 1 or more would do")
    if rigor not in RIGORS or rigor == "wisdom_only":
        raise ValueError(f"rigor={rigor!r}: estimate, measure or patient would do")
    torch_device = torch.device(device) if device is not None else _device_of(model)
    limit = None if memory_limit is None else memory_bytes(memory_limit, torch_device, "memory_limit")
    name = device_name(torch_device)
    planner = Planner() if planner is None else planner
    options = Options(workspace, rigor=rigor, exclude=tuple(exclude))
    clock = PlannerClock(planner, options, planner.profile(name) if rates is None else rates)
    if precision is None:
        precision = conv_precision() if torch_device.type == "cuda" else "ieee"
    search = _Search(model, example, name, precision, training, limit, cluster or Cluster(), clock, progress)
    single = search.result(meshes(1, search.whole.space)[0])
    results = [search.result(mesh) for mesh in meshes(gpus, search.whole.space)]
    if rigor != "estimate":
        search.measure(results)
        single = search.result(single.mesh)
    results.sort(key=_order)
    return MeshChoice(tuple(results), single, gpus, search.whole.batch, limit, search.cluster)


def _order(result: MeshResult) -> tuple[bool, bool, float]:
    """The sort key of a mesh: usable ones first, then those with a cost, each by time for an image."""
    return bool(result.reason), result.cost is None, 0.0 if result.cost is None else result.cost.image_ms


def _device_of(model: nn.Module) -> torch.device:
    """The device of the model's parameters; the CPU for a model without any or on the meta device."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None or first.device.type == "meta" else first.device


@dataclass
class _Search:
    """Finds the cost of one step on any mesh; the step is traced once for every size of a group's batch."""

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
        """The trace of the step with all images."""
        return self.trace(1)

    def trace(self, data: int) -> StepTrace:
        """The trace of the step with the images of one of ``data`` groups."""
        if data not in self.traces:
            self.progress(f"batch / {data}")
            example = self.example
            if data > 1:
                batch = self.whole.batch
                example = tree_map_only(
                    torch.Tensor,
                    lambda tensor: tensor[: batch // data] if tensor.dim() and tensor.shape[0] == batch else tensor,
                    example,
                )
            self.traces[data] = trace_step(
                self.model, example, device=self.device, precision=self.precision, training=self.training
            )
        return self.traces[data]

    def result(self, mesh: MeshShape) -> MeshResult:
        """The cost of ``mesh`` by the times known so far, or why it cannot be used."""
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
        """Measure the leading mesh and sort ``results`` again, until the leading one has been measured."""
        measured: set[MeshShape] = set()
        while True:
            results.sort(key=_order)
            leader = results[0]
            if leader.reason or leader.mesh in measured:
                return
            measured.add(leader.mesh)
            self.clock.measuring = True
            try:
                results[0] = self.result(leader.mesh)
            finally:
                self.clock.measuring = False
            results[1:] = [
                result if result.mesh in measured or result.reason else self.result(result.mesh)
                for result in results[1:]
            ]
