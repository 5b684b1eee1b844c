"""Shares of one layer's batch on several devices: measured by the planner, then run in turns with one device alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.configs import ERROR_LIMITS, framework_result
from harness.settings import BadInput, NothingToMeasure, Settings
from harness.sides import Call, Tensors, planned_call, race
from tilewise.machine.places import place_of
from tilewise.plan import Measurement, Plan
from tilewise.planner import Planner
from tilewise.planner.planner import shares_of
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.common.shares import Shares

__all__ = ["Shared", "Timed", "chosen_places", "measured"]


@dataclass(frozen=True)
class Timed:
    """One share: its plan, the images of each device by place, what found it, and its milliseconds in turns."""

    plan: Plan
    images: dict[str, int]
    found: str
    ms: float


@dataclass(frozen=True)
class Shared:
    """What came of one layer-pass: the best plan where its tensors lie alone, and the shares that were measured."""

    problem: ConvProblem
    alone: Timed
    shares: tuple[Timed, ...]
    log: tuple[Measurement, ...]

    def by(self, found: str) -> list[Timed]:
        """The shares that ``found`` names."""
        return [share for share in self.shares if share.found == found]

    @property
    def single(self) -> list[Timed]:
        """Each device alone, the one where the tensors lie first."""
        return [self.alone, *(share for share in self.by("alone") if len(share.images) == 1)]

    @property
    def best_single(self) -> Timed:
        """The fastest device alone."""
        return min(self.single, key=lambda each: each.ms)

    @property
    def summed_rate(self) -> float:
        """Images in a millisecond of all devices together, each at the rate that it has alone."""
        return sum(self.problem.batch / each.ms for each in self.single)

    def achieved(self, share: Timed) -> float:
        """The part of the summed rates that ``share`` reaches."""
        return self.problem.batch / share.ms / self.summed_rate

    @property
    def best(self) -> Timed:
        """The fastest share of all that were measured, one device alone among them."""
        return min((self.alone, *self.shares), key=lambda each: each.ms)

    @property
    def chosen(self) -> Timed:
        """What planning chooses by its own measurements, without the sweep."""
        own = [share for share in self.shares if share.found != "sweep"]
        return min((self.alone, *own), key=lambda each: each.plan.time_ms)


def chosen_places(settings: Settings, given: Sequence[str]) -> tuple[str, ...]:
    """The places of the devices that take shares beside the tensors' own.

    Without any: a CPU for tensors on a GPU, and the first GPU for tensors on a CPU. Where there is no GPU, the CPU
    stands for a second device beside itself, with half of its threads for each: that tries the machinery and says
    nothing of a gain. Raises :class:`BadInput` and :class:`NothingToMeasure`.
    """
    names = list(given)
    if not names:
        other = "cuda:0" if torch.cuda.is_available() else "cpu"
        names = ["cpu"] if settings.device.type == "cuda" else [other]
    found = []
    for name in names:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise BadInput(f"share_with={name!r}: cpu or cuda:N would do") from error
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise NothingToMeasure(f"share_with={name!r}: there are {torch.cuda.device_count()} GPUs here")
        found.append(place_of(torch.device("cuda", device.index or 0) if device.type == "cuda" else device))
    return tuple(found)


def measured(
    settings: Settings, planner: Planner, problem: ConvProblem, places: tuple[str, ...], steps: int, budget_ms: float
) -> Shared:
    """Find shares of ``problem`` by the planner's search and a sweep, then time all of them in turns.

    Raises ``RuntimeError`` where a share gives another result than torch.
    """
    alone, found, log = shares_of(planner, problem, settings.planning(), steps, places)
    tensors = Tensors(problem)
    distinct: dict[tuple[object, ...], tuple[str, Plan]] = {}
    for name, plan in found:
        known = distinct.setdefault((plan.config, name), (name, plan))
        if plan.time_ms < known[1].time_ms:
            distinct[plan.config, name] = name, plan
    plans = [("alone", alone[0]), *distinct.values()]
    calls = [_checked(problem, plan, tensors) for _, plan in plans]
    times = race(problem, calls, budget_ms)
    timed = [Timed(plan, _images(problem, plan), name, ms) for (name, plan), ms in zip(plans, times, strict=True)]
    return Shared(problem, timed[0], tuple(timed[1:]), tuple(log))


def _images(problem: ConvProblem, plan: Plan) -> dict[str, int]:
    """The images of each device by its place."""
    if plan.solver != "devices":
        return {"here": problem.batch}
    shares = Shares.of(plan.config)
    return dict(zip(shares.places, shares.images, strict=True))


def _checked(problem: ConvProblem, plan: Plan, tensors: Tensors) -> Call:
    """A call of ``plan``, after its result was compared with torch's."""
    call = planned_call(problem, plan, tensors)
    got = call()
    if isinstance(got, torch.Tensor):
        want = framework_result(problem, tensors)
        error = float((got.double() - want).norm() / want.double().norm())
        if problem.dtype == "fp32" and not error <= ERROR_LIMITS[problem.precision]:
            raise RuntimeError(f"{plan.solver} {plan.config} on {problem.key}: relative error {error:.1e}")
    return call
